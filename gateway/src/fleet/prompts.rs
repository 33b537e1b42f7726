//! Prompts that an engine has computed, and how much of them it found in its caches.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// Sums since the engine was first seen.
#[derive(Debug, Default)]
pub(crate) struct PromptCounters {
    answered: AtomicU64,
    tokens: AtomicU64,
    cached_tokens: AtomicU64,
}

/// [`PromptCounters`] at one moment. The tokens are those of prompts whose engine told how much of them it had in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct PromptCountSnapshot {
    /// Prompts whose answer is complete.
    pub(crate) answered: u64,
    pub(crate) tokens: u64,
    pub(crate) cached_tokens: u64,
}

impl PromptCounters {
    /// An answer is complete. `told` are the prompt's tokens and those of them in a cache, if the engine told both.
    pub(crate) fn record_completed(&self, told: Option<(u64, u64)>) {
        self.answered.fetch_add(1, Ordering::Relaxed);
        if let Some((tokens, cached)) = told {
            self.tokens.fetch_add(tokens, Ordering::Relaxed);
            self.cached_tokens.fetch_add(cached.min(tokens), Ordering::Relaxed);
        }
    }

    pub(crate) fn snapshot(&self) -> PromptCountSnapshot {
        PromptCountSnapshot {
            answered: self.answered.load(Ordering::Relaxed),
            tokens: self.tokens.load(Ordering::Relaxed),
            cached_tokens: self.cached_tokens.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_prompts_with_reported_hits_count_for_the_hit_rate() {
        let prompts = PromptCounters::default();
        prompts.record_completed(Some((100, 64)));
        prompts.record_completed(None);
        // An engine that counts a token more than the prompt has, finds no more than all of it.
        prompts.record_completed(Some((10, 11)));
        assert_eq!(prompts.snapshot(), PromptCountSnapshot { answered: 3, tokens: 110, cached_tokens: 74 });
    }
}
