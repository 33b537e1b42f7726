//! In-process cache of frequently read objects.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use moka::Expiry;
use moka::sync::Cache;

/// Bytes of overhead per entry, added to its key and value.
const OVERHEAD: usize = 128;

/// Caches objects until their lease expires, up to a number of bytes. Infrequently read objects are evicted first. `None` if off.
#[derive(Debug)]
pub(crate) struct HotCache(Option<Cache<Arc<str>, CachedObject>>);

#[derive(Clone, Debug)]
struct CachedObject {
    bytes: Bytes,
    expires_at: Instant,
}

struct LeaseExpiry;

impl Expiry<Arc<str>, CachedObject> for LeaseExpiry {
    fn expire_after_create(&self, _: &Arc<str>, cached: &CachedObject, now: Instant) -> Option<Duration> {
        Some(cached.expires_at.saturating_duration_since(now))
    }

    fn expire_after_update(
        &self,
        _: &Arc<str>,
        cached: &CachedObject,
        now: Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        Some(cached.expires_at.saturating_duration_since(now))
    }
}

impl HotCache {
    /// A cache of at most `bytes` bytes; 0 turns it off.
    pub(crate) fn new(bytes: u64) -> Self {
        let weight = |key: &Arc<str>, cached: &CachedObject| {
            u32::try_from(OVERHEAD + key.len() + cached.bytes.len()).unwrap_or(u32::MAX)
        };
        let build = || Cache::builder().max_capacity(bytes).weigher(weight).expire_after(LeaseExpiry).build();
        Self((bytes > 0).then(build))
    }

    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    pub(crate) fn get(&self, key: &str) -> Option<Bytes> {
        let cached = self.0.as_ref()?.get(key)?;
        // The cache may return expired entries for a short time.
        (Instant::now() < cached.expires_at).then_some(cached.bytes)
    }

    pub(crate) fn insert(&self, key: &str, bytes: &Bytes, until: Instant) {
        if let Some(cache) = &self.0 {
            cache.insert(key.into(), CachedObject { bytes: bytes.clone(), expires_at: until });
        }
    }

    /// Invalidates an object that is being replaced or removed.
    pub(crate) fn remove(&self, key: &str) {
        if let Some(cache) = &self.0 {
            cache.invalidate(key);
        }
    }

    pub(crate) fn clear(&self) {
        if let Some(cache) = &self.0 {
            cache.invalidate_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_cached_until_their_lease_expires() {
        let cache = HotCache::new(1 << 20);
        let now = Instant::now();
        cache.insert("short", &Bytes::from_static(b"s"), now);
        cache.insert("long", &Bytes::from_static(b"l"), now + Duration::from_secs(3600));
        assert_eq!(cache.get("short"), None);
        assert_eq!(cache.get("long").as_deref(), Some(&b"l"[..]));
        cache.remove("long");
        assert_eq!(cache.get("long"), None);
        let off = HotCache::new(0);
        off.insert("long", &Bytes::from_static(b"l"), now + Duration::from_secs(3600));
        assert!(!off.is_on() && off.get("long").is_none());
    }

    #[test]
    fn cache_size_stays_within_its_limit() {
        let cache = HotCache::new(100_000);
        let until = Instant::now() + Duration::from_secs(3600);
        for n in 0..100 {
            cache.insert(&format!("{n}"), &Bytes::from(vec![0; 10_000]), until);
        }
        let inner = cache.0.as_ref().unwrap();
        inner.run_pending_tasks();
        assert!(inner.weighted_size() <= 100_000, "{}", inner.weighted_size());
        assert!(inner.entry_count() > 0);
    }
}
