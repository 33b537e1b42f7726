//! Who leads, as one master sees it: which question to ask the store next, and until when the answers hold.
//!
//! Nothing here waits or reads a clock: times are durations since any fixed moment of this master's monotonic clock.

use std::time::Duration;

use super::coordinator::{Candidacy, ElectedLeader, ElectionView, LeaderTerm};
use super::member::{HaMember, InSyncSet};

/// How long what takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElectionTimings {
    /// After which time without a renewal the store takes the leader for gone.
    pub lease: Duration,
}

impl ElectionTimings {
    /// How long a leader may serve after it *sent* a renewal that was answered: so much less than the lease that its clock may
    /// run a third slower than the store's.
    pub fn serving_time(self) -> Duration {
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
    pub fn response_timeout(self) -> Duration {
        self.lease / 6
    }
}

/// A question for the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElectionAction {
    /// [`HaCoordinator::observe`](super::Coordinator::observe).
    Observe,
    /// [`HaCoordinator::campaign`](super::Coordinator::campaign). Before it is asked, this master must have stopped following: what
    /// it acknowledges afterwards might be missing when it leads.
    Campaign(Candidacy),
    /// [`HaCoordinator::renew`](super::Coordinator::renew).
    Renew(LeaderTerm),
    /// [`HaCoordinator::withdraw`](super::Coordinator::withdraw).
    Withdraw(i64, InSyncSet),
    /// [`HaCoordinator::resign`](super::Coordinator::resign).
    Resign(LeaderTerm),
}

