//! Counts of prompts that an engine has computed, and of its cache hits.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// Totals since the engine was discovered.
#[derive(Debug, Default)]
pub(crate) struct PromptCounters {
    completed: AtomicU64,
    tokens: AtomicU64,
    cached_tokens: AtomicU64,
}

/// [`PromptCounters`] at one moment. The tokens are those of prompts whose engine reported its cache hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct PromptCountSnapshot {
    /// Prompts whose response is complete.
    pub(crate) completed: u64,
    pub(crate) tokens: u64,
    pub(crate) cached_tokens: u64,
}

impl PromptCounters {
    /// A response is complete. `reported` are the prompt's tokens and the cached ones among them, if the engine reported both.
    pub(crate) fn record_completed(&self, reported: Option<(u64, u64)>) {
        self.completed.fetch_add(1, Ordering::Relaxed);
        if let Some((tokens, cached)) = reported {
            self.tokens.fetch_add(tokens, Ordering::Relaxed);
            self.cached_tokens.fetch_add(cached.min(tokens), Ordering::Relaxed);
        }
    }

    pub(crate) fn snapshot(&self) -> PromptCountSnapshot {
        PromptCountSnapshot {
            completed: self.completed.load(Ordering::Relaxed),
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
        // An engine that reports one token more than the prompt has is counted as a full hit.
        prompts.record_completed(Some((10, 11)));
        assert_eq!(prompts.snapshot(), PromptCountSnapshot { completed: 3, tokens: 110, cached_tokens: 74 });
    }
}
