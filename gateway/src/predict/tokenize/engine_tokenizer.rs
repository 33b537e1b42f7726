//! Queries engines for tokens, and caches their responses.

use std::future::poll_fn;
use std::hash::RandomState;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, StatusCode};
use moka::sync::Cache;
use moongate_discovery::EngineKind;
use moongate_scheduler::ModelIndex;
use tokio::time::{Instant, timeout_at};

use super::query::TokenizeQuery;
use super::{EngineTokenizeError, RenderedMedium, response};
use crate::feedback::TokenizeMetrics;
use crate::fleet::{FleetMember, FleetSnapshot, UpstreamEndpoint};
use crate::fleet::{TokenizeMethod, TokenizeOutcome};
use crate::predict::prompt_tokens::{PredictionError, RequestPrompt};
use crate::request_body::SplicedBody;
use crate::upstream::{LegError, LegEvent, LegExchange, LegTimeouts, PreparedRequest};

/// Body bytes per millisecond of the time limit: half of what engines tokenize on one idle core (0.6 million tokens per second).
/// Larger bodies would time out.
const BYTES_PER_MS: u128 = 1_250;
/// Largest body, whatever the limit: about 128 thousand tokens. It is parsed on a thread that serves other requests too.
const MAX_BODY: usize = 512 << 10;
/// Response bytes per byte of the body: room for tokens with eight digits and more.
const MAX_RESPONSE_PER_BODY_BYTE: usize = 10;
/// Additional response bytes, for text that a template adds.
const RESPONSE_ALLOWANCE: usize = 256 << 10;
/// Cost of a cache entry in addition to its ids.
const ENTRY_OVERHEAD_BYTES: usize = 128;
/// Lifetime of a cache entry. Templates may print the date, and an engine may restart with another template.
const CACHE_TTL: Duration = Duration::from_secs(600);

/// Query for the tokens of images, recordings and videos.
const MEDIA_METHOD: TokenizeMethod = TokenizeMethod::RenderChat;
/// Largest response to it: some hundred thousand tokens.
const MAX_MEDIA_RESPONSE: usize = 4 << 20;

/// Tokens that an engine returned for a prompt.
#[derive(Debug, Clone)]
pub(in crate::predict) struct EngineTokens {
    pub(in crate::predict) ids: Arc<[u32]>,
    /// Whether they come from the cache.
    pub(in crate::predict) from_cache: bool,
}

#[derive(Debug)]
pub(crate) struct EngineTokenizer {
    limit: Duration,
    authorization: Option<HeaderValue>,
    cache: Cache<u64, Arc<[u32]>>,
    hasher: RandomState,
    metrics: Arc<TokenizeMetrics>,
}

impl EngineTokenizer {
    /// `limit` is the longest wait of a request; with zero, engines are not queried. `authorization` is sent to engines. `memory`
    /// limits the cached ids, in bytes.
    pub(crate) fn new(
        limit: Duration,
        authorization: Option<HeaderValue>,
        memory: u64,
        metrics: Arc<TokenizeMetrics>,
    ) -> Self {
        let cache = Cache::builder()
            .max_capacity(memory)
            .weigher(|_, ids: &Arc<[u32]>| {
                u32::try_from(4 * ids.len() + ENTRY_OVERHEAD_BYTES).unwrap_or(u32::MAX)
            })
            .time_to_live(CACHE_TTL)
            .build();
        Self { limit, authorization, cache, hasher: RandomState::new(), metrics }
    }

    /// Deadline of a query for a request that has just arrived.
    pub(in crate::predict) fn deadline(&self) -> Instant {
        Instant::now() + self.limit
    }

