//! Who leads, as one master sees it: which question to ask the store next, and until when the answers hold.
//!
//! Nothing here waits or reads a clock: times are durations since any fixed moment of this master's monotonic clock.

use std::time::Duration;

use super::coordinator::{Bid, Leader, Tenure, View};
use super::member::{InSync, Member};

/// How long what takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// After which time without a renewal the store takes the leader for gone.
    pub lease: Duration,
}

impl Times {
    /// How long a leader may serve after it *sent* a renewal that was answered: so much less than the lease that its clock may
    /// run a third slower than the store's.
    pub fn usable(self) -> Duration {
        self.lease * 2 / 3
    }

    /// How often a leader renews.
    pub fn renew_every(self) -> Duration {
        self.lease / 6
    }

    /// How often others look who leads.
    pub fn observe_every(self) -> Duration {
        self.lease / 12
    }

    /// How long an answer of the store is waited for.
    pub fn patience(self) -> Duration {
        self.lease / 6
    }
}

/// A question for the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// [`Coordinator::observe`](super::Coordinator::observe).
    Observe,
    /// [`Coordinator::campaign`](super::Coordinator::campaign). Before it is asked, this master must have stopped following: what
    /// it acknowledges afterwards might be missing when it leads.
    Campaign(Bid),
    /// [`Coordinator::renew`](super::Coordinator::renew).
    Renew(Tenure),
    /// [`Coordinator::withdraw`](super::Coordinator::withdraw).
    Withdraw(i64, InSync),
    /// [`Coordinator::resign`](super::Coordinator::resign).
    Resign(Tenure),
}

