//! One master's election logic: the next request to the coordinator, and how long its responses are valid.
//!
//! No I/O and no clock here: timings are durations since any fixed moment of this master's monotonic clock.

use std::time::Duration;

use super::coordinator::{Candidacy, ElectedLeader, ElectionView, LeaderTerm};
use super::member::{HaMember, InSyncSet};

/// Intervals and timeouts of the election, all derived from the lease duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElectionTimings {
    /// Lease duration: without a renewal in this time, the coordinator drops the leader.
    pub lease: Duration,
}

impl ElectionTimings {
    /// How long a leader may serve after it *sent* a renewal that was confirmed: two thirds of the lease, so that the leader's clock may
    /// run a third slower than the coordinator's.
    pub fn serving_time(self) -> Duration {
        self.lease * 2 / 3
    }

    /// Renewal interval of a leader.
    pub fn renew_every(self) -> Duration {
        self.lease / 6
    }

    /// Polling interval of the other masters.
    pub fn observe_every(self) -> Duration {
        self.lease / 12
    }

    /// Timeout of one request to the coordinator.
    pub fn response_timeout(self) -> Duration {
        self.lease / 6
    }
}

/// A request to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElectionAction {
    Observe,
    /// See [`HaCoordinator::campaign`](super::HaCoordinator::campaign). This master must stop following before it is sent: a record that
    /// it acknowledges afterwards could be missing once it leads.
    Campaign(Candidacy),
    Renew(LeaderTerm),
    /// Removes this master's lost incarnation from the in-sync set: see
    /// [`HaCoordinator::update_in_sync_without_leader`](super::HaCoordinator::update_in_sync_without_leader).
    Withdraw(i64, InSyncSet),
    Resign(LeaderTerm),
}

/// The coordinator's response to an [`ElectionAction`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElectionResponse {
    View(ElectionView),
    CampaignResult(Option<LeaderTerm>),
    /// Response to [`ElectionAction::Renew`]: whether the lease still existed.
    Renewed(bool),
    /// Response to [`ElectionAction::Withdraw`] and [`ElectionAction::Resign`].
    Done,
    /// The coordinator did not respond in time, or with an error.
    Failed,
}

