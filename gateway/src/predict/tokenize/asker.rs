//! Asks engines for tokens, and remembers what they told.

use std::future::poll_fn;
use std::hash::RandomState;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, StatusCode};
use moka::sync::Cache;
use moongate_discovery::Engine;
use moongate_scheduler::ModelIx;
use tokio::time::{Instant, timeout_at};

use super::query::Query;
use super::ways::{Outcome, Way};
use super::{NotTold, answer};
use crate::feedback::TokenizeMetrics;
use crate::fleet::{Endpoint, Fleet, Member};
use crate::predict::tokens::Unknown;
use crate::prompt::{Api, Spliced};
use crate::upstream::{Leg, LegError, LegEvent, LegLimits, PreparedRequest};

/// Bytes of a body for each millisecond of the limit, at most: half of what engines tokenise on one idle core (0.6 million tokens a
/// second). Larger ones would wait in vain.
const BYTES_PER_MS: u128 = 1_250;
/// Largest body, whatever the limit: about 128 thousand tokens. It is read on a thread that serves other requests too.
const MAX_BODY: usize = 512 << 10;
/// Bytes of an answer for each byte of the body, at most: a token that is written with eight digits and more.
const ANSWER_PER_BYTE: usize = 10;
/// Bytes of an answer besides, for what a template says of its own.
const ANSWER_BESIDES: usize = 256 << 10;
/// What an entry costs besides its ids.
const OVERHEAD: usize = 128;
/// How long it is remembered. Templates may print the date, and an engine may come back with another template.
const REMEMBERED: Duration = Duration::from_secs(600);

/// What an engine made of a prompt.
#[derive(Debug, Clone)]
pub(in crate::predict) struct Told {
    pub(in crate::predict) ids: Arc<[u32]>,
    /// It was asked about an equal prompt before.
    pub(in crate::predict) remembered: bool,
}