/// What the store said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElectionResponse {
    /// To [`ElectionAction::Observe`].
    View(ElectionView),
    /// To [`ElectionAction::Campaign`].
    CampaignResult(Option<LeaderTerm>),
    /// To [`ElectionAction::Renew`]: whether there was still a lease.
    Renewed(bool),
    /// To [`ElectionAction::Withdraw`] and [`ElectionAction::Resign`].
    Done,
    /// Nothing in time, or nothing that helps.
    Failed,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElectorOutput {
    /// Ask this, and tell the answer.
    Act(ElectionAction),
    /// Nothing until then.
    Wait(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ServingLease {
    tenure: LeaderTerm,
    /// Until when this master may serve.
    until: Duration,
}

/// One master's part in elections.
#[derive(Clone, Debug)]
pub struct LeaderElector {
    member: HaMember,
    replication: String,
    times: ElectionTimings,
    /// Whether it may lead without being in sync.
    force: bool,
    serving_lease: Option<ServingLease>,
    /// What others see of this master's last lease is better removed.
    resign: Option<LeaderTerm>,
    view: ElectionView,
    /// Whether to act on the view before the next look.
    view_is_fresh: bool,
    next_poll: Duration,
}

impl LeaderElector {
    /// A master that does not know yet who leads. With `force` it may lead once although others may know more.
    pub fn new(member: HaMember, replication: String, times: ElectionTimings, force: bool) -> Self {
        Self {
            member,
            replication,
            times,
            force,
            serving_lease: None,
            resign: None,
            view: ElectionView::default(),
            view_is_fresh: false,
            next_poll: Duration::ZERO,
        }
    }

    /// What to do now.
    pub fn poll(&mut self, now: Duration) -> ElectorOutput {
        self.expire(now);
        if let Some(tenure) = self.resign {
            return ElectorOutput::Act(ElectionAction::Resign(tenure));
        }
        if self.view_is_fresh && self.serving_lease.is_none() {
            self.view_is_fresh = false;
            if let Some(ask) = self.next_step() {
                return ElectorOutput::Act(ask);
            }
        }
        if now < self.next_poll {
            let until = self.serving_lease.map_or(self.next_poll, |it| it.until.min(self.next_poll));
            return ElectorOutput::Wait(until);
        }
        ElectorOutput::Act(
            self.serving_lease.map_or(ElectionAction::Observe, |it| ElectionAction::Renew(it.tenure)),
        )
    }

    /// The store has answered what was asked at the time `sent`.
    pub fn handle_response(&mut self, sent: Duration, now: Duration, answer: ElectionResponse) {
        let pause = |every: Duration| (sent + every).max(now);
        self.next_poll = pause(self.times.observe_every());
        match answer {
            ElectionResponse::View(view) => {
                self.view = view;
                self.view_is_fresh = true;
            }
            ElectionResponse::CampaignResult(Some(tenure)) => {
                self.serving_lease = Some(ServingLease { tenure, until: sent + self.times.serving_time() });
                self.force = false;
                self.next_poll = pause(self.times.renew_every());
            }
            ElectionResponse::Renewed(true) => {
                if let Some(leading) = &mut self.serving_lease {
                    leading.until = leading.until.max(sent + self.times.serving_time());
                }
                self.next_poll = pause(self.times.renew_every());
            }
            ElectionResponse::Renewed(false) => self.serving_lease = None,
            ElectionResponse::Done => self.resign = None,
            // It may be that the store has gone; then the lease ends by itself.
            ElectionResponse::Failed => self.resign = None,
            ElectionResponse::CampaignResult(None) => {}
        }
        self.expire(now);
    }

    /// The right to lead at this time, and until when it holds unless it is renewed.
    pub fn leading(&self, now: Duration) -> Option<(LeaderTerm, Duration)> {
        self.serving_lease.filter(|it| now < it.until).map(|it| (it.tenure, it.until))
    }

    /// The other master that leads, as last seen.
    pub fn leader(&self) -> Option<&ElectedLeader> {
        self.view
            .leader
            .as_ref()
            .filter(|it| self.serving_lease.is_none() && it.address != self.member.address)
    }

    /// Whether this master has what is needed to lead next, as last seen.
    pub fn is_in_sync(&self) -> bool {
        self.view.in_sync.as_ref().is_some_and(|(members, _)| members.contains(&self.member))
    }

    /// Somebody else found out that another leads.
    pub fn mark_deposed(&mut self) {
        self.serving_lease = None;
    }

    /// Gives the lease back.
    pub fn step_down(&mut self) {
        self.resign = self.serving_lease.take().map(|it| it.tenure);
    }

    fn expire(&mut self, now: Duration) {
        if self.serving_lease.is_some_and(|it| now >= it.until) {
            self.step_down();
            self.next_poll = now;
        }
    }

    /// What this master wants of the store, with what it has seen.
    fn next_step(&self) -> Option<ElectionAction> {
        if self.view.leader.is_some() {
            return None;
        }
        let bid = Candidacy {
            member: self.member.clone(),
            replication: self.replication.clone(),
            revision: self.view.revision(),
            lease: self.times.lease,
        };
        let Some((members, revision)) = &self.view.in_sync else {
            return Some(ElectionAction::Campaign(bid));
        };
        if members.is_empty() || members.contains(&self.member) || self.force {
            return Some(ElectionAction::Campaign(bid));
        }
        // This master itself in an earlier life, whose state is lost. If nobody else had it, it is lost for all.
        let lost = |it: &&HaMember| it.address == self.member.address;
        let others: InSyncSet = members.iter().filter(|it| !lost(it)).cloned().collect();
        match members.len() - others.len() {
            0 => None,
            _ if others.is_empty() => Some(ElectionAction::Campaign(bid)),
            _ => Some(ElectionAction::Withdraw(*revision, others)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: ElectionTimings = ElectionTimings { lease: Duration::from_secs(3) };
    const TENURE: LeaderTerm = LeaderTerm { term: 5, lease: 9 };

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn member(address: &str, incarnation: u64) -> HaMember {
        HaMember { address: address.to_owned(), incarnation }
    }

    fn elector(force: bool) -> LeaderElector {
        LeaderElector::new(member("a", 1), "a:r".to_owned(), TIMES, force)
    }

    /// What a master that has seen this wants.
    fn wants(mut elector: LeaderElector, in_sync: Option<&[HaMember]>) -> Option<ElectionAction> {
        assert_eq!(elector.poll(at(0)), ElectorOutput::Act(ElectionAction::Observe));
        let in_sync = in_sync.map(|members| (members.iter().cloned().collect(), 7));
        elector.handle_response(at(0), at(1), ElectionResponse::View(ElectionView { leader: None, in_sync }));
        match elector.poll(at(1)) {
            ElectorOutput::Act(ask) => Some(ask),
            ElectorOutput::Wait(_) => None,
        }
    }

    #[test]
    fn only_who_may_have_all_wants_to_lead() {
        let bids = |ask: Option<ElectionAction>| matches!(ask, Some(ElectionAction::Campaign(_)));
        assert!(bids(wants(elector(false), None)), "the first of all");
        assert!(bids(wants(elector(false), Some(&[member("a", 1), member("b", 1)]))));
        assert_eq!(wants(elector(false), Some(&[member("b", 1)])), None);
        assert!(bids(wants(elector(true), Some(&[member("b", 1)]))), "forced");
        // What this master itself had is lost: for all if nobody else had it.
        assert!(bids(wants(elector(false), Some(&[member("a", 8)]))));
        let others = InSyncSet::from([member("b", 1)]);
        let withdrawn = wants(elector(false), Some(&[member("a", 8), member("b", 1)]));
        assert_eq!(withdrawn, Some(ElectionAction::Withdraw(7, others)));
    }

    #[test]
    fn the_right_to_lead_counts_from_the_question() {
        let mut elector = elector(false);
        elector.handle_response(at(1000), at(1400), ElectionResponse::CampaignResult(Some(TENURE)));
        assert_eq!(elector.leading(at(1400)), Some((TENURE, at(3000))));
        assert_eq!(elector.poll(at(1400)), ElectorOutput::Wait(at(1500)));
        assert_eq!(elector.poll(at(1500)), ElectorOutput::Act(ElectionAction::Renew(TENURE)));
        elector.handle_response(at(1500), at(1900), ElectionResponse::Renewed(true));
        assert_eq!(elector.leading(at(3499)), Some((TENURE, at(3500))));
        // Etcd is silent.
        elector.handle_response(at(2000), at(2500), ElectionResponse::Failed);
        assert_eq!(elector.poll(at(2500)), ElectorOutput::Act(ElectionAction::Renew(TENURE)));
        assert_eq!(elector.leading(at(3500)), None);
        assert_eq!(elector.poll(at(3500)), ElectorOutput::Act(ElectionAction::Resign(TENURE)));
        elector.handle_response(at(3500), at(3600), ElectionResponse::Done);
        assert_eq!(elector.leading(at(3600)), None);
    }

    #[test]
    fn an_answer_that_comes_too_late_gives_nothing() {
        let mut elector = elector(false);
        elector.handle_response(at(0), at(2000), ElectionResponse::CampaignResult(Some(TENURE)));
        assert_eq!(elector.leading(at(2000)), None);
        assert_eq!(elector.poll(at(2000)), ElectorOutput::Act(ElectionAction::Resign(TENURE)));
    }
}
