//! Whether an engine hashes blocks by the rule that its responses imply.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use mooncake_wire::events::{BlockStored, StorageMedium};
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
    /// Whether the status is [`HashRuleStatus::Different`].
    is_different: AtomicBool,
}

/// Result of comparing the hashes of an engine's events with those computed from their tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum HashRuleStatus {
    /// No event could be checked.
    #[default]
    Unchecked,
    /// The hashes are those that predictions compute.
    Confirmed,
    /// They follow another rule: the engine's blocks are hashed again from the tokens in its events.
    Different {
        /// The rule, if it is a known one.
        actual: Option<String>,
    },
}

impl fmt::Display for HashRuleStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unchecked => f.write_str("unchecked"),
            Self::Confirmed => f.write_str("confirmed"),
            Self::Different { actual } => {
                let actual = actual.as_deref().unwrap_or("unknown rule");
                write!(f, "different: {actual}; indexed by tokens")
            }
        }
    }
}

impl EngineHashRule {
    pub(crate) fn status(&self) -> HashRuleStatus {
        self.status.lock().clone()
    }

    /// Resets everything, when the engine has restarted.
    pub(crate) fn clear(&self) {
        self.seen.store(0, Ordering::Relaxed);
        self.set(HashRuleStatus::Unchecked);
    }

    /// Whether the engine's hashes follow another rule than predictions.
    pub(crate) fn is_different(&self) -> bool {
        self.is_different.load(Ordering::Relaxed)
    }

    /// Checks the first block of a prompt, if the event is about one and it is time for a check. Returns the new status if
    /// it has changed.
    pub(crate) fn check(&self, keyspace: &BlockKeyspace, stored: &BlockStored<'_>) -> Option<HashRuleStatus> {
        if let Some(name) = keyspace.unsupported_rule() {
            return self.set(HashRuleStatus::Different { actual: Some(name.to_owned()) });
        }
        let (tokens, reported) = first_block(stored)?;
        let number = self.seen.fetch_add(1, Ordering::Relaxed);
        if number >= CONFIRMING_CHECKS && !number.is_multiple_of(RECHECK_PERIOD) {
            return None;
        }
        let assumed = keyspace.schemes(&BlockExtraKeys::default())?.events;
        let found = match last_hash(assumed, &tokens) {
            Some(hash) if hash == reported => HashRuleStatus::Confirmed,
            // Blocks of a namespace look like others: only if none of the first blocks has an expected hash, the rule is another one.
            Some(_)
                if keyspace.has_unmarked_namespaces()
                    && (self.status() == HashRuleStatus::Confirmed || number + 1 < CONFIRMING_CHECKS) =>
            {
                return None;
            }
            Some(_) => {
                let mut known = keyspace.other_rules().into_iter();
                let actual = known.find(|(_, scheme)| last_hash(scheme.clone(), &tokens) == Some(reported));
                HashRuleStatus::Different { actual: actual.map(|(name, _)| name) }
            }
            // The block is smaller than a hashed one.
            None => return None,
        };
        self.set(found)
    }

    /// Returns the status if it has changed.
    fn set(&self, found: HashRuleStatus) -> Option<HashRuleStatus> {
        let mut status = self.status.lock();
        (*status != found).then(|| {
            self.is_different.store(matches!(found, HashRuleStatus::Different { .. }), Ordering::Relaxed);
            status.clone_from(&found);
            found
        })
    }
}

