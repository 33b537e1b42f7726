//! Whether an engine hashes blocks by the rule that its responses imply.

use std::sync::atomic::{AtomicU32, Ordering};

use mooncake_wire::events::BlockStored;
use moongate_block_hash::{BlockHashChain, HashScheme};
use parking_lot::Mutex;

use super::block_keyspace::{BlockExtraKeys, BlockKeyspace};

/// Checks before an engine's rule counts as confirmed and only every [`RECHECK_PERIOD`]th event is checked.
const CONFIRMING_CHECKS: u32 = 8;

/// Events with a first block between two checks of a confirmed rule: a check computes a few hashes.
const RECHECK_PERIOD: u32 = 256;

/// What the events of one engine say about its hashes.
#[derive(Debug, Default)]
pub(crate) struct EngineHashRule {
    /// Events that could be checked so far.
    seen: AtomicU32,
    status: Mutex<HashRuleStatus>,
}

/// Result of comparing the hashes of an engine's events with those computed from their tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum HashRuleStatus {
    /// No event could be checked.
    #[default]
    Unchecked,
    /// The hashes are those that predictions compute.
    Confirmed,
    /// They follow another rule: predictions find nothing in this engine.
    Different {
        /// The rule, if it is a known one.
        actual: Option<String>,
    },
}

impl EngineHashRule {
    pub(crate) fn status(&self) -> HashRuleStatus {
        self.status.lock().clone()
    }

    /// Resets everything, when the engine has restarted.
    pub(crate) fn clear(&self) {
        self.seen.store(0, Ordering::Relaxed);
        *self.status.lock() = HashRuleStatus::Unchecked;
    }

    /// Checks the first block of a prompt, if the event is about one and it is time for a check. Returns the new status if
    /// it has changed.
    pub(crate) fn check(&self, keyspace: &BlockKeyspace, stored: &BlockStored<'_>) -> Option<HashRuleStatus> {
        let (tokens, reported) = first_block(stored)?;
        let number = self.seen.fetch_add(1, Ordering::Relaxed);
        if number >= CONFIRMING_CHECKS && !number.is_multiple_of(RECHECK_PERIOD) {
            return None;
        }
        let assumed = keyspace.schemes(&BlockExtraKeys::default())?.events;
        let found = match last_hash(assumed, &tokens) {
            Some(hash) if hash == reported => HashRuleStatus::Confirmed,
            Some(_) => {
                let mut known = keyspace.other_rules().into_iter();
                let actual = known.find(|(_, scheme)| last_hash(scheme.clone(), &tokens) == Some(reported));
                HashRuleStatus::Different { actual: actual.map(|(name, _)| name) }
            }
            // The block is smaller than a hashed one.
            None => return None,
        };
        let mut status = self.status.lock();
        (*status != found).then(|| {
            status.clone_from(&found);
            found
        })
    }
}

/// Tokens and hash of the first block of a prompt whose hash depends on nothing else.
fn first_block(stored: &BlockStored<'_>) -> Option<(Vec<u32>, u64)> {
    let is_plain = stored.parent.is_none() && stored.lora.is_none() && stored.cache_salt.is_none();
    let has_extra_keys =
        stored.extra_keys.is_some_and(|keys| keys.iter().next().is_some_and(|keys| keys.len() > 0));
    if !is_plain || has_extra_keys {
        return None;
    }
    let (tokens, block_tokens) = (stored.tokens?.iter(), stored.block_size as usize);
    // Groups with a sliding window keep some blocks only, and which of the tokens these are is not in the event.
    if tokens.len() != stored.hashes.len().checked_mul(block_tokens)? {
        return None;
    }
    Some((tokens.take(block_tokens).collect(), stored.hashes.iter().next()?.low64()))
}

/// Hash of the last full block of `tokens`.
fn last_hash(scheme: HashScheme, tokens: &[u32]) -> Option<u64> {
    let mut blocks = Vec::new();
    BlockHashChain::new(scheme).extend(tokens, &mut blocks);
    blocks.last().map(|block| block.event_hash)
}
