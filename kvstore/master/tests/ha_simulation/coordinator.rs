//! The store that all masters reach: one thing after the other, and leases that end by its own clock.

use moongate_master::ha::{
    Candidacy, ElectedLeader, ElectionAction, ElectionResponse, ElectionView, InSyncSet, InSyncUpdateOutcome,
    LeaderTerm,
};

#[derive(Default)]
pub(crate) struct SimulatedCoordinator {
    revision: i64,
    leader: Option<(ElectedLeader, LeaderTerm)>,
    in_sync: Option<(InSyncSet, i64)>,
    /// When the leader's lease ends, and how long it is.
    lease_until: u64,
    lease: u64,
    /// The most masters that were in sync at a time.
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

    fn revision_of_list(&self) -> i64 {
        self.in_sync.as_ref().map_or(0, |(_, revision)| *revision)
    }

    fn leads(&self, tenure: LeaderTerm) -> bool {
        self.leader.as_ref().is_some_and(|(_, it)| *it == tenure)
    }

    pub(crate) fn execute(&mut self, now: u64, ask: &ElectionAction) -> ElectionResponse {
        self.expire(now);
        match ask {
            ElectionAction::Observe => ElectionResponse::View(self.view()),
            ElectionAction::Campaign(bid) => ElectionResponse::CampaignResult(self.campaign(now, bid)),
            ElectionAction::Renew(tenure) => {
                let leads = self.leads(*tenure);
                if leads {
                    self.lease_until = now + self.lease;
                }
                ElectionResponse::Renewed(leads)
            }
            ElectionAction::Withdraw(revision, members) => {
                if self.leader.is_none() && self.revision_of_list() == *revision {
                    self.put(members.clone());
                }
                ElectionResponse::Done
            }
            ElectionAction::Resign(tenure) => {
                if self.leads(*tenure) {
                    self.leader = None;
                }
                ElectionResponse::Done
            }
        }
    }

    fn campaign(&mut self, now: u64, bid: &Candidacy) -> Option<LeaderTerm> {
        if self.leader.is_some() || self.revision_of_list() != bid.revision {
            return None;
        }
        let term = self.put(InSyncSet::from([bid.member.clone()]));
        let leader = ElectedLeader {
            address: bid.member.address.clone(),
            replication: Some(bid.replication.clone()),
            term,
        };
        let tenure = LeaderTerm { term, lease: term };
        self.leader = Some((leader, tenure));
        self.lease = bid.lease.as_micros() as u64;
        self.lease_until = now + self.lease;
        Some(tenure)
    }

    pub(crate) fn update_in_sync(
        &mut self,
        now: u64,
        tenure: LeaderTerm,
        revision: i64,
        members: &InSyncSet,
    ) -> InSyncUpdateOutcome {
        self.expire(now);
        if !self.leads(tenure) {
            InSyncUpdateOutcome::Deposed
        } else if self.revision_of_list() != revision {
            InSyncUpdateOutcome::Conflict
        } else {
            InSyncUpdateOutcome::Stored(self.put(members.clone()))
        }
    }

    /// For a leader that does not know whether its last list was stored.
    pub(crate) fn in_sync_revision(&self) -> i64 {
        self.revision_of_list()
    }
}
