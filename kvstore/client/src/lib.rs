//! Client of a Mooncake-compatible KV store.
//!
//! A [`KvClient`] locates or allocates an object at the master, and transfers the bytes directly between the caller's
//! buffer and the nodes' memory, over the TCP data plane of Mooncake's transfer engine, or over RDMA if the node has it
//! and the feature `rdma` is on. It works with Mooncake's own master and nodes of all known releases, and with
//! Moongate's.
//!
//! - An object may be in several ranges of the caller's memory, which are not copied together.
//! - Large objects are split into slices that are transferred concurrently, over several connections to a node. Reads
//!   also spread over all nodes that have a replica.
//! - Reads prefer near and idle replicas ([`Locality`]), and fall back to another replica on failure.
//! - All replicas of an object are written concurrently. A put that fails partway is revoked.
//! - A read succeeds only if the master's lease on the object lasted until its end.
//! - The master stores the writer's checksum of an object (since 0.3.13), and readers verify it. Moongate's nodes also
//!   verify a checksum on every transfer.
//! - Frequently read objects can be cached in the client ([`KvClientOptions::cache_bytes`]), never longer than their lease.
//!
//! Only the connections to the master run in background tasks; a transfer makes progress when its future is polled.
//! So a client belongs to one runtime. One client on each of several single-threaded runtimes is the fastest setup.

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
mod shared_memory;
mod slice_transfer;
mod slices;
mod write;

pub use batch::ObjectRanges;
pub use client::KvClient;
pub use error::{KvError, NodeError, NodeLookupError};
pub use locality::{Locality, LocalityError};
pub use locate::{ObjectReplica, ObjectStat};
pub use moongate_master_client::rpc::StoreCredentials;
pub use moongate_transfer::{
    DirectoryError, MetadataSource, TransferError, TransferLimits, TransferProtocol,
};
pub use options::{KvClientOptions, PutOptions, SoftPinChange};
pub use write::PutOutcome;
