//! The KV-cache groups of one engine, learned from its events.

use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use mooncake_wire::events::{AttentionKind, BlockStored};
use moongate_scheduler::index::{CacheGroup, GroupReuse};

use super::special_caches::SpecialCaches;

/// The group of checkpoints: the last block of each reusable prefix. Engines that have it name no groups in their events.
pub(super) const CHECKPOINTS: u32 = 1;

/// More groups than any model has; further ones are ignored.
const MAX_GROUPS: u32 = 64;

/// Groups of an engine's KV cache: more than one, or one without full attention, for hybrid models.
#[derive(Debug, Default)]
pub(crate) struct EngineCacheGroups {
    groups: ArcSwap<Vec<NumberedCacheGroup>>,
    /// Whether there is one of an unknown kind.
    has_unknown: AtomicBool,
    special: SpecialCaches,
}

/// A group with its number in the engine's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NumberedCacheGroup {
    pub(crate) number: u32,
    pub(crate) group: CacheGroup,
}

impl EngineCacheGroups {
    pub(super) fn new(special: SpecialCaches) -> Self {
        Self { special, ..Self::default() }
    }

    /// Learns the group of stored blocks. Returns its number, or `None` if blocks of this group say nothing about
    /// reusable prefixes.
    pub(crate) fn learn(&self, stored: &BlockStored<'_>) -> Option<u32> {
        let number = stored.group.unwrap_or(0);
        let Some(attention) = stored.attention else {
            // Older releases name no attention; their group 0 has full attention.
            return (number == 0 || self.contains(number)).then_some(number);
        };
        let block_tokens = stored.block_size.max(1);
        let reuse = match (attention, stored.sliding_window) {
            (AttentionKind::Full, _) => GroupReuse::Prefix,
            (AttentionKind::SlidingWindow, Some(window)) => {
                GroupReuse::Tail { blocks: window.saturating_sub(1).div_ceil(block_tokens).max(1) }
            }
            (AttentionKind::Recurrent, _) => GroupReuse::Tail { blocks: 1 },
            // How much of the end is enough is not in the events; all blocks are.
            (AttentionKind::ChunkedLocal | AttentionKind::SlidingWindow, _) => GroupReuse::Prefix,
            (AttentionKind::Other, _) => {
                self.has_unknown.store(true, Ordering::Relaxed);
                return None;
            }
        };
        (number < MAX_GROUPS).then(|| {
            self.insert(NumberedCacheGroup { number, group: CacheGroup { reuse, block_tokens } });
            number
        })
    }

    /// Adds the group of checkpoints to one with all blocks, for an engine that reuses prefixes only at those. Returns its number.
    pub(crate) fn learn_checkpoints(&self, block_tokens: u32) -> u32 {
        let block_tokens = block_tokens.max(1);
        for (number, reuse) in [(0, GroupReuse::Prefix), (CHECKPOINTS, GroupReuse::Tail { blocks: 1 })] {
            self.insert(NumberedCacheGroup { number, group: CacheGroup { reuse, block_tokens } });
        }
        CHECKPOINTS
    }

    /// The group of removed blocks; `None` if none of its blocks has been counted.
    pub(crate) fn known(&self, group: Option<u32>) -> Option<u32> {
        let number = group.unwrap_or(0);
        (number == 0 || self.contains(number)).then_some(number)
    }

    /// Removes all groups, when the engine has restarted.
    pub(crate) fn clear(&self) {
        self.groups.store(Default::default());
        self.has_unknown.store(false, Ordering::Relaxed);
    }

    /// Whether the engine has blocks of an unknown kind, which are not counted.
    pub(crate) fn has_unknown(&self) -> bool {
        self.has_unknown.load(Ordering::Relaxed)
    }

