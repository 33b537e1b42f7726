//! The set of followers whose acknowledgement a change needs before the leader replies.
//!
//! Invariant that prevents data loss: every member of the stored in-sync set has to acknowledge. So a follower is required *before*
//! it is added to the stored set, and until *after* its removal from it is confirmed.

use std::collections::BTreeMap;
use std::time::Duration;

use super::member::{HaMember, InSyncSet};

#[derive(Clone, Copy, Debug)]
struct FollowerProgress {
    /// The follower has all records up to this one.
    acknowledged: u64,
    /// Time of the last frame from it.
    last_heard_at: Duration,
    /// It may enter the in-sync set once it has this record: earlier ones may have been confirmed to clients without it.
    eligible_from: u64,
    /// It is being removed from the in-sync set.
    leaving: bool,
}

/// Tracks the followers whose acknowledgements a leader needs.
#[derive(Clone, Debug)]
pub struct InSyncTracker {
    leader: HaMember,
    required: BTreeMap<HaMember, FollowerProgress>,
    /// The set that the coordinator has for certain. `None` while the result of an update is unknown.
    stored_in_sync: Option<InSyncSet>,
}

impl InSyncTracker {
    /// A new leader starts as the only member of the in-sync set.
    pub fn new(leader: HaMember) -> Self {
        let stored_in_sync = Some(InSyncSet::from([leader.clone()]));
        Self { leader, required: BTreeMap::new(), stored_in_sync }
    }

    /// A follower has the full state up to a record. It is required from now on, and enters the in-sync set once it has acknowledged
    /// the record `last`, the newest at this time.
    pub fn join(&mut self, member: &HaMember, acknowledged: u64, last: u64, now: Duration) {
        // Its earlier incarnation has lost its state.
        let earlier = self
            .required
            .iter_mut()
            .filter(|(existing, _)| existing.address == member.address && *existing != member);
        earlier.for_each(|(_, follower)| follower.leaving = true);
        let current = self.required.get(member).filter(|follower| !follower.leaving);
        let joined_at = current.map_or(last, |follower| follower.eligible_from);
        self.required.insert(
            member.clone(),
            FollowerProgress { acknowledged, last_heard_at: now, eligible_from: joined_at, leaving: false },
        );
    }

    /// A follower acknowledged all records up to this one. Returns false if it is not required (any more).
    pub fn acknowledge(&mut self, member: &HaMember, number: u64, now: Duration) -> bool {
        let Some(follower) = self.required.get_mut(member) else { return false };
        follower.acknowledged = follower.acknowledged.max(number);
        follower.last_heard_at = now;
        !follower.leaving
    }

    /// Whether all required followers have the record.
    pub fn is_acknowledged(&self, number: u64) -> bool {
        self.required.values().all(|follower| follower.acknowledged >= number)
    }

    /// Marks followers without a frame for longer than `follower_timeout` as leaving. Returns them.
    pub fn remove_silent(&mut self, now: Duration, follower_timeout: Duration) -> Vec<HaMember> {
        let silent = |follower: &FollowerProgress| {
            !follower.leaving && now.saturating_sub(follower.last_heard_at) > follower_timeout
        };
        let mut removed = Vec::new();
        for (member, follower) in self.required.iter_mut().filter(|(_, follower)| silent(follower)) {
            follower.leaving = true;
            removed.push(member.clone());
        }
        removed
    }

    /// The set to store, if it differs from the stored one. From now on the coordinator may have either.
    pub fn pending_in_sync(&mut self) -> Option<InSyncSet> {
        let is_caught_up = |follower: &FollowerProgress| {
            !follower.leaving && follower.acknowledged >= follower.eligible_from
        };
        let caught_up = self
            .required
            .iter()
            .filter(|(_, follower)| is_caught_up(follower))
            .map(|(member, _)| member.clone());
        let wanted: InSyncSet = caught_up.chain([self.leader.clone()]).collect();
        if self.stored_in_sync.as_ref() == Some(&wanted) {
            // Followers that leave before they were ever stored.
            self.required.retain(|_, follower| !follower.leaving);
            return None;
        }
        self.stored_in_sync = None;
        Some(wanted)
    }

    /// The coordinator has stored this set.
    pub fn confirm_in_sync(&mut self, members: InSyncSet) {
        self.required.retain(|member, follower| !follower.leaving || members.contains(member));
        self.stored_in_sync = Some(members);
    }

    /// Size of the stored in-sync set, this master included.
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
    fn followers_are_required_from_joining_until_confirmed_removal() {
        let (leader, other) = (member("a", 1), member("b", 1));
        let mut tracker = InSyncTracker::new(leader.clone());
        assert!(tracker.is_acknowledged(u64::MAX) && tracker.pending_in_sync().is_none());
        tracker.join(&other, 5, 6, at(0));
        assert!(tracker.is_acknowledged(5) && !tracker.is_acknowledged(6));
        assert_eq!(tracker.pending_in_sync(), None, "record 6 may have been confirmed without it");
        tracker.acknowledge(&other, 6, at(0));
        let both = InSyncSet::from([leader.clone(), other.clone()]);
        assert_eq!(tracker.pending_in_sync(), Some(both.clone()));
        // The coordinator's response was lost: the same set is stored again.
        assert_eq!(tracker.pending_in_sync(), Some(both.clone()));
        tracker.confirm_in_sync(both);
        assert_eq!((tracker.pending_in_sync(), tracker.in_sync()), (None, 2));
        assert!(tracker.acknowledge(&other, 7, at(10)));
        assert!(tracker.is_acknowledged(7) && tracker.remove_silent(at(1010), at(1000)).is_empty());
        assert_eq!(tracker.remove_silent(at(1011), at(1000)), std::slice::from_ref(&other));
        assert!(!tracker.is_acknowledged(8) && !tracker.acknowledge(&other, 7, at(1012)));
        let alone = InSyncSet::from([leader]);
        assert_eq!(tracker.pending_in_sync(), Some(alone.clone()));
        assert!(!tracker.is_acknowledged(8), "the stored set may still contain it");
        tracker.confirm_in_sync(alone);
        assert!(tracker.is_acknowledged(8));
    }

    #[test]
    fn a_new_incarnation_replaces_the_earlier_one() {
        let mut tracker = InSyncTracker::new(member("a", 1));
        tracker.join(&member("b", 1), 5, 5, at(0));
        let listed = tracker.pending_in_sync().unwrap();
        tracker.confirm_in_sync(listed);
        tracker.join(&member("b", 2), 7, 7, at(1));
        assert!(!tracker.is_acknowledged(6));
        let listed = tracker.pending_in_sync().unwrap();
        assert_eq!(listed, InSyncSet::from([member("a", 1), member("b", 2)]));
        tracker.confirm_in_sync(listed);
        assert!(tracker.is_acknowledged(7) && !tracker.is_acknowledged(8));
    }

    #[test]
    fn a_follower_that_rejoins_during_removal_is_required() {
        let (leader, other) = (member("a", 1), member("b", 1));
        let mut tracker = InSyncTracker::new(leader);
        tracker.join(&other, 5, 5, at(0));
        let both = tracker.pending_in_sync().unwrap();
        tracker.confirm_in_sync(both.clone());
        tracker.remove_silent(at(2000), at(1000));
        let alone = tracker.pending_in_sync().unwrap();
        tracker.join(&other, 9, 9, at(2001));
        tracker.confirm_in_sync(alone);
        assert!(!tracker.is_acknowledged(10));
        assert_eq!(tracker.pending_in_sync(), Some(both));
    }
}
