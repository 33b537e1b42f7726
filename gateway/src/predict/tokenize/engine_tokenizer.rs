//! Asks engines for tokens, and remembers what they told.

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

use super::methods::{TokenizeMethod, TokenizeOutcome};
use super::query::TokenizeQuery;
use super::{EngineTokenizeError, response};
use crate::feedback::TokenizeMetrics;
use crate::fleet::{FleetMember, FleetSnapshot, UpstreamEndpoint};
use crate::predict::prompt_tokens::PredictionError;
use crate::request_body::{InferenceApi, SplicedBody};
use crate::upstream::{LegError, LegEvent, LegExchange, LegTimeouts, PreparedRequest};

/// Bytes of a body for each millisecond of the limit, at most: half of what engines tokenise on one idle core (0.6 million tokens a
/// second). Larger ones would wait in vain.
const BYTES_PER_MS: u128 = 1_250;
/// Largest body, whatever the limit: about 128 thousand tokens. It is read on a thread that serves other requests too.
const MAX_BODY: usize = 512 << 10;
/// Bytes of an answer for each byte of the body, at most: a token that is written with eight digits and more.
const MAX_RESPONSE_PER_BODY_BYTE: usize = 10;
/// Bytes of an answer besides, for what a template says of its own.
const RESPONSE_ALLOWANCE: usize = 256 << 10;
/// What an entry costs besides its ids.
const ENTRY_OVERHEAD_BYTES: usize = 128;
/// How long it is remembered. Templates may print the date, and an engine may come back with another template.
const CACHE_TTL: Duration = Duration::from_secs(600);

/// What an engine made of a prompt.
#[derive(Debug, Clone)]
pub(in crate::predict) struct EngineTokens {
    pub(in crate::predict) ids: Arc<[u32]>,
    /// It was asked about an equal prompt before.
    pub(in crate::predict) from_cache: bool,
}

/// Engines as tokenizers.
#[derive(Debug)]
pub(crate) struct EngineTokenizer {
    limit: Duration,
    authorization: Option<HeaderValue>,
    cache: Cache<u64, Arc<[u32]>>,
    hasher: RandomState,
    metrics: Arc<TokenizeMetrics>,
}

impl EngineTokenizer {
    /// `limit` is the longest time that a request waits; zero queries none. `authorization` is sent to engines. `memory` bounds the ids that are cached, in bytes.
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

    /// When a request that has come now must go on.
    pub(in crate::predict) fn deadline(&self) -> Instant {
        Instant::now() + self.limit
    }

    /// The tokens that engines of this kind make of the prompt in `body`. Takes no longer than until `deadline`.
    pub(in crate::predict) async fn tokens(
        &self,
        fleet: &FleetSnapshot,
        model: ModelIndex,
        engine: EngineKind,
        (api, body): (InferenceApi, &Bytes),
        deadline: Instant,
    ) -> Result<EngineTokens, PredictionError> {
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
        let endpoint =
            choose_engine(fleet, model, engine, &query, None).map_err(PredictionError::EngineTokenize)?;
        let start = Instant::now();
        let mut told = self.query_engine(endpoint, &query, deadline).await;
        // An engine that has just died has the fewest requests of all.
        if told == Err(EngineTokenizeError::Failed)
            && let Ok(other) = choose_engine(fleet, model, engine, &query, Some(endpoint))
        {
            told = self.query_engine(other, &query, deadline).await;
        }
        self.metrics.record_engine_wait(start.elapsed());
        let ids = told.map_err(PredictionError::EngineTokenize)?;
        self.cache.insert(hash, ids.clone());
        Ok(EngineTokens { ids, from_cache: false })
    }

    /// Asks one engine, in one way after the other while it does not offer them.
    async fn query_engine(
        &self,
        endpoint: &Arc<UpstreamEndpoint>,
        query: &TokenizeQuery<'_>,
        deadline: Instant,
    ) -> Result<Arc<[u32]>, EngineTokenizeError> {
        let ways = &endpoint.tokenize_methods;
        let _place = ways.try_acquire().ok_or(EngineTokenizeError::Busy)?;
        for way in query.methods.iter().copied().filter(|way| ways.try_enter(*way)) {
            let (outcome, told) = self.query_with(endpoint, way, query.body(way), deadline).await;
            ways.record(way, outcome);
            if outcome != TokenizeOutcome::Unsupported {
                return told;
            }
            tracing::debug!(engine = %endpoint.id, ?way, "the engine does not tell tokens so");
        }
        Err(EngineTokenizeError::NotOffered)
    }