    /// The groups of a hybrid model, in order of their numbers. Empty for other models, whose blocks all count alike.
    pub(crate) fn of_hybrid(&self) -> Vec<NumberedCacheGroup> {
        let groups = self.groups.load();
        match groups.as_slice() {
            [] => Vec::new(),
            [NumberedCacheGroup { number: 0, group }] if group.reuse == GroupReuse::Prefix => Vec::new(),
            groups => groups.to_vec(),
        }
    }

    fn contains(&self, number: u32) -> bool {
        self.groups.load().iter().any(|known| known.number == number)
    }

    fn insert(&self, learned: NumberedCacheGroup) {
        if learned.number != 0 || learned.group.reuse != GroupReuse::Prefix {
            self.special.found();
        }
        let groups = self.groups.load();
        match groups.binary_search_by_key(&learned.number, |known| known.number) {
            // Events about the filled part of a block have a smaller size.
            Ok(position) if groups[position].group.block_tokens >= learned.group.block_tokens => {}
            Ok(position) => {
                let mut groups = Vec::clone(&groups);
                groups[position] = learned;
                self.groups.store(groups.into());
            }
            Err(position) => {
                let mut groups = Vec::clone(&groups);
                groups.insert(position, learned);
                self.groups.store(groups.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_wire::events::BlockHashes;

    use super::*;

    fn stored(
        group: Option<u32>,
        attention: Option<AttentionKind>,
        sliding_window: Option<u32>,
    ) -> BlockStored<'static> {
        BlockStored {
            hashes: BlockHashes::default(),
            parent: None,
            tokens: None,
            block_size: 16,
            medium: None,
            lora: None,
            extra_keys: None,
            cache_salt: None,
            group,
            attention,
            sliding_window,
        }
    }

    #[test]
    fn groups_are_learned_by_their_attention() {
        let groups = EngineCacheGroups::default();
        assert_eq!(groups.learn(&stored(Some(0), Some(AttentionKind::Full), None)), Some(0));
        assert_eq!(groups.of_hybrid(), [], "an ordinary model");
        assert_eq!(groups.learn(&stored(Some(1), Some(AttentionKind::SlidingWindow), Some(128))), Some(1));
        assert_eq!(groups.learn(&stored(Some(2), Some(AttentionKind::Recurrent), None)), Some(2));
        assert_eq!(groups.learn(&stored(Some(3), Some(AttentionKind::ChunkedLocal), None)), Some(3));
        assert!(!groups.has_unknown());
        assert_eq!(groups.learn(&stored(Some(4), Some(AttentionKind::Other), None)), None);
        assert!(groups.has_unknown());
        let rules: Vec<GroupReuse> = groups.of_hybrid().iter().map(|known| known.group.reuse).collect();
        let tail = |blocks| GroupReuse::Tail { blocks };
        assert_eq!(rules, [GroupReuse::Prefix, tail(8), tail(1), GroupReuse::Prefix]);
        groups.clear();
        assert_eq!(groups.of_hybrid(), []);
    }

    #[test]
    fn checkpoints_are_a_group_besides_all_blocks() {
        let groups = EngineCacheGroups::default();
        for _ in 0..2 {
            assert_eq!(groups.learn(&stored(None, None, None)), Some(0));
            assert_eq!(groups.learn_checkpoints(32), 1);
        }
        let rules: Vec<GroupReuse> = groups.of_hybrid().iter().map(|known| known.group.reuse).collect();
        assert_eq!(rules, [GroupReuse::Prefix, GroupReuse::Tail { blocks: 1 }]);
    }

    #[test]
    fn unknown_groups_are_ignored_and_their_number_is_bounded() {
        let groups = EngineCacheGroups::default();
        assert_eq!(groups.learn(&stored(None, None, None)), Some(0));
        assert_eq!(groups.learn(&stored(Some(1), None, None)), None);
        assert_eq!(groups.known(Some(1)), None);
        for number in 0..200 {
            groups.learn(&stored(Some(number), Some(AttentionKind::Recurrent), None));
        }
        assert_eq!(groups.of_hybrid().len(), MAX_GROUPS as usize);
    }
}