/// Tokens and hash of the first block of a prompt whose hash depends on nothing else. Connectors may hash what they store in other media
/// by rules of their own.
fn first_block(stored: &BlockStored<'_>) -> Option<(Vec<u32>, u64)> {
    let is_own = matches!(stored.medium, None | Some(StorageMedium::Gpu));
    let is_plain = is_own && stored.parent.is_none() && stored.lora.is_none() && stored.cache_salt.is_none();
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

#[cfg(test)]
mod tests {
    use mooncake_wire::events::{
        BlockHash, EngineEvent, EngineEventBatch, EngineEventFormat, OutgoingBlocks, OutgoingEngineEvent,
        StorageMedium, encode_engine_batch,
    };
    use moongate_block_hash::VllmExtraKeys;
    use moongate_discovery::{EngineBlockHashing, EngineFacts, EngineKind, VllmHashAlgorithm};

    use super::*;

    fn keyspace(seed: &str) -> BlockKeyspace {
        let facts = EngineFacts {
            models: vec!["m".to_owned()],
            page_size: Some(2),
            hashing: Some(EngineBlockHashing::Vllm {
                algorithm: VllmHashAlgorithm::Sha256Cbor,
                seed: seed.to_owned(),
            }),
            ..EngineFacts::unreported(EngineKind::Vllm)
        };
        BlockKeyspace::from_facts(&facts).unwrap()
    }

    fn hash(seed: &str, tokens: &[u32]) -> u64 {
        let scheme = HashScheme::vllm_sha256_cbor(2, seed, VllmExtraKeys::default()).unwrap();
        last_hash(scheme, tokens).unwrap()
    }

    /// Checks an event with one block of these tokens.
    fn check(
        rule: &EngineHashRule,
        hash: u64,
        parent: Option<u64>,
        tokens: &[u32],
    ) -> Option<HashRuleStatus> {
        let mut payload = Vec::new();
        let stored = OutgoingEngineEvent::Stored(OutgoingBlocks {
            hashes: &[BlockHash::Int(hash)],
            parent: parent.map(BlockHash::Int),
            tokens,
            block_size: 2,
            medium: StorageMedium::Gpu,
            cache_salt: None,
            extra_keys: None,
        });
        encode_engine_batch(EngineEventFormat::Vllm, 0.0, &[stored], 0, &mut payload);
        let batch = EngineEventBatch::decode(&payload).unwrap();
        let Ok(EngineEvent::Stored(stored)) = batch.events().next().unwrap() else {
            panic!("no stored event")
        };
        rule.check(&keyspace("0"), &stored)
    }

    #[test]
    fn rule_is_confirmed_named_or_unknown() {
        let rule = EngineHashRule::default();
        assert_eq!(check(&rule, hash("0", &[1, 2]), None, &[1, 2]), Some(HashRuleStatus::Confirmed));
        assert_eq!(check(&rule, hash("0", &[3, 4]), None, &[3, 4]), None, "nothing new");
        let other =
            HashRuleStatus::Different { actual: Some("sha256_cbor with hash seed \"42\"".to_owned()) };
        assert_eq!(check(&rule, hash("42", &[1, 2]), None, &[1, 2]), Some(other.clone()));
        assert_eq!(rule.status(), other);
        let unknown = HashRuleStatus::Different { actual: None };
        assert_eq!(check(&rule, 7, None, &[1, 2]), Some(unknown));
        rule.clear();
        assert_eq!(rule.status(), HashRuleStatus::Unchecked);
    }

    #[test]
    fn only_complete_first_blocks_are_checked() {
        let rule = EngineHashRule::default();
        assert_eq!(check(&rule, 7, Some(1), &[1, 2]), None);
        // A group with a sliding window names tokens of blocks that it does not keep.
        assert_eq!(check(&rule, 7, None, &[1, 2, 3, 4]), None);
        assert_eq!(check(&rule, 7, None, &[1]), None);
        assert_eq!(rule.status(), HashRuleStatus::Unchecked);
    }

    #[test]
    fn change_of_a_confirmed_rule_is_found_later() {
        let rule = EngineHashRule::default();
        for _ in 0..CONFIRMING_CHECKS {
            check(&rule, hash("0", &[1, 2]), None, &[1, 2]);
        }
        let changed = (CONFIRMING_CHECKS..=RECHECK_PERIOD).filter_map(|_| check(&rule, 7, None, &[1, 2]));
        assert_eq!(changed.count(), 1);
        assert_eq!(rule.status(), HashRuleStatus::Different { actual: None });
    }
}
