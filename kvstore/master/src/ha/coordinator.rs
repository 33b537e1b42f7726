//! What masters need of a store that they all can reach and that decides one thing after the other.

use std::time::Duration;

use async_trait::async_trait;

use super::member::{HaMember, InSyncSet};

/// Who leads, as the store tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElectedLeader {
    /// Where it serves RPCs.
    pub address: String,
    /// Where it serves those who follow it. Nothing for a master of another kind.
    pub replication: Option<String>,
    /// Grows with every leader.
    pub term: i64,
}

/// What the store knew at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ElectionView {
    /// Who leads.
    pub leader: Option<ElectedLeader>,
    /// Who may lead next, and the revision of that. Nothing before there was any leader.
    pub in_sync: Option<(InSyncSet, i64)>,
}

impl ElectionView {
    /// The revision of the in-sync set, 0 if there is none.
    pub fn revision(&self) -> i64 {
        self.in_sync.as_ref().map_or(0, |(_, revision)| *revision)
    }
}

/// An attempt to lead. It succeeds if nobody leads and the in-sync set has still this revision; the set is then only the
/// one who leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidacy {
    /// Who wants to lead.
    pub member: HaMember,
    /// Where it will serve those who follow it.
    pub replication: String,
    /// The revision of the in-sync set that it has seen, 0 for none.
    pub revision: i64,
    /// How long the store waits for a renewal.
    pub lease: Duration,
}

/// The right to lead for as long as the store is told in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaderTerm {
    /// The leader's term; also the first revision of its in-sync set.
    pub term: i64,
    /// What the store knows the lease by.
    pub lease: i64,
}

/// What became of an attempt to change the in-sync set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InSyncUpdateOutcome {
    /// It is stored, with this revision.
    Stored(i64),
    /// Another attempt was stored before. It has to be seen what there is.
    Conflict,
    /// This leader leads no more.
    Deposed,
}

/// The store does not answer, or answers something that cannot be. What was asked for may have happened or not.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CoordinationError(pub String);

/// The store.
#[async_trait]
pub trait HaCoordinator: Send + Sync + 'static {
    /// What it knows.
    ///
    /// # Errors
    /// [`CoordinationError`], as for all others.
    async fn observe(&self) -> Result<ElectionView, CoordinationError>;

    /// Tries to lead. Nothing if another was faster. The lease begins no earlier than this is called.
    ///
    /// # Errors
    /// As above.
    async fn campaign(&self, bid: &Candidacy) -> Result<Option<LeaderTerm>, CoordinationError>;

    /// Makes the lease begin again, no earlier than this is called. Returns whether there was still one.
    ///
    /// # Errors
    /// As above.
    async fn renew(&self, tenure: LeaderTerm) -> Result<bool, CoordinationError>;

    /// Stores who may lead next, if this leader still leads and the set has still this revision: an attempt that was given up and
    /// arrives late must not undo a later one.
    ///
    /// # Errors
    /// As above.
    async fn update_in_sync(
        &self,
        tenure: LeaderTerm,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<InSyncUpdateOutcome, CoordinationError>;

    /// Stores who may lead next, if nobody leads and the set has still this revision. Returns whether that was so.
    ///
    /// # Errors
    /// As above.
    async fn update_in_sync_without_leader(
        &self,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<bool, CoordinationError>;

    /// Stops leading before the lease ends.
    ///
    /// # Errors
    /// As above.
    async fn resign(&self, tenure: LeaderTerm) -> Result<(), CoordinationError>;
}