/// What the store said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Ask::Observe`].
    View(View),
    /// To [`Ask::Campaign`].
    Won(Option<Tenure>),
    /// To [`Ask::Renew`]: whether there was still a lease.
    Renewed(bool),
    /// To [`Ask::Withdraw`] and [`Ask::Resign`].
    Done,
    /// Nothing in time, or nothing that helps.
    Failed,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Due {
    /// Ask this, and tell the answer.
    Ask(Ask),
    /// Nothing until then.
    Wait(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leading {
    tenure: Tenure,
    /// Until when this master may serve.
    until: Duration,
}

/// One master's part in elections.
#[derive(Clone, Debug)]
pub struct Elector {
    me: Member,
    replication: String,
    times: Times,
    /// Whether it may lead without being in sync.
    force: bool,
    leading: Option<Leading>,
    /// What others see of this master's last lease is better removed.
    resign: Option<Tenure>,
    view: View,
    /// Whether to act on the view before the next look.
    fresh: bool,
    next: Duration,
}

impl Elector {
    /// A master that does not know yet who leads. With `force` it may lead once although others may know more.
    pub fn new(me: Member, replication: String, times: Times, force: bool) -> Self {
        Self {
            me,
            replication,
            times,
            force,
            leading: None,
            resign: None,
            view: View::default(),
            fresh: false,
            next: Duration::ZERO,
        }
    }

    /// What to do now.
    pub fn due(&mut self, now: Duration) -> Due {
        self.expire(now);
        if let Some(tenure) = self.resign {
            return Due::Ask(Ask::Resign(tenure));
        }
        if self.fresh && self.leading.is_none() {
            self.fresh = false;
            if let Some(ask) = self.ambition() {
                return Due::Ask(ask);
            }
        }
        if now < self.next {
            let until = self.leading.map_or(self.next, |it| it.until.min(self.next));
            return Due::Wait(until);
        }
        Due::Ask(self.leading.map_or(Ask::Observe, |it| Ask::Renew(it.tenure)))
    }

    /// The store has answered what was asked at the time `sent`.
    pub fn answered(&mut self, sent: Duration, now: Duration, answer: Answer) {
        let pause = |every: Duration| (sent + every).max(now);
        self.next = pause(self.times.observe_every());
        match answer {
            Answer::View(view) => {
                self.view = view;
                self.fresh = true;
            }
            Answer::Won(Some(tenure)) => {
                self.leading = Some(Leading { tenure, until: sent + self.times.usable() });
                self.force = false;
                self.next = pause(self.times.renew_every());
            }
            Answer::Renewed(true) => {
                if let Some(leading) = &mut self.leading {
                    leading.until = leading.until.max(sent + self.times.usable());
                }
                self.next = pause(self.times.renew_every());
            }
            Answer::Renewed(false) => self.leading = None,
            Answer::Done => self.resign = None,
            // It may be that the store has gone; then the lease ends by itself.
            Answer::Failed => self.resign = None,
            Answer::Won(None) => {}
        }
        self.expire(now);
    }

    /// The right to lead at this time, and until when it holds unless it is renewed.
    pub fn leading(&self, now: Duration) -> Option<(Tenure, Duration)> {
        self.leading.filter(|it| now < it.until).map(|it| (it.tenure, it.until))
    }

    /// The other master that leads, as last seen.
    pub fn leader(&self) -> Option<&Leader> {
        self.view.leader.as_ref().filter(|it| self.leading.is_none() && it.address != self.me.address)
    }

    /// Whether this master has what is needed to lead next, as last seen.
    pub fn is_in_sync(&self) -> bool {
        self.view.in_sync.as_ref().is_some_and(|(members, _)| members.contains(&self.me))
    }

    /// Somebody else found out that another leads.
    pub fn deposed(&mut self) {
        self.leading = None;
    }

    /// Gives the lease back.
    pub fn step_down(&mut self) {
        self.resign = self.leading.take().map(|it| it.tenure);
    }

    fn expire(&mut self, now: Duration) {
        if self.leading.is_some_and(|it| now >= it.until) {
            self.step_down();
            self.next = now;
        }
    }

    /// What this master wants of the store, with what it has seen.
    fn ambition(&self) -> Option<Ask> {
        if self.view.leader.is_some() {
            return None;
        }
        let bid = Bid {
            member: self.me.clone(),
            replication: self.replication.clone(),
            revision: self.view.revision(),
            lease: self.times.lease,
        };
        let Some((members, revision)) = &self.view.in_sync else { return Some(Ask::Campaign(bid)) };
        if members.is_empty() || members.contains(&self.me) || self.force {
            return Some(Ask::Campaign(bid));
        }
        // This master itself in an earlier life, whose state is lost. If nobody else had it, it is lost for all.
        let lost = |it: &&Member| it.address == self.me.address;
        let others: InSync = members.iter().filter(|it| !lost(it)).cloned().collect();
        match members.len() - others.len() {
            0 => None,
            _ if others.is_empty() => Some(Ask::Campaign(bid)),
            _ => Some(Ask::Withdraw(*revision, others)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: Times = Times { lease: Duration::from_secs(3) };
    const TENURE: Tenure = Tenure { term: 5, lease: 9 };

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn member(address: &str, incarnation: u64) -> Member {
        Member { address: address.to_owned(), incarnation }
    }

    fn elector(force: bool) -> Elector {
        Elector::new(member("a", 1), "a:r".to_owned(), TIMES, force)
    }

    /// What a master that has seen this wants.
    fn wants(mut elector: Elector, in_sync: Option<&[Member]>) -> Option<Ask> {
        assert_eq!(elector.due(at(0)), Due::Ask(Ask::Observe));
        let in_sync = in_sync.map(|members| (members.iter().cloned().collect(), 7));
        elector.answered(at(0), at(1), Answer::View(View { leader: None, in_sync }));
        match elector.due(at(1)) {
            Due::Ask(ask) => Some(ask),
            Due::Wait(_) => None,
        }
    }

    #[test]
    fn only_who_may_have_all_wants_to_lead() {
        let bids = |ask: Option<Ask>| matches!(ask, Some(Ask::Campaign(_)));
        assert!(bids(wants(elector(false), None)), "the first of all");
        assert!(bids(wants(elector(false), Some(&[member("a", 1), member("b", 1)]))));
        assert_eq!(wants(elector(false), Some(&[member("b", 1)])), None);
        assert!(bids(wants(elector(true), Some(&[member("b", 1)]))), "forced");
        // What this master itself had is lost: for all if nobody else had it.
        assert!(bids(wants(elector(false), Some(&[member("a", 8)]))));
        let others = InSync::from([member("b", 1)]);
        let withdrawn = wants(elector(false), Some(&[member("a", 8), member("b", 1)]));
        assert_eq!(withdrawn, Some(Ask::Withdraw(7, others)));
    }

    #[test]
    fn the_right_to_lead_counts_from_the_question() {
        let mut elector = elector(false);
        elector.answered(at(1000), at(1400), Answer::Won(Some(TENURE)));
        assert_eq!(elector.leading(at(1400)), Some((TENURE, at(3000))));
        assert_eq!(elector.due(at(1400)), Due::Wait(at(1500)));
        assert_eq!(elector.due(at(1500)), Due::Ask(Ask::Renew(TENURE)));
        elector.answered(at(1500), at(1900), Answer::Renewed(true));
        assert_eq!(elector.leading(at(3499)), Some((TENURE, at(3500))));
        // Etcd is silent.
        elector.answered(at(2000), at(2500), Answer::Failed);
        assert_eq!(elector.due(at(2500)), Due::Ask(Ask::Renew(TENURE)));
        assert_eq!(elector.leading(at(3500)), None);
        assert_eq!(elector.due(at(3500)), Due::Ask(Ask::Resign(TENURE)));
        elector.answered(at(3500), at(3600), Answer::Done);
        assert_eq!(elector.leading(at(3600)), None);
    }

    #[test]
    fn an_answer_that_comes_too_late_gives_nothing() {
        let mut elector = elector(false);
        elector.answered(at(0), at(2000), Answer::Won(Some(TENURE)));
        assert_eq!(elector.leading(at(2000)), None);
        assert_eq!(elector.due(at(2000)), Due::Ask(Ask::Resign(TENURE)));
    }
}