/// The elector's next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElectorOutput {
    /// Send this request; pass the response to [`LeaderElector::handle_response`].
    Act(ElectionAction),
    /// Do nothing until this time.
    Wait(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ServingLease {
    leader_term: LeaderTerm,
    /// This master may serve until this time.
    until: Duration,
}

/// Decides when one master campaigns, renews and resigns.
#[derive(Clone, Debug)]
pub struct LeaderElector {
    member: HaMember,
    replication: String,
    timings: ElectionTimings,
    /// Whether it may become leader without being in sync.
    force: bool,
    serving_lease: Option<ServingLease>,
    /// The last lease, to be released early so that its keys do not block the next election.
    resign: Option<LeaderTerm>,
    view: ElectionView,
    /// Whether the view was read since the last decision.
    view_is_fresh: bool,
    next_poll: Duration,
}

impl LeaderElector {
    /// A master that has not polled the coordinator yet. With `force` it may become leader once without being in sync.
    pub fn new(member: HaMember, replication: String, timings: ElectionTimings, force: bool) -> Self {
        Self {
            member,
            replication,
            timings,
            force,
            serving_lease: None,
            resign: None,
            view: ElectionView::default(),
            view_is_fresh: false,
            next_poll: Duration::ZERO,
        }
    }

    /// Returns the next step at the time `now`.
    pub fn poll(&mut self, now: Duration) -> ElectorOutput {
        self.expire(now);
        if let Some(leader_term) = self.resign {
            return ElectorOutput::Act(ElectionAction::Resign(leader_term));
        }
        if self.view_is_fresh && self.serving_lease.is_none() {
            self.view_is_fresh = false;
            if let Some(action) = self.next_step() {
                return ElectorOutput::Act(action);
            }
        }
        if now < self.next_poll {
            let until =
                self.serving_lease.map_or(self.next_poll, |serving| serving.until.min(self.next_poll));
            return ElectorOutput::Wait(until);
        }
        ElectorOutput::Act(
            self.serving_lease
                .map_or(ElectionAction::Observe, |serving| ElectionAction::Renew(serving.leader_term)),
        )
    }

    /// Handles the response to a request that was sent at the time `sent`.
    pub fn handle_response(&mut self, sent: Duration, now: Duration, response: ElectionResponse) {
        let next_poll = |every: Duration| (sent + every).max(now);
        self.next_poll = next_poll(self.timings.observe_every());
        match response {
            ElectionResponse::View(view) => {
                self.view = view;
                self.view_is_fresh = true;
            }
            ElectionResponse::CampaignResult(Some(leader_term)) => {
                self.serving_lease =
                    Some(ServingLease { leader_term, until: sent + self.timings.serving_time() });
                self.force = false;
                self.next_poll = next_poll(self.timings.renew_every());
            }
            ElectionResponse::Renewed(true) => {
                if let Some(leading) = &mut self.serving_lease {
                    leading.until = leading.until.max(sent + self.timings.serving_time());
                }
                self.next_poll = next_poll(self.timings.renew_every());
            }
            ElectionResponse::Renewed(false) => self.serving_lease = None,
            ElectionResponse::Done => self.resign = None,
            // If the coordinator is unreachable, the lease expires without this request.
            ElectionResponse::Failed => self.resign = None,
            ElectionResponse::CampaignResult(None) => {}
        }
        self.expire(now);
    }

    /// The leadership held at this time, and the time until which it is valid without a renewal.
    pub fn leading(&self, now: Duration) -> Option<(LeaderTerm, Duration)> {
        self.serving_lease
            .filter(|serving| now < serving.until)
            .map(|serving| (serving.leader_term, serving.until))
    }

    /// The current leader, if it is another master, as of the last poll.
    pub fn leader(&self) -> Option<&ElectedLeader> {
        self.view
            .leader
            .as_ref()
            .filter(|leader| self.serving_lease.is_none() && leader.address != self.member.address)
    }

    /// Whether this master is in the in-sync set, as of the last poll.
    pub fn is_in_sync(&self) -> bool {
        self.view.in_sync.as_ref().is_some_and(|(members, _)| members.contains(&self.member))
    }

    /// Ends leadership because the coordinator reported another leader.
    pub fn mark_deposed(&mut self) {
        self.serving_lease = None;
    }

    /// Ends leadership and schedules the release of the lease.
    pub fn step_down(&mut self) {
        self.resign = self.serving_lease.take().map(|serving| serving.leader_term);
    }

    fn expire(&mut self, now: Duration) {
        if self.serving_lease.is_some_and(|serving| now >= serving.until) {
            self.step_down();
            self.next_poll = now;
        }
    }

    /// The request that follows from the last view: a campaign, a removal of this master's lost incarnation, or none.
    fn next_step(&self) -> Option<ElectionAction> {
        if self.view.leader.is_some() {
            return None;
        }
        let candidacy = Candidacy {
            member: self.member.clone(),
            replication: self.replication.clone(),
            revision: self.view.revision(),
            lease: self.timings.lease,
        };
        let Some((members, revision)) = &self.view.in_sync else {
            return Some(ElectionAction::Campaign(candidacy));
        };
        if members.is_empty() || members.contains(&self.member) || self.force {
            return Some(ElectionAction::Campaign(candidacy));
        }
        // An earlier incarnation of this master, whose state is lost. If it was the only member, no copy is left to wait for.
        let is_own_incarnation = |other: &&HaMember| other.address == self.member.address;
        let others: InSyncSet = members.iter().filter(|other| !is_own_incarnation(other)).cloned().collect();
        match members.len() - others.len() {
            0 => None,
            _ if others.is_empty() => Some(ElectionAction::Campaign(candidacy)),
            _ => Some(ElectionAction::Withdraw(*revision, others)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: ElectionTimings = ElectionTimings { lease: Duration::from_secs(3) };
    const LEADER_TERM: LeaderTerm = LeaderTerm { term: 5, lease: 9 };

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn member(address: &str, incarnation: u64) -> HaMember {
        HaMember { address: address.to_owned(), incarnation }
    }

    fn elector(force: bool) -> LeaderElector {
        LeaderElector::new(member("a", 1), "a:r".to_owned(), TIMES, force)
    }

    /// The request of a master that has observed this in-sync set.
    fn next_action(mut elector: LeaderElector, in_sync: Option<&[HaMember]>) -> Option<ElectionAction> {
        assert_eq!(elector.poll(at(0)), ElectorOutput::Act(ElectionAction::Observe));
        let in_sync = in_sync.map(|members| (members.iter().cloned().collect(), 7));
        elector.handle_response(at(0), at(1), ElectionResponse::View(ElectionView { leader: None, in_sync }));
        match elector.poll(at(1)) {
            ElectorOutput::Act(action) => Some(action),
            ElectorOutput::Wait(_) => None,
        }
    }

    #[test]
    fn only_in_sync_masters_campaign() {
        let campaigns = |action: Option<ElectionAction>| matches!(action, Some(ElectionAction::Campaign(_)));
        assert!(campaigns(next_action(elector(false), None)), "no leader before");
        assert!(campaigns(next_action(elector(false), Some(&[member("a", 1), member("b", 1)]))));
        assert_eq!(next_action(elector(false), Some(&[member("b", 1)])), None);
        assert!(campaigns(next_action(elector(true), Some(&[member("b", 1)]))), "forced");
        // The state of incarnation 8 is lost; no other member has a copy.
        assert!(campaigns(next_action(elector(false), Some(&[member("a", 8)]))));
        let others = InSyncSet::from([member("b", 1)]);
        let withdrawn = next_action(elector(false), Some(&[member("a", 8), member("b", 1)]));
        assert_eq!(withdrawn, Some(ElectionAction::Withdraw(7, others)));
    }

    #[test]
    fn a_lease_counts_from_the_time_of_the_request() {
        let mut elector = elector(false);
        elector.handle_response(at(1000), at(1400), ElectionResponse::CampaignResult(Some(LEADER_TERM)));
        assert_eq!(elector.leading(at(1400)), Some((LEADER_TERM, at(3000))));
        assert_eq!(elector.poll(at(1400)), ElectorOutput::Wait(at(1500)));
        assert_eq!(elector.poll(at(1500)), ElectorOutput::Act(ElectionAction::Renew(LEADER_TERM)));
        elector.handle_response(at(1500), at(1900), ElectionResponse::Renewed(true));
        assert_eq!(elector.leading(at(3499)), Some((LEADER_TERM, at(3500))));
        // etcd does not respond.
        elector.handle_response(at(2000), at(2500), ElectionResponse::Failed);
        assert_eq!(elector.poll(at(2500)), ElectorOutput::Act(ElectionAction::Renew(LEADER_TERM)));
        assert_eq!(elector.leading(at(3500)), None);
        assert_eq!(elector.poll(at(3500)), ElectorOutput::Act(ElectionAction::Resign(LEADER_TERM)));
        elector.handle_response(at(3500), at(3600), ElectionResponse::Done);
        assert_eq!(elector.leading(at(3600)), None);
    }

    #[test]
    fn a_late_response_grants_no_leadership() {
        let mut elector = elector(false);
        elector.handle_response(at(0), at(2000), ElectionResponse::CampaignResult(Some(LEADER_TERM)));
        assert_eq!(elector.leading(at(2000)), None);
        assert_eq!(elector.poll(at(2000)), ElectorOutput::Act(ElectionAction::Resign(LEADER_TERM)));
    }
}