    /// The tokens of a prompt for engines of this kind. Returns at `deadline` at the latest.
    pub(in crate::predict) async fn tokens(
        &self,
        fleet: &FleetSnapshot,
        prompt: RequestPrompt<'_>,
        engine: EngineKind,
        deadline: Instant,
    ) -> Result<EngineTokens, PredictionError> {
        let RequestPrompt { api, model, body, .. } = prompt;
        if self.limit.is_zero() {
            return Err(PredictionError::NoTokenizer);
        }
        if body.len() > self.max_body() {
            return Err(PredictionError::EngineTokenize(EngineTokenizeError::TooLarge));
        }
        let query = TokenizeQuery::read(api, engine, body)?;
        let name = fleet.model_name(model).map_or("", AsRef::as_ref);
        let hash = query.hash(api, name, &self.hasher);
        if let Some(ids) = self.cache.get(&hash) {
            return Ok(EngineTokens { ids, from_cache: true });
        }
        let endpoint = choose_engine(fleet, model, engine, &query.methods, None)
            .map_err(PredictionError::EngineTokenize)?;
        let start = Instant::now();
        let mut result = self.query_engine(endpoint, &query, deadline).await;
        // An engine that has just failed has the fewest requests of all.
        if result == Err(EngineTokenizeError::Failed)
            && let Ok(other) = choose_engine(fleet, model, engine, &query.methods, Some(endpoint))
        {
            result = self.query_engine(other, &query, deadline).await;
        }
        self.metrics.record_engine_wait(start.elapsed());
        let ids = result.map_err(PredictionError::EngineTokenize)?;
        self.cache.insert(hash, ids.clone());
        Ok(EngineTokens { ids, from_cache: false })
    }

    /// Whether an engine of the model may return the tokens of images, recordings and videos.
    pub(in crate::predict) fn may_render_media(&self, fleet: &FleetSnapshot, model: ModelIndex) -> bool {
        !self.limit.is_zero() && choose_engine(fleet, model, EngineKind::Vllm, &[MEDIA_METHOD], None).is_ok()
    }

    /// Lets one engine render a chat with one image, recording or video.
    pub(in crate::predict) async fn render_medium(
        &self,
        fleet: &FleetSnapshot,
        model: ModelIndex,
        body: Bytes,
        limit: Duration,
    ) -> Result<RenderedMedium, EngineTokenizeError> {
        let endpoint = choose_engine(fleet, model, EngineKind::Vllm, &[MEDIA_METHOD], None)?;
        let methods = &endpoint.tokenize_methods;
        let _permit = methods.try_acquire().ok_or(EngineTokenizeError::Busy)?;
        if !methods.try_enter(MEDIA_METHOD) {
            return Err(EngineTokenizeError::NotOffered);
        }
        let response =
            self.exchange(endpoint, MEDIA_METHOD, body, MAX_MEDIA_RESPONSE, Instant::now() + limit).await;
        let result = response.and_then(|body| {
            response::parse_medium(&body).ok_or((TokenizeOutcome::Failed, EngineTokenizeError::Failed))
        });
        let outcome = result.as_ref().map_or_else(|(outcome, _)| *outcome, |_| TokenizeOutcome::Tokenized);
        // An image that the engine cannot load is no reason to query it for no others.
        if outcome != TokenizeOutcome::Rejected {
            methods.record(MEDIA_METHOD, outcome);
        }
        result.map_err(|(outcome, error)| match outcome {
            TokenizeOutcome::Unsupported => EngineTokenizeError::NotOffered,
            _ => error,
        })
    }

    /// Queries one engine, with the next method whenever one is unsupported.
    async fn query_engine(
        &self,
        endpoint: &Arc<UpstreamEndpoint>,
        query: &TokenizeQuery<'_>,
        deadline: Instant,
    ) -> Result<Arc<[u32]>, EngineTokenizeError> {
        let methods = &endpoint.tokenize_methods;
        let _permit = methods.try_acquire().ok_or(EngineTokenizeError::Busy)?;
        for method in query.methods.iter().copied().filter(|method| methods.try_enter(*method)) {
            let (outcome, result) = self.query_with(endpoint, method, query.body(method), deadline).await;
            methods.record(method, outcome);
            if outcome != TokenizeOutcome::Unsupported {
                return result;
            }
            tracing::debug!(engine = %endpoint.id, ?method, "engine does not support this tokenize method");
        }
        Err(EngineTokenizeError::NotOffered)
    }

    fn max_body(&self) -> usize {
        let within_limit = self.limit.as_millis().saturating_mul(BYTES_PER_MS);
        usize::try_from(within_limit).unwrap_or(usize::MAX).min(MAX_BODY)
    }

    async fn query_with(
        &self,
        endpoint: &Arc<UpstreamEndpoint>,
        method: TokenizeMethod,
        body: Bytes,
        deadline: Instant,
    ) -> (TokenizeOutcome, Result<Arc<[u32]>, EngineTokenizeError>) {
        let max_bytes = body.len() * MAX_RESPONSE_PER_BODY_BYTE + RESPONSE_ALLOWANCE;
        match self.exchange(endpoint, method, body, max_bytes, deadline).await {
            Err((outcome, error)) => (outcome, Err(error)),
            Ok(body) => match response::parse(method, &body) {
                Some(ids) => (TokenizeOutcome::Tokenized, Ok(ids)),
                None => (TokenizeOutcome::Failed, Err(EngineTokenizeError::Failed)),
            },
        }
    }