/// Engines as tokenizers.
#[derive(Debug)]
pub(crate) struct EngineTokenizer {
    limit: Duration,
    authorization: Option<HeaderValue>,
    remembered: Cache<u64, Arc<[u32]>>,
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
        let remembered = Cache::builder()
            .max_capacity(memory)
            .weigher(|_, ids: &Arc<[u32]>| u32::try_from(4 * ids.len() + OVERHEAD).unwrap_or(u32::MAX))
            .time_to_live(REMEMBERED)
            .build();
        Self { limit, authorization, remembered, hasher: RandomState::new(), metrics }
    }

    /// When a request that has come now must go on.
    pub(in crate::predict) fn deadline(&self) -> Instant {
        Instant::now() + self.limit
    }

    /// The tokens that engines of this kind make of the prompt in `body`. Takes no longer than until `deadline`.
    pub(in crate::predict) async fn tokens(
        &self,
        fleet: &Fleet,
        model: ModelIx,
        engine: Engine,
        (api, body): (Api, &Bytes),
        deadline: Instant,
    ) -> Result<Told, Unknown> {
        if self.limit.is_zero() {
            return Err(Unknown::NoTokenizer);
        }
        if body.len() > self.max_body() {
            return Err(Unknown::NotTold(NotTold::TooLarge));
        }
        let query = Query::read(api, engine, body)?;
        let name = fleet.model_name(model).map_or("", AsRef::as_ref);
        let hash = query.hash(api, name, &self.hasher);
        if let Some(ids) = self.remembered.get(&hash) {
            return Ok(Told { ids, remembered: true });
        }
        let endpoint = choose(fleet, model, engine, &query, None).map_err(Unknown::NotTold)?;
        let start = Instant::now();
        let mut told = self.ask(endpoint, &query, deadline).await;
        // An engine that has just died has the fewest requests of all.
        if told == Err(NotTold::Failed)
            && let Ok(other) = choose(fleet, model, engine, &query, Some(endpoint))
        {
            told = self.ask(other, &query, deadline).await;
        }
        self.metrics.asked(start.elapsed());
        let ids = told.map_err(Unknown::NotTold)?;
        self.remembered.insert(hash, ids.clone());
        Ok(Told { ids, remembered: false })
    }

    /// Asks one engine, in one way after the other while it does not offer them.
    async fn ask(
        &self,
        endpoint: &Arc<Endpoint>,
        query: &Query<'_>,
        deadline: Instant,
    ) -> Result<Arc<[u32]>, NotTold> {
        let ways = &endpoint.tokenize_ways;
        let _place = ways.place().ok_or(NotTold::Busy)?;
        for way in query.ways.iter().copied().filter(|way| ways.enter(*way)) {
            let (outcome, told) = self.ask_so(endpoint, way, query.body(way), deadline).await;
            ways.record(way, outcome);
            if outcome != Outcome::Missing {
                return told;
            }
            tracing::debug!(engine = %endpoint.id, ?way, "the engine does not tell tokens so");
        }
        Err(NotTold::NotOffered)
    }

    fn max_body(&self) -> usize {
        let in_time = self.limit.as_millis().saturating_mul(BYTES_PER_MS);
        usize::try_from(in_time).unwrap_or(usize::MAX).min(MAX_BODY)
    }

    async fn ask_so(
        &self,
        endpoint: &Arc<Endpoint>,
        way: Way,
        body: Bytes,
        deadline: Instant,
    ) -> (Outcome, Result<Arc<[u32]>, NotTold>) {
        let longest = body.len() * ANSWER_PER_BYTE + ANSWER_BESIDES;
        let request = self.request(way, body);
        let left = deadline.saturating_duration_since(Instant::now());
        let (status, body) = match timeout_at(deadline, exchange(endpoint, request, left, longest)).await {
            // The leg's own limit ends at the same time.
            Err(_) | Ok(Err(LegError::Timeout(..))) => return (Outcome::Failed, Err(NotTold::Timeout)),
            Ok(Err(error)) => {
                tracing::debug!(engine = %endpoint.id, ?way, %error, "the engine was asked for tokens in vain");
                return (Outcome::Failed, Err(NotTold::Failed));
            }
            Ok(Ok(answer)) => answer,
        };
        if status != StatusCode::OK {
            let outcome = Outcome::of_status(status);
            let why = if outcome == Outcome::Refused { NotTold::Refused } else { NotTold::Failed };
            return (outcome, Err(why));
        }
        match answer::read(way, &body) {
            Some(ids) => (Outcome::Told, Ok(ids)),
            None => (Outcome::Failed, Err(NotTold::Failed)),
        }
    }

    fn request(&self, way: Way, body: Bytes) -> PreparedRequest {
        let mut own = vec![(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        own.extend(self.authorization.clone().map(|key| (AUTHORIZATION, key)));
        let (headers, body) = (Arc::default(), Spliced::verbatim(body));
        PreparedRequest { method: Method::POST, uri: way.uri(), headers, own, body }
    }
}

/// The engine to ask: of those that are well, offer it, have a place and have not `failed` just now, the one with the fewest requests.
fn choose<'a>(
    fleet: &'a Fleet,
    model: ModelIx,
    engine: Engine,
    query: &Query<'_>,
    failed: Option<&Arc<Endpoint>>,
) -> Result<&'a Arc<Endpoint>, NotTold> {
    let serving =
        fleet.serving(model).filter(|member| member.facts().is_some_and(|facts| facts.engine == engine));
    let well = serving.map(|Member { endpoint, .. }| endpoint).filter(|endpoint| {
        failed.is_none_or(|failed| !Arc::ptr_eq(failed, endpoint))
            && endpoint.is_sound()
            && query.ways.iter().any(|way| endpoint.tokenize_ways.is_open(*way))
    });
    let mut why_not = NotTold::NotOffered;
    let with_place = well.filter(|endpoint| {
        let has_place = endpoint.tokenize_ways.has_place();
        if !has_place {
            why_not = NotTold::Busy;
        }
        has_place
    });
    let chosen = with_place.min_by_key(|endpoint| (endpoint.in_flight.count(), fastrand::u32(..)));
    chosen.ok_or(why_not)
}

/// Status and body of an answer of at most `longest` bytes.
async fn exchange(
    endpoint: &Endpoint,
    request: PreparedRequest,
    limit: Duration,
    longest: usize,
) -> Result<(StatusCode, Bytes), LegError> {
    let limits = LegLimits::new(limit, limit);
    let mut leg = Leg::start(endpoint.pool.clone(), request, limits, Instant::now());
    let (mut status, mut body) = (StatusCode::OK, BytesMut::new());
    loop {
        match poll_fn(|cx| leg.poll_event(cx)).await {
            LegEvent::Head(head) => status = head.status(),
            LegEvent::Quiet => {}
            LegEvent::Data(data) if body.len() + data.len() <= longest => body.extend_from_slice(&data),
            LegEvent::Data(_) => return Err(LegError::Garbage("the answer is too large")),
            LegEvent::End => return Ok((status, body.freeze())),
            LegEvent::Failed(error) => return Err(error),
        }
    }
}
