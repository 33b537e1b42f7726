//! High availability: several masters, of which one leads and the others replicate its state.
//!
//! An external coordinator ([`HaCoordinator`]: etcd or a Kubernetes Lease) stores the leader, for as long as it renews its lease, and
//! the *in-sync set*: the members that have every change that was confirmed to a client. Four rules keep a failover from losing changes:
//!
//! - A leader confirms a change once every member of the stored in-sync set has acknowledged it ([`InSyncTracker`]).
//! - Only members of the set may become leader ([`LeaderElector`]); a new leader starts as the only member.
//! - A follower that does not respond is first removed from the set; only then the leader continues without it. When it returns, it
//!   receives the state, its acknowledgements become required, and it is added to the set again.
//! - A leader stops replying two thirds of its lease after it sent the last confirmed renewal ([`LeaseFence`]), so it has stopped
//!   before the coordinator elects another.
//!
//! A leader that dies has stopped replying, too: its [exit watcher](wait_for_exit) releases the lease at once.
//!
//! With a [`MemberFolder`], acknowledged means written to its log, and a restarted master is the same member. A follower resumes its log
//! if the leader's history contains its last record ([`crate::EpochHistory`]); otherwise it receives the leader's full state.
//!
//! [`LeaderElector`], [`InSyncTracker`] and [`ReplicationFollower`] do no I/O, so that the simulation runs the same code.

mod coordinator;
mod elector;
mod etcd;
mod exit_watcher;
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
mod tls;

pub use coordinator::{
    Candidacy, CoordinationError, ElectedLeader, ElectionView, EtcdError, EtcdRequestError, HaCoordinator,
    InSyncUpdateOutcome, KubernetesLeaseError, LeaderTerm,
};
pub use elector::{ElectionAction, ElectionResponse, ElectionTimings, ElectorOutput, LeaderElector};
pub use etcd::EtcdCoordinator;
#[doc(hidden)]
pub use etcd::read_view;
pub use exit_watcher::{LeaseReporter, release_lease, wait_for_exit};
pub use fence::{LeaseFence, now};
pub use follower::ReplicationFollower;
pub use in_sync::InSyncTracker;
pub use leadership::LeadershipOptions;
pub use lease_coordinator::{LeaseCoordinator, LeaseName, config as kubernetes_config};
pub use member::{HaMember, InSyncSet, MAX_ADDRESS, MAX_MEMBERS, read_in_sync, write_in_sync};
pub use member_folder::{MemberFolder, MemberFolderError, MemberFolderOptions, RestoredFolder};
pub use node::{HaNode, HaNodeContext, HaNodeStatus, HaOptions};
pub(crate) use pod_label::PodLabeler;
pub use pod_label::PodName;
pub use replicated_journal::ReplicatedJournal;
pub use standby_replica::StandbyReplica;
pub use tls::{HaTlsError, TlsFiles, TlsIdentityFiles};
