//! Caches of earlier prompts, shared by all models within one memory limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::body_cache::{BodyCache, ModelBodyCache, body_cache};
use crate::conversation_cache::{ConversationCache, ModelConversationCache, conversation_cache};

/// Caches shared by all models. Clones share the same caches.
#[derive(Clone)]
pub struct PromptCaches<S> {
    bodies: BodyCache,
    conversations: ConversationCache<S>,
    owners: Arc<AtomicU32>,
}

impl<S: Clone + Send + Sync + 'static> PromptCaches<S> {
    /// Caches of at most `bytes`: half for prompts, half for bodies.
    #[must_use]
    pub fn new(bytes: u64) -> PromptCaches<S> {
        let (bodies, conversations) = (body_cache(bytes / 2), conversation_cache(bytes / 2));
        PromptCaches { bodies, conversations, owners: Arc::default() }
    }

    /// The caches for one more model, under a key of its own.
    pub(crate) fn for_model(&self) -> (ModelBodyCache, ModelConversationCache<S>) {
        let owner = self.owners.fetch_add(1, Ordering::Relaxed);
        (
            ModelBodyCache::new(self.bodies.clone(), owner),
            ModelConversationCache::new(self.conversations.clone(), owner),
        )
    }
}

impl<S> std::fmt::Debug for PromptCaches<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptCaches").field("models", &self.owners).finish_non_exhaustive()
    }
}