    /// The body of a successful response.
    async fn exchange(
        &self,
        endpoint: &Arc<UpstreamEndpoint>,
        method: TokenizeMethod,
        body: Bytes,
        max_bytes: usize,
        deadline: Instant,
    ) -> Result<Bytes, (TokenizeOutcome, EngineTokenizeError)> {
        let request = self.request(method, body);
        let remaining = deadline.saturating_duration_since(Instant::now());
        let (status, body) =
            match timeout_at(deadline, exchange(endpoint, request, remaining, max_bytes)).await {
                // The leg's own limit ends at the same time.
                Err(_) | Ok(Err(LegError::Timeout(..))) => {
                    return Err((TokenizeOutcome::Failed, EngineTokenizeError::Timeout));
                }
                Ok(Err(error)) => {
                    tracing::debug!(engine = %endpoint.id, ?method, %error, "tokenize query failed");
                    return Err((TokenizeOutcome::Failed, EngineTokenizeError::Failed));
                }
                Ok(Ok(response_parts)) => response_parts,
            };
        if status == StatusCode::OK {
            return Ok(body);
        }
        let outcome = TokenizeOutcome::of_status(status);
        let error = if outcome == TokenizeOutcome::Rejected {
            EngineTokenizeError::Rejected
        } else {
            EngineTokenizeError::Failed
        };
        Err((outcome, error))
    }

    fn request(&self, method: TokenizeMethod, body: Bytes) -> PreparedRequest {
        let mut headers = vec![(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        headers.extend(self.authorization.clone().map(|key| (AUTHORIZATION, key)));
        let body = SplicedBody::verbatim(body);
        PreparedRequest {
            method: Method::POST,
            uri: method.uri(),
            headers: Arc::default(),
            extra_headers: headers,
            body,
        }
    }
}

/// The engine to query: among available engines that support one of the methods, have a free permit and are not `failed`, the one with the
/// fewest requests.
fn choose_engine<'a>(
    fleet: &'a FleetSnapshot,
    model: ModelIndex,
    engine: EngineKind,
    methods: &[TokenizeMethod],
    failed: Option<&Arc<UpstreamEndpoint>>,
) -> Result<&'a Arc<UpstreamEndpoint>, EngineTokenizeError> {
    let serving = fleet
        .members_serving(model)
        .filter(|member| member.facts().is_some_and(|facts| facts.engine == engine));
    let available = serving.map(|FleetMember { endpoint, .. }| endpoint).filter(|endpoint| {
        failed.is_none_or(|failed| !Arc::ptr_eq(failed, endpoint))
            && endpoint.is_available()
            && methods.iter().any(|method| endpoint.tokenize_methods.is_open(*method))
    });
    let mut reason = EngineTokenizeError::NotOffered;
    let with_permit = available.filter(|endpoint| {
        let has_permit = endpoint.tokenize_methods.has_permit();
        if !has_permit {
            reason = EngineTokenizeError::Busy;
        }
        has_permit
    });
    let chosen = with_permit.min_by_key(|endpoint| (endpoint.in_flight.count(), fastrand::u32(..)));
    chosen.ok_or(reason)
}

/// Status and body of a response of at most `max_bytes` bytes.
async fn exchange(
    endpoint: &UpstreamEndpoint,
    request: PreparedRequest,
    limit: Duration,
    max_bytes: usize,
) -> Result<(StatusCode, Bytes), LegError> {
    let limits = LegTimeouts::new(limit, limit);
    let mut leg = LegExchange::start(endpoint.pool.clone(), request, limits, Instant::now());
    let (mut status, mut body) = (StatusCode::OK, BytesMut::new());
    loop {
        match poll_fn(|cx| leg.poll_event(cx)).await {
            LegEvent::Head(head) => status = head.status(),
            LegEvent::Idle => {}
            LegEvent::Data(data) if body.len() + data.len() <= max_bytes => body.extend_from_slice(&data),
            LegEvent::Data(_) => {
                return Err(LegError::ProtocolViolation("returned a response that is too large"));
            }
            LegEvent::End => return Ok((status, body.freeze())),
            LegEvent::Failed(error) => return Err(error),
        }
    }
}