    fn max_body(&self) -> usize {
        let in_time = self.limit.as_millis().saturating_mul(BYTES_PER_MS);
        usize::try_from(in_time).unwrap_or(usize::MAX).min(MAX_BODY)
    }

    async fn query_with(
        &self,
        endpoint: &Arc<UpstreamEndpoint>,
        way: TokenizeMethod,
        body: Bytes,
        deadline: Instant,
    ) -> (TokenizeOutcome, Result<Arc<[u32]>, EngineTokenizeError>) {
        let longest = body.len() * MAX_RESPONSE_PER_BODY_BYTE + RESPONSE_ALLOWANCE;
        let request = self.request(way, body);
        let left = deadline.saturating_duration_since(Instant::now());
        let (status, body) = match timeout_at(deadline, exchange(endpoint, request, left, longest)).await {
            // The leg's own limit ends at the same time.
            Err(_) | Ok(Err(LegError::Timeout(..))) => {
                return (TokenizeOutcome::Failed, Err(EngineTokenizeError::Timeout));
            }
            Ok(Err(error)) => {
                tracing::debug!(engine = %endpoint.id, ?way, %error, "the engine was asked for tokens in vain");
                return (TokenizeOutcome::Failed, Err(EngineTokenizeError::Failed));
            }
            Ok(Ok(answer)) => answer,
        };
        if status != StatusCode::OK {
            let outcome = TokenizeOutcome::of_status(status);
            let why = if outcome == TokenizeOutcome::Rejected {
                EngineTokenizeError::Rejected
            } else {
                EngineTokenizeError::Failed
            };
            return (outcome, Err(why));
        }
        match response::parse(way, &body) {
            Some(ids) => (TokenizeOutcome::Tokenized, Ok(ids)),
            None => (TokenizeOutcome::Failed, Err(EngineTokenizeError::Failed)),
        }
    }

    fn request(&self, way: TokenizeMethod, body: Bytes) -> PreparedRequest {
        let mut own = vec![(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        own.extend(self.authorization.clone().map(|key| (AUTHORIZATION, key)));
        let (headers, body) = (Arc::default(), SplicedBody::verbatim(body));
        PreparedRequest { method: Method::POST, uri: way.uri(), headers, extra_headers: own, body }
    }
}

/// The engine to ask: of those that are well, offer it, have a place and have not `failed` just now, the one with the fewest requests.
fn choose_engine<'a>(
    fleet: &'a FleetSnapshot,
    model: ModelIndex,
    engine: EngineKind,
    query: &TokenizeQuery<'_>,
    failed: Option<&Arc<UpstreamEndpoint>>,
) -> Result<&'a Arc<UpstreamEndpoint>, EngineTokenizeError> {
    let serving = fleet
        .members_serving(model)
        .filter(|member| member.facts().is_some_and(|facts| facts.engine == engine));
    let well = serving.map(|FleetMember { endpoint, .. }| endpoint).filter(|endpoint| {
        failed.is_none_or(|failed| !Arc::ptr_eq(failed, endpoint))
            && endpoint.is_available()
            && query.methods.iter().any(|way| endpoint.tokenize_methods.is_open(*way))
    });
    let mut why_not = EngineTokenizeError::NotOffered;
    let with_place = well.filter(|endpoint| {
        let has_place = endpoint.tokenize_methods.has_permit();
        if !has_place {
            why_not = EngineTokenizeError::Busy;
        }
        has_place
    });
    let chosen = with_place.min_by_key(|endpoint| (endpoint.in_flight.count(), fastrand::u32(..)));
    chosen.ok_or(why_not)
}

/// Status and body of an answer of at most `longest` bytes.
async fn exchange(
    endpoint: &UpstreamEndpoint,
    request: PreparedRequest,
    limit: Duration,
    longest: usize,
) -> Result<(StatusCode, Bytes), LegError> {
    let limits = LegTimeouts::new(limit, limit);
    let mut leg = LegExchange::start(endpoint.pool.clone(), request, limits, Instant::now());
    let (mut status, mut body) = (StatusCode::OK, BytesMut::new());
    loop {
        match poll_fn(|cx| leg.poll_event(cx)).await {
            LegEvent::Head(head) => status = head.status(),
            LegEvent::Idle => {}
            LegEvent::Data(data) if body.len() + data.len() <= longest => body.extend_from_slice(&data),
            LegEvent::Data(_) => return Err(LegError::ProtocolViolation("the answer is too large")),
            LegEvent::End => return Ok((status, body.freeze())),
            LegEvent::Failed(error) => return Err(error),
        }
    }
}
