//! Parameters of calls.

use mooncake_wire::types::{OffloadTask, ReplicateConfig, StorageObjectMetadata, Uuid};

use moongate_retention::PromptDescription;

use crate::change::DynamicReplicationLease;

/// The time of a call, the client that makes it, and the client's tenant.
#[derive(Clone, Copy, Debug)]
pub struct CallContext<'a> {
    pub now_ms: u64,
    pub client: Uuid,
    pub tenant: &'a str,
}

/// The use of a prompt by a request that has ended.
#[derive(Clone, Copy, Debug)]
pub struct PromptUse {
    pub now_ms: u64,
    /// When the request arrived: reads and writes since then belong to it.
    pub arrived_ms: u64,
    pub description: PromptDescription,
}

/// How a tenant's objects are removed.
#[derive(Clone, Copy, Debug)]
pub struct RemoveContext<'a> {
    pub now_ms: u64,
    pub tenant: &'a str,
    /// Whether leased objects are removed, too.
    pub force: bool,
}

/// A segment, and the client that claims to own it.
#[derive(Clone, Copy, Debug)]
pub struct ClientSegment {
    pub segment: Uuid,
    pub client: Uuid,
}

/// The object that a put or an upsert writes.
#[derive(Debug)]
pub struct PutStartRequest<'a, S> {
    pub key: &'a str,
    pub size: u64,
    pub config: &'a ReplicateConfig<S>,
}

/// The objects that a batch of puts or upserts writes.
#[derive(Debug)]
pub struct BatchPutStartRequest<'a, K, S> {
    pub keys: &'a [K],
    /// In the order of the keys.
    pub sizes: &'a [u64],
    pub config: &'a ReplicateConfig<S>,
}

/// A copy of an object from one segment to others. Segments are named.
#[derive(Debug)]
pub struct CopyRequest<'a, S> {
    pub key: &'a str,
    pub source: &'a str,
    pub targets: &'a [S],
    /// Set for a copy that dynamic replication planned.
    pub lease: Option<DynamicReplicationLease>,
}

/// A copy of an object from any segment to others. Segments are named.
#[derive(Debug)]
pub struct CopyTaskRequest<'a, S> {
    pub key: &'a str,
    pub targets: &'a [S],
}

/// A move of an object from one segment to another. Segments are named.
#[derive(Clone, Copy, Debug)]
pub struct MoveRequest<'a> {
    pub key: &'a str,
    pub source: &'a str,
    pub target: &'a str,
}

/// The object that a client copies from its disk to memory.
#[derive(Debug)]
pub struct PromotionRequest<'a, S> {
    pub key: &'a str,
    pub size: u64,
    /// Names of segments that are tried first.
    pub preferred: &'a [S],
}

/// The results of offload tasks.
#[derive(Debug)]
pub struct OffloadReport<'a, S> {
    pub tasks: &'a [OffloadTask<S>],
    /// In the order of the tasks; a negative `data_size` means failure.
    pub stored: &'a [StorageObjectMetadata<S>],
}
