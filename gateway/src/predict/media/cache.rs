//! Cache of the tokens that engines returned for images, recordings and videos.

use std::hash::{BuildHasher as _, Hash, Hasher, RandomState};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moka::Expiry;
use moka::sync::Cache;
use moongate_tokenize::MediaReference;
use tokio::sync::mpsc;

use super::MediumTokens;
use super::query::{MediaOptions, MediaQuery};
use crate::feedback::{MediaQueryResult, TokenizeMetrics};
use crate::memory::MemoryBudget;

/// Lifetime of an entry for data in a request. An engine may restart with other options.
const INLINE_TTL: Duration = Duration::from_secs(3600);
/// Lifetime of an entry for an address or a client's name, whose content may change.
const REFERENCE_TTL: Duration = Duration::from_secs(600);
/// Time until the engine is queried again for something that it rejected.
const FAILURE_TTL: Duration = Duration::from_secs(600);
/// Longest time of a query in the queue and at the engine.
const QUERY_TTL: Duration = Duration::from_secs(120);
/// Queries that wait. Further ones are dropped, and repeated by the next request with the same content.
const MAX_QUEUED: usize = 256;
/// Cost of a cache entry in addition to its tokens.
const ENTRY_OVERHEAD_BYTES: usize = 256;

/// The part of a request that determines the tokens of one medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::predict) struct MediumKey(u64);

/// State of one medium.
#[derive(Debug, Clone)]
enum MediumState {
    Queried,
    Cached(Arc<MediumTokens>),
    Failed,
}

#[derive(Debug, Clone)]
struct CachedMedium {
    state: MediumState,
    lifetime: Duration,
}

struct LifetimeExpiry;

/// Tokens of media that engines have returned, with LRU eviction.
#[derive(Debug)]
pub(crate) struct MediaTokenCache {
    media: Cache<MediumKey, CachedMedium>,
    queries: mpsc::Sender<MediaQuery>,
    hasher: RandomState,
    /// Budget for the content in queued queries.
    memory: Arc<MemoryBudget>,
    metrics: Arc<TokenizeMetrics>,
}

impl MediaTokenCache {
    /// An empty cache of at most `bytes`, and the queries that its owner sends to engines.
    pub(crate) fn new(
        bytes: u64,
        memory: Arc<MemoryBudget>,
        metrics: Arc<TokenizeMetrics>,
    ) -> (Arc<Self>, MediaQueries) {
        let (queries, queue) = mpsc::channel(MAX_QUEUED);
        let media = Cache::builder()
            .max_capacity(bytes)
            .weigher(|_, cached: &CachedMedium| u32::try_from(cached.bytes()).unwrap_or(u32::MAX))
            .expire_after(LifetimeExpiry)
            .build();
        let cache = Self { media, queries, hasher: RandomState::new(), memory, metrics };
        (Arc::new(cache), MediaQueries(queue))
    }

    /// The key of a medium in a request for a model.
    pub(in crate::predict) fn key(
        &self,
        model: &str,
        options: &MediaOptions<'_>,
        reference: &MediaReference,
    ) -> MediumKey {
        let mut hasher = self.hasher.build_hasher();
        (model, options.texts(), reference.modality(), reference.uuid()).hash(&mut hasher);
        // vLLM names the content by the client's name, whatever the data is.
        if reference.uuid().is_none() {
            // Writing to a hasher cannot fail.
            let _ = reference.write_json(&mut HashWriter(&mut hasher));
        }
        MediumKey(hasher.finish())
    }

    /// The tokens of a medium, if an engine has returned them.
    pub(super) fn get(&self, key: MediumKey) -> Option<Arc<MediumTokens>> {
        match self.media.get(&key)?.state {
            MediumState::Cached(known) => Some(known),
            MediumState::Queried | MediumState::Failed => None,
        }
    }

    /// Queues a query for a medium, unless there was one before. `make` is only called for the first.
    pub(super) fn query_once(&self, key: MediumKey, make: impl FnOnce() -> Option<MediaQuery>) {
        let queried = CachedMedium { state: MediumState::Queried, lifetime: QUERY_TTL };
        if !self.media.entry(key).or_insert(queried).is_fresh() {
            return;
        }
        let query = make().and_then(|query| query.reserve(&self.memory));
        if query.is_none_or(|query| self.queries.try_send(query).is_err()) {
            self.metrics.record_media_query(MediaQueryResult::Dropped);
            self.media.invalidate(&key);
        }
    }

