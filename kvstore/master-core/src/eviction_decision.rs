//! Decisions whether an object may be evicted.

use crate::group::GroupMember;
use crate::indices::{EntryIndex, GroupIndex};
use crate::locked_shard::LockedShard;
use crate::object::EvictionQueue;
use crate::object_table::ObjectTable;
use crate::recent_writes::WriteProtection;

/// Which objects a pass may evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvictionPass {
    Unpinned,
    SoftPinned,
}

pub(crate) struct EvictedGroup {
    pub(crate) index: GroupIndex,
    pub(crate) members: Vec<GroupMember>,
}

/// What to do with the first entry of a queue.
pub(crate) enum EvictionDecision {
    Evict,
    /// Evict the whole group, if all of these members may be evicted.
    EvictWith(EvictedGroup),
    /// Keep it, and skip it until this time.
    DeferUntil(u64),
    /// Keep it in the queue of soft-pinned objects.
    SoftPinned,
    /// Keep it until one of its nodes responds again.
    Unresponsive,
    /// Nothing to evict in this queue.
    Empty,
}

impl ObjectTable {
    /// When to retry an object that could not be evicted although it is not leased. Until then it counts as leased.
    pub(crate) fn retry_at(&self, now_ms: u64) -> u64 {
        now_ms.saturating_add(self.settings.lease_ttl_ms.max(1))
    }
}

impl LockedShard<'_> {
    /// The first entry of a queue of this shard, and the decision about it.
    pub(crate) fn decide_first(
        &self,
        queue: EvictionQueue,
        pass: EvictionPass,
        protected: WriteProtection,
        now_ms: u64,
    ) -> Option<(EntryIndex, EvictionDecision)> {
        let index = self.head(queue)?;
        let entry = &self.entries[index];
        let is_protected = matches!(queue, EvictionQueue::Unread(_)) && protected.contains(entry.stamp);
        if entry.stamp > now_ms || is_protected {
            return Some((index, EvictionDecision::Empty));
        }
        if entry.group != GroupIndex::NONE {
            let members = self.objects.groups.members(entry.group);
            if members.len() > 1 {
                return Some((
                    index,
                    EvictionDecision::EvictWith(EvictedGroup { index: entry.group, members }),
                ));
            }
        }
        Some((index, self.decide_single(index, pass, now_ms)))
    }

    fn decide_single(&self, index: EntryIndex, pass: EvictionPass, now_ms: u64) -> EvictionDecision {
        let entry = &self.entries[index];
        match entry.queue() {
            EvictionQueue::Vacant => EvictionDecision::Empty,
            // It occupies no memory, or will not once it is on a disk.
            EvictionQueue::Unlisted if !entry.has_memory() || entry.work().is_some() => {
                EvictionDecision::Empty
            }
            EvictionQueue::Unlisted | EvictionQueue::Writing => {
                EvictionDecision::DeferUntil(self.objects.retry_at(now_ms))
            }
            _ if entry.is_leased(now_ms) => EvictionDecision::DeferUntil(entry.stamp),
            // Its client may recover; until then freed space would not be usable.
            _ if !self.is_readable(entry) => EvictionDecision::Unresponsive,
            EvictionQueue::SoftPinned
                if pass == EvictionPass::Unpinned
                    && entry.target_queue(now_ms) == EvictionQueue::SoftPinned =>
            {
                EvictionDecision::SoftPinned
            }
            _ => EvictionDecision::Evict,
        }
    }

    pub(crate) fn decide_member(
        &self,
        member: GroupMember,
        group: GroupIndex,
        pass: EvictionPass,
        now_ms: u64,
    ) -> EvictionDecision {
        if self.is_member(member, group) {
            self.decide_single(member.index, pass, now_ms)
        } else {
            EvictionDecision::Empty
        }
    }

    pub(crate) fn is_member(&self, member: GroupMember, group: GroupIndex) -> bool {
        self.entries.contains(member.index) && {
            let entry = &self.entries[member.index];
            entry.queue() != EvictionQueue::Vacant && entry.group == group
        }
    }
}
