//! More than one master, of which one leads and the others have its state.
//!
//! A store that all masters reach ([`Coordinator`]: etcd or a Kubernetes Lease) knows who leads, for as long as the leader renews its lease, and who is *in
//! sync*: who has every change that a caller was told of. Four rules make a change of the leader lose nothing:
//!
//! - A leader answers for a change when every master that the store lists as in sync has acknowledged it ([`Quorum`]).
//! - Only masters that are listed may lead ([`Elector`]), and whoever begins to lead is the only one listed.
//! - A follower that does not answer is removed from the list first; then the leader goes on without it. One that comes back gets the
//!   state, is waited for, and is listed again.
//! - A leader stops answering two thirds of its lease after it sent the last renewal that was answered ([`Fence`]), so that it has
//!   stopped when the store lets another begin.
//!
//! With a [`Disk`], acknowledged means written there, and a master that was started anew is the same member. A log is gone on with if the
//! leader has its last record ([`crate::Epochs`]); else the leader's whole state takes its place.
//!
//! [`Elector`], [`Quorum`] and [`Follower`] decide without waiting, so that a simulation runs the same code.

mod coordinator;
mod disk;
mod elector;
mod etcd;
mod fence;
pub mod follower;
pub mod frame;
mod kubernetes;
mod lease;
mod link;
mod member;
mod pod_label;
mod quorum;
mod replica;
mod replicated;
mod run;
mod session;
mod standby_journal;
mod start;
mod tending;
mod tenure;
mod tls;

pub use coordinator::{Bid, CoordinationError, Coordinator, Leader, Listing, Tenure, View};
pub(crate) use disk::MEMBER;
pub use disk::{Disk, DiskError, DiskOptions};
pub use elector::{Answer, Ask, Due, Elector, Times};
pub use etcd::Etcd;
#[doc(hidden)]
pub use etcd::read_view;
pub use fence::{Fence, now};
pub use follower::Follower;
pub use kubernetes::{Kubernetes, LeaseName, config as kubernetes_config};
pub use member::{InSync, MAX_ADDRESS, MAX_MEMBERS, Member, read_in_sync, write_in_sync};
pub use pod_label::Pod;
pub use quorum::Quorum;
pub use replica::Replica;
pub use replicated::Replicated;
pub use run::{HaOptions, Participant, Shown};
pub use start::{HaMaster, HaStartError, start};
pub use tenure::TenureOptions;
pub use tls::{TlsError, TlsFiles};
