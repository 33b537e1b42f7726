//! More than one master, of which one leads and the others have its state.
//!
//! A store that all masters reach ([`HaCoordinator`]: etcd or a Kubernetes Lease) knows who leads, for as long as the leader renews its lease, and who is *in
//! sync*: who has every change that a caller was told of. Four rules make a change of the leader lose nothing:
//!
//! - A leader answers for a change when every master that the store lists as in sync has acknowledged it ([`InSyncTracker`]).
//! - Only masters that are listed may lead ([`LeaderElector`]), and whoever begins to lead is the only one listed.
//! - A follower that does not answer is removed from the list first; then the leader goes on without it. One that comes back gets the
//!   state, is waited for, and is listed again.
//! - A leader stops answering two thirds of its lease after it sent the last renewal that was answered ([`LeaseFence`]), so that it has
//!   stopped when the store lets another begin.
//!
//! With a [`MemberFolder`], acknowledged means written there, and a master that was started anew is the same member. A log is gone on with if the
//! leader has its last record ([`crate::EpochHistory`]); else the leader's whole state takes its place.
//!
//! [`LeaderElector`], [`InSyncTracker`] and [`ReplicationFollower`] decide without waiting, so that a simulation runs the same code.

mod coordinator;
mod elector;
mod etcd;
mod fence;
pub mod follower;
pub mod frame;
mod in_sync;
mod leadership;
mod lease;
mod lease_coordinator;
mod link;
mod member;
mod member_folder;
mod node;
mod pod_label;
mod replicated_journal;
mod replication_server;
mod standby_journal;
mod standby_replica;
mod standby_snapshot;
mod start;
mod tls;

pub use coordinator::{
    Candidacy, CoordinationError, ElectedLeader, ElectionView, HaCoordinator, InSyncUpdateOutcome, LeaderTerm,
};
pub use elector::{ElectionAction, ElectionResponse, ElectionTimings, ElectorOutput, LeaderElector};
pub use etcd::EtcdCoordinator;
#[doc(hidden)]
pub use etcd::read_view;
pub use fence::{LeaseFence, now};
pub use follower::ReplicationFollower;
pub use in_sync::InSyncTracker;
pub use leadership::LeadershipOptions;
pub use lease_coordinator::{LeaseCoordinator, LeaseName, config as kubernetes_config};
pub use member::{HaMember, InSyncSet, MAX_ADDRESS, MAX_MEMBERS, read_in_sync, write_in_sync};
pub(crate) use member_folder::MEMBER;
pub use member_folder::{MemberFolder, MemberFolderError, MemberFolderOptions};
pub use node::{HaNode, HaNodeStatus, HaOptions};
pub use pod_label::PodName;
pub use replicated_journal::ReplicatedJournal;
pub use standby_replica::StandbyReplica;
pub use start::{HaStartError, RunningHaMaster, start};
pub use tls::{HaTlsError, TlsFiles};