    /// Records the result of a query.
    pub(in crate::predict) fn record(&self, key: MediumKey, is_inline: bool, result: Option<MediumTokens>) {
        let (state, lifetime) = match result {
            Some(known) if is_inline => (MediumState::Cached(Arc::new(known)), INLINE_TTL),
            Some(known) => (MediumState::Cached(Arc::new(known)), REFERENCE_TTL),
            None => (MediumState::Failed, FAILURE_TTL),
        };
        self.media.insert(key, CachedMedium { state, lifetime });
    }

    /// Allows a later request to query again.
    pub(super) fn remove(&self, key: MediumKey) {
        self.media.invalidate(&key);
    }
}

/// Queries of a [`MediaTokenCache`] that are to be sent.
#[derive(Debug)]
pub(crate) struct MediaQueries(mpsc::Receiver<MediaQuery>);

impl MediaQueries {
    pub(super) async fn next(&mut self) -> Option<MediaQuery> {
        self.0.recv().await
    }
}

impl CachedMedium {
    fn bytes(&self) -> usize {
        let known = match &self.state {
            MediumState::Cached(known) => {
                4 * (known.tokens.len() + known.placeholder.len()) + known.identifier.len()
            }
            MediumState::Queried | MediumState::Failed => 0,
        };
        known + ENTRY_OVERHEAD_BYTES
    }
}

impl Expiry<MediumKey, CachedMedium> for LifetimeExpiry {
    fn expire_after_create(&self, _: &MediumKey, cached: &CachedMedium, _: Instant) -> Option<Duration> {
        Some(cached.lifetime)
    }

    fn expire_after_update(
        &self,
        _: &MediumKey,
        cached: &CachedMedium,
        _: Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        Some(cached.lifetime)
    }
}

/// Hashes what is written.
struct HashWriter<'a, H>(&'a mut H);

impl<H: Hasher> io::Write for HashWriter<'_, H> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::feedback::GatewayMetrics;

    const KEY: MediumKey = MediumKey(1);

    fn cache(memory: u64) -> (Arc<MediaTokenCache>, MediaQueries) {
        let memory = MemoryBudget::new("--prompt-memory", memory);
        MediaTokenCache::new(1 << 20, memory, GatewayMetrics::new(None).tokenize)
    }

    fn query(body: &'static [u8]) -> Option<MediaQuery> {
        Some(MediaQuery { key: KEY, model: "m".into(), is_inline: true, body: body.into() })
    }

    fn queued(queries: &mut MediaQueries) -> usize {
        std::iter::from_fn(|| queries.0.try_recv().ok()).count()
    }

    #[test]
    fn a_medium_is_queried_once() {
        let (cache, mut queries) = cache(1 << 20);
        (0..3).for_each(|_| cache.query_once(KEY, || query(b"{}")));
        assert_eq!((queued(&mut queries), cache.get(KEY)), (1, None));
        cache.record(KEY, true, None);
        cache.query_once(KEY, || query(b"{}"));
        assert_eq!((queued(&mut queries), cache.get(KEY)), (0, None), "the engine has rejected it");
        let tokens =
            || MediumTokens { placeholder: [1].into(), tokens: [2, 3].into(), identifier: "x".into() };
        cache.record(KEY, true, Some(tokens()));
        cache.query_once(KEY, || query(b"{}"));
        assert_eq!((queued(&mut queries), cache.get(KEY)), (0, Some(Arc::new(tokens()))));
    }

    #[test]
    fn a_query_that_cannot_be_queued_is_repeated() {
        let (cache, mut queries) = cache(10);
        cache.query_once(KEY, || query(b"longer than the memory"));
        assert_eq!(queued(&mut queries), 0);
        cache.query_once(KEY, || query(b"{}"));
        cache.remove(KEY);
        cache.query_once(KEY, || query(b"{}"));
        assert_eq!(queued(&mut queries), 2);
    }

    #[test]
    fn content_that_may_change_is_cached_for_a_shorter_time() {
        let lifetime = |is_inline| {
            let (cache, _queries) = cache(10);
            cache.record(
                KEY,
                is_inline,
                Some(MediumTokens { placeholder: [1].into(), tokens: [2].into(), identifier: "x".into() }),
            );
            cache.media.get(&KEY).unwrap().lifetime
        };
        assert_eq!((lifetime(true), lifetime(false)), (INLINE_TTL, REFERENCE_TTL));
    }
}
