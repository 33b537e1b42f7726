//! Whose acknowledgement a change needs before its caller is answered.
//!
//! The rule that loses nothing: whoever the store lists as in sync has to acknowledge. So a follower is waited for *before* it is
//! listed, and until *after* it is known to be listed no more.

use std::collections::BTreeMap;
use std::time::Duration;

use super::member::{InSync, Member};

#[derive(Clone, Copy, Debug)]
struct Follower {
    /// It has all records up to this one.
    acknowledged: u64,
    /// When it was last heard of.
    heard: Duration,
    /// It may be listed once it has this record: up to it, others may have been answered for without it.
    joined_at: u64,
    /// It is to be listed no more.
    leaving: bool,
}

/// The followers that a leader waits for.
#[derive(Clone, Debug)]
pub struct Quorum {
    me: Member,
    required: BTreeMap<Member, Follower>,
    /// What the store lists for certain. Nothing while an attempt to change it may have succeeded or not.
    listed: Option<InSync>,
}

impl Quorum {
    /// That of a leader who has just been elected, so that it alone is listed.
    pub fn new(me: Member) -> Self {
        let listed = Some(InSync::from([me.clone()]));
        Self { me, required: BTreeMap::new(), listed }
    }

    /// A follower has the whole state up to a record: from now on it is waited for, and it is to be listed as soon as it has the
    /// record `last` too, the newest of now.
    pub fn join(&mut self, member: &Member, acknowledged: u64, last: u64, now: Duration) {
        // Its own earlier life is gone.
        let before = self.required.iter_mut().filter(|(it, _)| it.address == member.address && *it != member);
        before.for_each(|(_, it)| it.leaving = true);
        let waited_for = self.required.get(member).filter(|it| !it.leaving);
        let joined_at = waited_for.map_or(last, |it| it.joined_at);
        self.required
            .insert(member.clone(), Follower { acknowledged, heard: now, joined_at, leaving: false });
    }

    /// A follower has all records up to this one. Returns whether it is waited for.
    pub fn acknowledge(&mut self, member: &Member, number: u64, now: Duration) -> bool {
        let Some(follower) = self.required.get_mut(member) else { return false };
        follower.acknowledged = follower.acknowledged.max(number);
        follower.heard = now;
        !follower.leaving
    }

    /// Whether all that are waited for have the record.
    pub fn has(&self, number: u64) -> bool {
        self.required.values().all(|it| it.acknowledged >= number)
    }

    /// Gives up on those who have been silent for longer than `patience`. Returns them.
    pub fn give_up(&mut self, now: Duration, patience: Duration) -> Vec<Member> {
        let silent = |it: &Follower| !it.leaving && now.saturating_sub(it.heard) > patience;
        let mut given_up = Vec::new();
        for (member, follower) in self.required.iter_mut().filter(|(_, it)| silent(it)) {
            follower.leaving = true;
            given_up.push(member.clone());
        }
        given_up
    }

    /// What the store has to list, if it is not that for certain. From now on the store may list it.
    pub fn to_list(&mut self) -> Option<InSync> {
        let is_whole = |it: &Follower| !it.leaving && it.acknowledged >= it.joined_at;
        let whole = self.required.iter().filter(|(_, it)| is_whole(it)).map(|(member, _)| member.clone());
        let wanted: InSync = whole.chain([self.me.clone()]).collect();
        if self.listed.as_ref() == Some(&wanted) {
            // Those who leave without having been listed.
            self.required.retain(|_, it| !it.leaving);
            return None;
        }
        self.listed = None;
        Some(wanted)
    }

    /// The store lists these.
    pub fn listed(&mut self, members: InSync) {
        self.required.retain(|member, it| !it.leaving || members.contains(member));
        self.listed = Some(members);
    }

    /// What the store lists, as far as known, this master included.
    pub fn in_sync(&self) -> usize {
        self.listed.as_ref().map_or(1, InSync::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(address: &str, incarnation: u64) -> Member {
        Member { address: address.to_owned(), incarnation }
    }

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_follower_counts_before_it_is_listed_and_until_it_is_not() {
        let (me, other) = (member("a", 1), member("b", 1));
        let mut quorum = Quorum::new(me.clone());
        assert!(quorum.has(u64::MAX) && quorum.to_list().is_none());
        quorum.join(&other, 5, 6, at(0));
        assert!(quorum.has(5) && !quorum.has(6));
        assert_eq!(quorum.to_list(), None, "record 6 may have been answered for without it");
        quorum.acknowledge(&other, 6, at(0));
        let both = InSync::from([me.clone(), other.clone()]);
        assert_eq!(quorum.to_list(), Some(both.clone()));
        // The answer is lost: it is asked again.
        assert_eq!(quorum.to_list(), Some(both.clone()));
        quorum.listed(both);
        assert_eq!((quorum.to_list(), quorum.in_sync()), (None, 2));
        assert!(quorum.acknowledge(&other, 7, at(10)));
        assert!(quorum.has(7) && quorum.give_up(at(1010), at(1000)).is_empty());
        assert_eq!(quorum.give_up(at(1011), at(1000)), std::slice::from_ref(&other));
        assert!(!quorum.has(8) && !quorum.acknowledge(&other, 7, at(1012)));
        let alone = InSync::from([me]);
        assert_eq!(quorum.to_list(), Some(alone.clone()));
        assert!(!quorum.has(8), "the store may still list it");
        quorum.listed(alone);
        assert!(quorum.has(8));
    }

    #[test]
    fn who_begins_anew_takes_the_place_of_its_earlier_life() {
        let mut quorum = Quorum::new(member("a", 1));
        quorum.join(&member("b", 1), 5, 5, at(0));
        let listed = quorum.to_list().unwrap();
        quorum.listed(listed);
        quorum.join(&member("b", 2), 7, 7, at(1));
        assert!(!quorum.has(6));
        let listed = quorum.to_list().unwrap();
        assert_eq!(listed, InSync::from([member("a", 1), member("b", 2)]));
        quorum.listed(listed);
        assert!(quorum.has(7) && !quorum.has(8));
    }

    #[test]
    fn who_comes_back_while_it_is_removed_is_waited_for() {
        let (me, other) = (member("a", 1), member("b", 1));
        let mut quorum = Quorum::new(me);
        quorum.join(&other, 5, 5, at(0));
        let both = quorum.to_list().unwrap();
        quorum.listed(both.clone());
        quorum.give_up(at(2000), at(1000));
        let alone = quorum.to_list().unwrap();
        quorum.join(&other, 9, 9, at(2001));
        quorum.listed(alone);
        assert!(!quorum.has(10));
        assert_eq!(quorum.to_list(), Some(both));
    }
}
