//! Caches of earlier prompts, shared by all models within one memory limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::body_cache::{BodyCache, ModelBodyCache, body_cache};
use crate::segment_cache::{ModelSegmentCache, SegmentCache, segment_cache};

/// Caches shared by all models. Clones share the same caches.
#[derive(Clone)]
pub struct PromptCaches {
    bodies: BodyCache,
    segments: SegmentCache,
    owners: Arc<AtomicU32>,
}

impl PromptCaches {
    /// Caches of at most `bytes`: a quarter for bodies of conversations and what is rendered of them, the rest for tokens.
    #[must_use]
    pub fn new(bytes: u64) -> PromptCaches {
        let (bodies, segments) = (body_cache(bytes / 4), segment_cache(bytes - bytes / 4));
        PromptCaches { bodies, segments, owners: Arc::default() }
    }

    /// The caches for one more model, under a key of its own.
    pub(crate) fn for_model(&self) -> (ModelBodyCache, ModelSegmentCache) {
        let owner = self.owners.fetch_add(1, Ordering::Relaxed);
        (
            ModelBodyCache::new(self.bodies.clone(), owner),
            ModelSegmentCache::new(self.segments.clone(), owner),
        )
    }
}

impl std::fmt::Debug for PromptCaches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptCaches").field("models", &self.owners).finish_non_exhaustive()
    }
}
