//! Groups of objects that are leased and evicted together.
//!
//! A group stores only its members. Its lease is the longest lease of its members, computed when one of them is to be evicted,
//! so that reads of grouped objects cost nothing extra. Lock order: a group may be locked while a shard is, never the reverse.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::indices::{EntryIndex, GROUP_SHARDS, GroupIndex, GroupSlot, ShardIndex};
use crate::slab::Slab;
use crate::split_mix::mix;
use crate::table::HashIndex;

/// A member: its shard and its index there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupMember {
    pub(crate) shard: ShardIndex,
    pub(crate) index: EntryIndex,
}

/// Hash of a group's name and its tenant's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupId(u64);

impl GroupId {
    /// FNV-1a: independent of the seed and of library versions, so that a replay yields the same ids.
    pub(crate) fn new(tenant: &str, name: &str) -> Self {
        let bytes = tenant.bytes().chain([0xff]).chain(name.bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self(mix(hash))
    }

    fn tag(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn shard(self) -> usize {
        self.0 as usize & (GROUP_SHARDS - 1)
    }
}

impl GroupMember {
    const NONE: Self = Self { shard: ShardIndex::FIRST, index: EntryIndex::NONE };
}

#[derive(Debug)]
struct ObjectGroup {
    id: GroupId,
    name: Arc<str>,
    first_two: [GroupMember; 2],
    /// Boxed, since it is rarely needed.
    more: Option<Box<ExtraMembers>>,
}

/// Members beyond the first two.
#[derive(Debug, Default)]
struct ExtraMembers(BTreeSet<GroupMember>);

impl Default for ObjectGroup {
    fn default() -> Self {
        Self { id: GroupId(0), name: Arc::default(), first_two: [GroupMember::NONE; 2], more: None }
    }
}

#[derive(Debug, Default)]
struct GroupShard {
    groups: Slab<GroupSlot, ObjectGroup>,
    table: HashIndex<GroupSlot>,
}

#[derive(Debug)]
pub(crate) struct GroupTable(Box<[Mutex<GroupShard>]>);

impl GroupTable {
    pub(crate) fn new() -> Self {
        Self((0..GROUP_SHARDS).map(|_| Mutex::default()).collect())
    }

    fn shard(&self, group: GroupIndex) -> &Mutex<GroupShard> {
        &self.0[group.shard()]
    }

    /// Adds a member and returns the group's index.
    pub(crate) fn join(&self, id: GroupId, name: &str, member: GroupMember) -> GroupIndex {
        let tag = id.tag();
        let mut shard = self.0[id.shard()].lock();
        let GroupShard { groups, table } = &mut *shard;
        let slot = table.find(tag, |slot| groups[slot].id == id && *groups[slot].name == *name);
        let slot = slot.unwrap_or_else(|| {
            let slot = groups.insert(ObjectGroup { id, name: name.into(), ..ObjectGroup::default() });
            table.insert(tag, slot);
            slot
        });
        let group = &mut groups[slot];
        match group.first_two.iter_mut().find(|member| **member == GroupMember::NONE) {
            Some(free) => *free = member,
            None => _ = group.more.get_or_insert_default().0.insert(member),
        }
        GroupIndex::new(slot, id.shard())
    }

    /// Removes a member, and the group with its last member.
    pub(crate) fn leave(&self, group: GroupIndex, member: GroupMember) {
        let mut shard = self.shard(group).lock();
        let entry = &mut shard.groups[group.slot()];
        if let Some(slot) = entry.first_two.iter_mut().find(|slot| **slot == member) {
            *slot = GroupMember::NONE;
        } else if let Some(more) = &mut entry.more {
            more.0.remove(&member);
            if more.0.is_empty() {
                entry.more = None;
            }
        }
        if entry.first_two == [GroupMember::NONE; 2] && entry.more.is_none() {
            let tag = entry.id.tag();
            shard.table.remove(tag, group.slot());
            shard.groups.remove(group.slot());
        }
    }

    pub(crate) fn name(&self, group: GroupIndex) -> Option<Arc<str>> {
        (group != GroupIndex::NONE).then(|| Arc::clone(&self.shard(group).lock().groups[group.slot()].name))
    }

    /// All members. They may be removed before the caller locks their shards.
    pub(crate) fn members(&self, group: GroupIndex) -> Vec<GroupMember> {
        let shard = self.shard(group).lock();
        let entry = &shard.groups[group.slot()];
        let pair = entry.first_two.into_iter().filter(|member| *member != GroupMember::NONE);
        pair.chain(entry.more.iter().flat_map(|more| more.0.iter().copied())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::indices::SlabIndex;

    #[test]
    fn a_group_is_removed_with_its_last_member() {
        let groups = GroupTable::new();
        let member = |slot| GroupMember { shard: ShardIndex::new(1), index: EntryIndex::from_slot(slot) };
        let id = GroupId(0x1234_5678_9abc_def0);
        let index = groups.join(id, "g", member(0));
        assert!((1..4).all(|position| groups.join(id, "g", member(position)) == index));
        assert_ne!(groups.join(GroupId(1), "g", member(9)), index);
        assert_ne!(groups.join(id, "h", member(9)), index);
        assert_eq!((groups.members(index).len(), groups.name(index).as_deref()), (4, Some("g")));
        groups.leave(index, member(1));
        groups.leave(index, member(3));
        assert_eq!(groups.members(index), [member(0), member(2)]);
        groups.leave(index, member(0));
        groups.leave(index, member(2));
        assert!(groups.shard(index).lock().groups.len() == 1 && groups.members(index).is_empty());
    }
}
