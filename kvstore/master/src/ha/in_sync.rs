//! Whose acknowledgement a change needs before its caller is answered.
//!
//! The rule that loses nothing: whoever the store lists as in sync has to acknowledge. So a follower is waited for *before* it is
//! listed, and until *after* it is known to be listed no more.

use std::collections::BTreeMap;
use std::time::Duration;

use super::member::{HaMember, InSyncSet};

#[derive(Clone, Copy, Debug)]
struct FollowerProgress {
    /// It has all records up to this one.
    acknowledged: u64,
    /// When it was last heard of.
    last_heard_at: Duration,
    /// It may be listed once it has this record: up to it, others may have been answered for without it.
    eligible_from: u64,
    /// It is to be listed no more.
    leaving: bool,
}

/// The followers that a leader waits for.
#[derive(Clone, Debug)]
pub struct InSyncTracker {
    leader: HaMember,
    required: BTreeMap<HaMember, FollowerProgress>,
    /// What the store lists for certain. Nothing while an attempt to change it may have succeeded or not.
    stored_in_sync: Option<InSyncSet>,
}

impl InSyncTracker {
    /// That of a leader who has just been elected, so that it alone is listed.
    pub fn new(leader: HaMember) -> Self {
        let stored_in_sync = Some(InSyncSet::from([leader.clone()]));
        Self { leader, required: BTreeMap::new(), stored_in_sync }
    }

    /// A follower has the whole state up to a record: from now on it is waited for, and it is to be listed as soon as it has the
    /// record `last` too, the newest of now.
    pub fn join(&mut self, member: &HaMember, acknowledged: u64, last: u64, now: Duration) {
        // Its own earlier life is gone.
        let before = self.required.iter_mut().filter(|(it, _)| it.address == member.address && *it != member);
        before.for_each(|(_, it)| it.leaving = true);
        let waited_for = self.required.get(member).filter(|it| !it.leaving);
        let joined_at = waited_for.map_or(last, |it| it.eligible_from);
        self.required.insert(
            member.clone(),
            FollowerProgress { acknowledged, last_heard_at: now, eligible_from: joined_at, leaving: false },
        );
    }

    /// A follower has all records up to this one. Returns whether it is waited for.
    pub fn acknowledge(&mut self, member: &HaMember, number: u64, now: Duration) -> bool {
        let Some(follower) = self.required.get_mut(member) else { return false };
        follower.acknowledged = follower.acknowledged.max(number);
        follower.last_heard_at = now;
        !follower.leaving
    }

    /// Whether all that are waited for have the record.
    pub fn is_acknowledged(&self, number: u64) -> bool {
        self.required.values().all(|it| it.acknowledged >= number)
    }

    /// Gives up on those who have been silent for longer than `patience`. Returns them.
    pub fn remove_silent(&mut self, now: Duration, patience: Duration) -> Vec<HaMember> {
        let silent = |it: &FollowerProgress| !it.leaving && now.saturating_sub(it.last_heard_at) > patience;
        let mut given_up = Vec::new();
        for (member, follower) in self.required.iter_mut().filter(|(_, it)| silent(it)) {
            follower.leaving = true;
            given_up.push(member.clone());
        }
        given_up
    }

    /// What the store has to list, if it is not that for certain. From now on the store may list it.
    pub fn pending_in_sync(&mut self) -> Option<InSyncSet> {
        let is_whole = |it: &FollowerProgress| !it.leaving && it.acknowledged >= it.eligible_from;
        let whole = self.required.iter().filter(|(_, it)| is_whole(it)).map(|(member, _)| member.clone());
        let wanted: InSyncSet = whole.chain([self.leader.clone()]).collect();
        if self.stored_in_sync.as_ref() == Some(&wanted) {
            // Those who leave without having been listed.
            self.required.retain(|_, it| !it.leaving);
            return None;
        }
        self.stored_in_sync = None;
        Some(wanted)
    }

    /// The store lists these.
    pub fn confirm_in_sync(&mut self, members: InSyncSet) {
        self.required.retain(|member, it| !it.leaving || members.contains(member));
        self.stored_in_sync = Some(members);
    }

    /// What the store lists, as far as known, this master included.
    pub fn in_sync(&self) -> usize {
        self.stored_in_sync.as_ref().map_or(1, InSyncSet::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(address: &str, incarnation: u64) -> HaMember {
        HaMember { address: address.to_owned(), incarnation }
    }

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_follower_counts_before_it_is_listed_and_until_it_is_not() {
        let (me, other) = (member("a", 1), member("b", 1));
        let mut quorum = InSyncTracker::new(me.clone());
        assert!(quorum.is_acknowledged(u64::MAX) && quorum.pending_in_sync().is_none());
        quorum.join(&other, 5, 6, at(0));
        assert!(quorum.is_acknowledged(5) && !quorum.is_acknowledged(6));
        assert_eq!(quorum.pending_in_sync(), None, "record 6 may have been answered for without it");
        quorum.acknowledge(&other, 6, at(0));
        let both = InSyncSet::from([me.clone(), other.clone()]);
        assert_eq!(quorum.pending_in_sync(), Some(both.clone()));
        // The answer is lost: it is asked again.
        assert_eq!(quorum.pending_in_sync(), Some(both.clone()));
        quorum.confirm_in_sync(both);
        assert_eq!((quorum.pending_in_sync(), quorum.in_sync()), (None, 2));
        assert!(quorum.acknowledge(&other, 7, at(10)));
        assert!(quorum.is_acknowledged(7) && quorum.remove_silent(at(1010), at(1000)).is_empty());
        assert_eq!(quorum.remove_silent(at(1011), at(1000)), std::slice::from_ref(&other));
        assert!(!quorum.is_acknowledged(8) && !quorum.acknowledge(&other, 7, at(1012)));
        let alone = InSyncSet::from([me]);
        assert_eq!(quorum.pending_in_sync(), Some(alone.clone()));
        assert!(!quorum.is_acknowledged(8), "the store may still list it");
        quorum.confirm_in_sync(alone);
        assert!(quorum.is_acknowledged(8));
    }

    #[test]
    fn who_begins_anew_takes_the_place_of_its_earlier_life() {
        let mut quorum = InSyncTracker::new(member("a", 1));
        quorum.join(&member("b", 1), 5, 5, at(0));
        let listed = quorum.pending_in_sync().unwrap();
        quorum.confirm_in_sync(listed);
        quorum.join(&member("b", 2), 7, 7, at(1));
        assert!(!quorum.is_acknowledged(6));
        let listed = quorum.pending_in_sync().unwrap();
        assert_eq!(listed, InSyncSet::from([member("a", 1), member("b", 2)]));
        quorum.confirm_in_sync(listed);
        assert!(quorum.is_acknowledged(7) && !quorum.is_acknowledged(8));
    }

    #[test]
    fn who_comes_back_while_it_is_removed_is_waited_for() {
        let (me, other) = (member("a", 1), member("b", 1));
        let mut quorum = InSyncTracker::new(me);
        quorum.join(&other, 5, 5, at(0));
        let both = quorum.pending_in_sync().unwrap();
        quorum.confirm_in_sync(both.clone());
        quorum.remove_silent(at(2000), at(1000));
        let alone = quorum.pending_in_sync().unwrap();
        quorum.join(&other, 9, 9, at(2001));
        quorum.confirm_in_sync(alone);
        assert!(!quorum.is_acknowledged(10));
        assert_eq!(quorum.pending_in_sync(), Some(both));
    }
}
