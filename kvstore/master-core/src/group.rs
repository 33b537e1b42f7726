//! Groups of objects that are leased and evicted together.
//!
//! A group only knows its members. Its lease is the longest of theirs, looked up when one of them is to go: reading an
//! object of a group costs nothing more. Lock order: a shard may be locked when a group is, never the other way round.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::slab::{NIL, Slab};
use crate::table::HashIndex;

const SHARD_BITS: u32 = 6;

/// A member: its shard and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupMember {
    pub(crate) shard: u32,
    pub(crate) index: u32,
}

/// Stands for a group's name: its hash, together with the tenant's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupId(pub(crate) u64);

const NO_MEMBER: GroupMember = GroupMember { shard: NIL, index: NIL };

#[derive(Debug)]
struct ObjectGroup {
    id: u64,
    name: Arc<str>,
    first_two: [GroupMember; 2],
    /// Nearly always none, so it is kept small.
    more: Option<Box<ExtraMembers>>,
}

/// Members beyond the first two.
#[derive(Debug, Default)]
struct ExtraMembers(BTreeSet<GroupMember>);

impl Default for ObjectGroup {
    fn default() -> Self {
        Self { id: 0, name: Arc::default(), first_two: [NO_MEMBER; 2], more: None }
    }
}

#[derive(Debug, Default)]
struct GroupShard {
    groups: Slab<ObjectGroup>,
    table: HashIndex,
}

/// All groups.
#[derive(Debug)]
pub(crate) struct GroupTable(Box<[Mutex<GroupShard>]>);

impl GroupTable {
    pub(crate) fn new() -> Self {
        Self((0..1 << SHARD_BITS).map(|_| Mutex::default()).collect())
    }

    fn shard(&self, group: u32) -> &Mutex<GroupShard> {
        &self.0[group as usize & ((1 << SHARD_BITS) - 1)]
    }

    /// Adds a member; returns where the group is.
    pub(crate) fn join(&self, id: GroupId, name: &str, member: GroupMember) -> u32 {
        let (low, tag) = (id.0 as u32, (id.0 >> 32) as u32);
        let mut shard = self.shard(low).lock();
        let GroupShard { groups, table } = &mut *shard;
        let at = table.find(tag, |at| groups[at].id == id.0 && *groups[at].name == *name);
        let at = at.unwrap_or_else(|| {
            let at = groups.insert(ObjectGroup { id: id.0, name: name.into(), ..ObjectGroup::default() });
            table.insert(tag, at);
            at
        });
        let group = &mut groups[at];
        match group.first_two.iter_mut().find(|it| **it == NO_MEMBER) {
            Some(free) => *free = member,
            None => _ = group.more.get_or_insert_default().0.insert(member),
        }
        at << SHARD_BITS | low & ((1 << SHARD_BITS) - 1)
    }

    /// Takes a member out, and the group away with its last one.
    pub(crate) fn leave(&self, group: u32, member: GroupMember) {
        let mut shard = self.shard(group).lock();
        let at = group >> SHARD_BITS;
        let it = &mut shard.groups[at];
        if let Some(place) = it.first_two.iter_mut().find(|it| **it == member) {
            *place = NO_MEMBER;
        } else if let Some(more) = &mut it.more {
            more.0.remove(&member);
            if more.0.is_empty() {
                it.more = None;
            }
        }
        if it.first_two == [NO_MEMBER; 2] && it.more.is_none() {
            let tag = (it.id >> 32) as u32;
            shard.table.remove(tag, at);
            shard.groups.remove(at);
        }
    }

    /// The group's name.
    pub(crate) fn name(&self, group: u32) -> Option<Arc<str>> {
        (group != NIL).then(|| Arc::clone(&self.shard(group).lock().groups[group >> SHARD_BITS].name))
    }

    /// All members. They may be gone by the time that one looks.
    pub(crate) fn members(&self, group: u32) -> Vec<GroupMember> {
        let shard = self.shard(group).lock();
        let it = &shard.groups[group >> SHARD_BITS];
        let pair = it.first_two.into_iter().filter(|it| *it != NO_MEMBER);
        pair.chain(it.more.iter().flat_map(|more| more.0.iter().copied())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_lives_as_long_as_a_member() {
        let groups = GroupTable::new();
        let member = |place| GroupMember { shard: 1, index: place };
        let id = GroupId(0x1234_5678_9abc_def0);
        let at = groups.join(id, "g", member(0));
        assert!((1..4).all(|place| groups.join(id, "g", member(place)) == at));
        assert_ne!(groups.join(GroupId(1), "g", member(9)), at);
        assert_ne!(groups.join(id, "h", member(9)), at);
        assert_eq!((groups.members(at).len(), groups.name(at).as_deref()), (4, Some("g")));
        groups.leave(at, member(1));
        groups.leave(at, member(3));
        assert_eq!(groups.members(at), [member(0), member(2)]);
        groups.leave(at, member(0));
        groups.leave(at, member(2));
        assert!(groups.shard(at).lock().groups.len() == 1 && groups.members(at).is_empty());
    }
}
