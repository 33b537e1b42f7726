//! What one engine's responses and removals say about the hits predicted for it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Consecutive responses that were short by exactly the last block, after which the engine counts as dropping it.
const DROPS_AFTER: u32 = 8;
/// Consecutive responses without any of the expected chunks, after which none are expected.
const MISSES_CHUNKS_AFTER: u32 = 8;
/// Consecutive responses without a dropped block, after which it does not.
const KEEPS_AFTER: u32 = 4;

/// Observations of one engine, or of one of its ranks.
///
/// A vLLM that speculates with hidden states (EAGLE, MTP) computes the last block of each prefix that it finds again, because the draft
/// model needs its hidden states. Other speculation does not, and vLLM does not report the method, so it is learned.
///
/// LMCache reports the chunks of an engine's workers. With its hash `builtin` and without a `PYTHONHASHSEED`, the scheduler looks for other
/// hashes if it is another process, and finds none.
#[derive(Debug, Default)]
pub(crate) struct HitHistory {
    removed_blocks: AtomicU64,
    drops_last_block: AtomicBool,
    short: AtomicU32,
    complete: AtomicU32,
    /// Whether the engine does not find the chunks that its LMCache reports.
    misses_chunks: AtomicBool,
    missed_chunks: AtomicU32,
}

impl HitHistory {
    /// The engine has removed blocks from its memory.
    pub(crate) fn record_removed(&self, blocks: usize) {
        self.removed_blocks.fetch_add(blocks as u64, Ordering::Relaxed);
    }

    pub(crate) fn removed_blocks(&self) -> u64 {
        self.removed_blocks.load(Ordering::Relaxed)
    }

    /// Whether the engine computes the last block of a cached prefix again.
    pub(crate) fn drops_last_block(&self) -> bool {
        self.drops_last_block.load(Ordering::Relaxed)
    }

    /// Compares the tokens that the engine has found with those of all cached blocks of the prompt. A prefix of one block says nothing:
    /// an engine that finds none of it may have evicted it.
    pub(crate) fn observe(&self, cached_tokens: u64, found: u64, block_tokens: u64) {
        if block_tokens == 0 || cached_tokens < 2 * block_tokens {
            return;
        }
        if found == cached_tokens {
            self.short.store(0, Ordering::Relaxed);
            if self.complete.fetch_add(1, Ordering::Relaxed) + 1 >= KEEPS_AFTER {
                self.drops_last_block.store(false, Ordering::Relaxed);
            }
        } else if found + block_tokens == cached_tokens {
            self.complete.store(0, Ordering::Relaxed);
            if self.short.fetch_add(1, Ordering::Relaxed) + 1 >= DROPS_AFTER {
                self.drops_last_block.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Whether chunks of LMCache are not to be expected, although the engine has reported some.
    pub(crate) fn misses_chunks(&self) -> bool {
        self.misses_chunks.load(Ordering::Relaxed)
    }

    /// The engine has found this many tokens of a prompt. `own_tokens` of it are in its own blocks; `in_chunks`: more was expected in
    /// chunks. Returns whether this has changed what is expected.
    pub(crate) fn observe_chunks(&self, own_tokens: u64, in_chunks: bool, found: u64) -> bool {
        if found > own_tokens {
            self.missed_chunks.store(0, Ordering::Relaxed);
            return self.misses_chunks.swap(false, Ordering::Relaxed);
        }
        in_chunks
            && self.missed_chunks.fetch_add(1, Ordering::Relaxed) + 1 >= MISSES_CHUNKS_AFTER
            && !self.misses_chunks.swap(true, Ordering::Relaxed)
    }

    /// Resets what was learned, when the engine has restarted.
    pub(crate) fn clear(&self) {
        self.drops_last_block.store(false, Ordering::Relaxed);
        self.short.store(0, Ordering::Relaxed);
        self.complete.store(0, Ordering::Relaxed);
        self.misses_chunks.store(false, Ordering::Relaxed);
        self.missed_chunks.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_that_are_never_found_are_not_expected() {
        let history = HitHistory::default();
        let missed = |times| (0..times).any(|_| history.observe_chunks(64, true, 64));
        assert!(!missed(MISSES_CHUNKS_AFTER - 1));
        assert!(!history.observe_chunks(64, true, 320), "found");
        assert!(!missed(MISSES_CHUNKS_AFTER - 1));
        assert!(!history.observe_chunks(64, false, 64), "none were expected");
        assert!(missed(1) && history.misses_chunks());
        assert!(history.observe_chunks(64, false, 320) && !history.misses_chunks());
    }

    #[test]
    fn dropped_block_is_learned_and_unlearned() {
        let history = HitHistory::default();
        let observe = |found, times| {
            for _ in 0..times {
                history.observe(128, found, 32);
            }
            history.drops_last_block()
        };
        assert!(!observe(96, DROPS_AFTER - 1));
        assert!(!observe(128, 1), "a complete hit starts again");
        assert!(!observe(96, DROPS_AFTER - 1));
        assert!(!observe(32, 20), "other errors say nothing");
        assert!(observe(96, 1));
        assert!(observe(128, KEEPS_AFTER - 1));
        assert!(!observe(128, 1));
        history.observe(32, 0, 32);
        assert!(observe(96, DROPS_AFTER));
        history.clear();
        assert!(!history.drops_last_block());
    }
}
