//! Client of a Mooncake-compatible KV store: puts objects and gets them back.
//!
//! A [`KvClient`] asks the master where an object is, or where it may be written, and moves the bytes itself between
//! the caller's buffer and the nodes' memory, over the TCP data plane of Mooncake's transfer engine, or over RDMA where
//! a node has it and the feature `rdma` is on. It works with Mooncake's own master and nodes of all known releases, and
//! with ours.
//!
//! - Large objects are cut into slices that are under way at once, over several connections to a node, and when
//!   reading also over all nodes that have a replica.
//! - Of several replicas the near and idle ones are read ([`Locality`]); one that fails is replaced by another.
//! - All replicas of an object are written at once. A put that fails half way is taken back.
//! - A read counts only if the master's lease on the object lasted until its end.
//! - The writer's checksum of an object is kept by the master (since 0.3.13) and compared by the reader. Nodes of
//!   ours check theirs on every transfer, too.
//! - Objects that are read often can be kept here ([`KvClientOptions::cache_bytes`]), never longer than their lease.
//!
//! Nothing runs in the background except the connections to the master: a transfer is driven by whoever awaits it.
//! So a client belongs to one runtime, and one client on each of several single-threaded runtimes is the fastest.

mod batch;
mod cache;
mod checksum;
mod client;
mod disk_staging;
mod error;
mod key_locks;
mod locality;
mod locate;
mod options;
mod peer;
mod rdma;
mod read;
mod remove;
mod slices;
mod write;

pub use client::KvClient;
pub use error::{KvError, NodeError};
pub use locality::{Locality, LocalityError};
pub use locate::{ObjectReplica, ObjectStat};
pub use moongate_master_client::rpc::StoreCredentials;
pub use moongate_transfer::{
    DirectoryError, MetadataSource, TransferError, TransferLimits, TransferProtocol,
};
pub use options::{KvClientOptions, PutOptions, SoftPinChange};
pub use write::PutOutcome;
