//! Simulated coordinator: linearizable, with leases that expire by its own clock.

use moongate_master::ha::{
    Candidacy, ElectedLeader, ElectionAction, ElectionResponse, ElectionView, InSyncSet, InSyncUpdateOutcome,
    LeaderTerm,
};

#[derive(Default)]
pub(crate) struct SimulatedCoordinator {
    revision: i64,
    leader: Option<(ElectedLeader, LeaderTerm)>,
    in_sync: Option<(InSyncSet, i64)>,
    /// Expiry and duration of the leader's lease in microseconds.
    lease_until: u64,
    lease: u64,
    /// Maximum size of the in-sync set so far.
    pub(crate) max_in_sync: usize,
}

impl SimulatedCoordinator {
    pub(crate) fn members(&self) -> InSyncSet {
        self.in_sync.as_ref().map(|(members, _)| members.clone()).unwrap_or_default()
    }

    fn put(&mut self, members: InSyncSet) -> i64 {
        self.revision += 1;
        self.max_in_sync = self.max_in_sync.max(members.len());
        self.in_sync = Some((members, self.revision));
        self.revision
    }

    fn expire(&mut self, now: u64) {
        if self.leader.is_some() && now >= self.lease_until {
            self.leader = None;
        }
    }

    fn view(&self) -> ElectionView {
        let leader = self.leader.as_ref().map(|(leader, _)| leader.clone());
        ElectionView { leader, in_sync: self.in_sync.clone() }
    }

    fn stored_revision(&self) -> i64 {
        self.in_sync.as_ref().map_or(0, |(_, revision)| *revision)
    }

    fn is_leader(&self, leader_term: LeaderTerm) -> bool {
        self.leader.as_ref().is_some_and(|(_, current)| *current == leader_term)
    }

    pub(crate) fn execute(&mut self, now: u64, action: &ElectionAction) -> ElectionResponse {
        self.expire(now);
        match action {
            ElectionAction::Observe => ElectionResponse::View(self.view()),
            ElectionAction::Campaign(candidacy) => {
                ElectionResponse::CampaignResult(self.campaign(now, candidacy))
            }
            ElectionAction::Renew(leader_term) => {
                let is_leader = self.is_leader(*leader_term);
                if is_leader {
                    self.lease_until = now + self.lease;
                }
                ElectionResponse::Renewed(is_leader)
            }
            ElectionAction::Withdraw(revision, members) => {
                if self.leader.is_none() && self.stored_revision() == *revision {
                    self.put(members.clone());
                }
                ElectionResponse::Done
            }
            ElectionAction::Resign(leader_term) => {
                if self.is_leader(*leader_term) {
                    self.leader = None;
                }
                ElectionResponse::Done
            }
        }
    }

    fn campaign(&mut self, now: u64, candidacy: &Candidacy) -> Option<LeaderTerm> {
        if self.leader.is_some() || self.stored_revision() != candidacy.revision {
            return None;
        }
        let term = self.put(InSyncSet::from([candidacy.member.clone()]));
        let leader = ElectedLeader {
            address: candidacy.member.address.clone(),
            replication: Some(candidacy.replication.clone()),
            term,
        };
        let leader_term = LeaderTerm { term, lease: term };
        self.leader = Some((leader, leader_term));
        self.lease = candidacy.lease.as_micros() as u64;
        self.lease_until = now + self.lease;
        Some(leader_term)
    }

    pub(crate) fn update_in_sync(
        &mut self,
        now: u64,
        leader_term: LeaderTerm,
        revision: i64,
        members: &InSyncSet,
    ) -> InSyncUpdateOutcome {
        self.expire(now);
        if !self.is_leader(leader_term) {
            InSyncUpdateOutcome::Deposed
        } else if self.stored_revision() != revision {
            InSyncUpdateOutcome::Conflict
        } else {
            InSyncUpdateOutcome::Stored(self.put(members.clone()))
        }
    }

    /// For a leader whose last update has an unknown result.
    pub(crate) fn in_sync_revision(&self) -> i64 {
        self.stored_revision()
    }
}
