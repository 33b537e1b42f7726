//! The store that all masters reach: one thing after the other, and leases that end by its own clock.

use moongate_master::ha::{Answer, Ask, Bid, InSync, Leader, Listing, Tenure, View};

#[derive(Default)]
pub(crate) struct Store {
    revision: i64,
    leader: Option<(Leader, Tenure)>,
    in_sync: Option<(InSync, i64)>,
    /// When the leader's lease ends, and how long it is.
    lease_until: u64,
    lease: u64,
    /// The most masters that were in sync at a time.
    pub(crate) most_listed: usize,
}

impl Store {
    pub(crate) fn members(&self) -> InSync {
        self.in_sync.as_ref().map(|(members, _)| members.clone()).unwrap_or_default()
    }

    fn put(&mut self, members: InSync) -> i64 {
        self.revision += 1;
        self.most_listed = self.most_listed.max(members.len());
        self.in_sync = Some((members, self.revision));
        self.revision
    }

    fn expire(&mut self, now: u64) {
        if self.leader.is_some() && now >= self.lease_until {
            self.leader = None;
        }
    }

    fn view(&self) -> View {
        let leader = self.leader.as_ref().map(|(leader, _)| leader.clone());
        View { leader, in_sync: self.in_sync.clone() }
    }

    fn revision_of_list(&self) -> i64 {
        self.in_sync.as_ref().map_or(0, |(_, revision)| *revision)
    }

    fn leads(&self, tenure: Tenure) -> bool {
        self.leader.as_ref().is_some_and(|(_, it)| *it == tenure)
    }

    pub(crate) fn answer(&mut self, now: u64, ask: &Ask) -> Answer {
        self.expire(now);
        match ask {
            Ask::Observe => Answer::View(self.view()),
            Ask::Campaign(bid) => Answer::Won(self.campaign(now, bid)),
            Ask::Renew(tenure) => {
                let leads = self.leads(*tenure);
                if leads {
                    self.lease_until = now + self.lease;
                }
                Answer::Renewed(leads)
            }
            Ask::Withdraw(revision, members) => {
                if self.leader.is_none() && self.revision_of_list() == *revision {
                    self.put(members.clone());
                }
                Answer::Done
            }
            Ask::Resign(tenure) => {
                if self.leads(*tenure) {
                    self.leader = None;
                }
                Answer::Done
            }
        }
    }

    fn campaign(&mut self, now: u64, bid: &Bid) -> Option<Tenure> {
        if self.leader.is_some() || self.revision_of_list() != bid.revision {
            return None;
        }
        let term = self.put(InSync::from([bid.member.clone()]));
        let leader =
            Leader { address: bid.member.address.clone(), replication: Some(bid.replication.clone()), term };
        let tenure = Tenure { term, lease: term };
        self.leader = Some((leader, tenure));
        self.lease = bid.lease.as_micros() as u64;
        self.lease_until = now + self.lease;
        Some(tenure)
    }

    pub(crate) fn list(&mut self, now: u64, tenure: Tenure, revision: i64, members: &InSync) -> Listing {
        self.expire(now);
        if !self.leads(tenure) {
            Listing::Deposed
        } else if self.revision_of_list() != revision {
            Listing::Changed
        } else {
            Listing::Stored(self.put(members.clone()))
        }
    }

    /// For a leader that does not know whether its last list was stored.
    pub(crate) fn list_revision(&self) -> i64 {
        self.revision_of_list()
    }
}
