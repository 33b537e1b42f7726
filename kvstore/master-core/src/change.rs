//! State changes: the records that a master emits for every change of its state.
//!
//! State changes are ordered per key and per range of a segment. Each one is self-contained: another master can apply it
//! ([`crate::MasterCore::apply`]), also repeatedly. Leases are not recorded, since they expire within seconds.

use std::borrow::Cow;

use mooncake_wire::admin::JobStatus;
use mooncake_wire::types::{Segment, SegmentStatus, TaskStatus, TaskType, Uuid};

/// Receiver of state changes. It is called while a shard is locked, so it must return quickly and must not call the master.
pub trait StateChangeSink {
    /// Called for every state change.
    fn record(&mut self, change: StateChange<'_>);

    /// Called when a complete replica vacates its range. The object's own change is recorded separately; this is for sinks that
    /// track the contents of segments.
    fn range_vacated(&mut self, location: ReplicaLocation) {
        let _ = location;
    }
}

impl StateChangeSink for () {
    fn record(&mut self, _: StateChange<'_>) {}
}

impl StateChangeSink for Vec<StateChange<'static>> {
    fn record(&mut self, change: StateChange<'_>) {
        self.push(change.into_owned());
    }
}

/// The range of one memory replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaLocation {
    /// Replica id, unique within a master.
    pub replica: u64,
    pub segment: Uuid,
    /// Offset in the segment, in bytes.
    pub offset: u64,
}

/// A copy of an object on a client's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCopyState<'a> {
    /// Replica id, unique within a master.
    pub replica: u64,
    /// Client that owns the disk.
    pub client: Uuid,
    pub size: u64,
    /// Endpoint of the node that serves the copy.
    pub endpoint: Cow<'a, str>,
}

/// The current state of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectState<'a> {
    pub tenant: Cow<'a, str>,
    pub key: Cow<'a, str>,
    pub size: u64,
    /// Client that wrote the object.
    pub client: Uuid,
    /// Memory replicas: all readable ones, or those being written if none is readable.
    pub locations: Cow<'a, [ReplicaLocation]>,
    /// The copy on a node's disk.
    pub disk_copy: Option<DiskCopyState<'a>>,
    /// Checksum that the writer supplied, if any.
    pub checksum: Option<u64>,
    /// Whether the object is excluded from eviction.
    pub hard_pin: bool,
    /// Until when the object is evicted only after others.
    pub soft_pin_until_ms: Option<u64>,
    /// Group whose objects are leased and evicted together.
    pub group: Option<Cow<'a, str>>,
    /// When the put started or, once readable, when it ended.
    pub since_ms: u64,
}

/// Why an object is readable, or which part of it changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreCause {
    Written,
    /// Its set of memory replicas has changed.
    Replicas,
    /// A copy on a node's disk was added.
    Offloaded,
    /// The copy on a node's disk was removed.
    DiskCopyLost,
    /// The memory replicas were evicted or lost; only the disk copy remains.
    MemoryEvicted,
    /// Copied from disk back into memory.
    Promoted,
    /// Repeated as part of a snapshot.
    Snapshot,
}

/// Why an object was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoveCause {
    /// Removed by a client by its key.
    Removed,
    /// Removed by a client with others: by regular expression, or all.
    Cleared,
    /// Evicted to free space for others.
    Evicted,
    /// Revoked by its writer before the put ended.
    Revoked,
    /// Its put did not end in time.
    PutTimedOut,
    /// Replaced by a new put of the key.
    Replaced,
    /// The segment of its last replica was unmounted.
    SegmentLost,
}

/// Why a segment was unmounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmountCause {
    Unmounted,
    /// Its client sent no heartbeat for the expiry time.
    ClientExpired,
    /// Its client mounted different memory instead.
    MemoryLost,
}

/// Storage tiers that an object occupies or occupied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageTiers {
    pub memory: bool,
    pub disk: bool,
}

/// Identifies a copy planned by dynamic replication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DynamicReplicationLease {
    pub id: Uuid,
    /// The master's count of plans.
    pub epoch: u64,
}

/// One change of the master's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateChange<'a> {
    /// A client mounted a segment. Mounting a known segment again assigns it to this client.
    SegmentMounted { segment: Segment<Cow<'a, str>>, client: Uuid, at_ms: u64 },
    /// The status of a segment changed.
    SegmentStatus {
        segment: Uuid,
        status: SegmentStatus,
        /// When it will be unmounted, if a time is set.
        until_ms: Option<u64>,
    },
    /// A segment was unmounted. The changes of its objects follow.
    SegmentUnmounted { segment: Uuid, cause: UnmountCause },
    /// A client stopped sending heartbeats: its replicas are not returned to readers.
    ClientSilent { client: Uuid, at_ms: u64 },
    /// A client sent its first heartbeat, or recovered: its replicas are returned to readers.
    ClientRecovered { client: Uuid, at_ms: u64 },
    /// A client registered a disk for offloading, or recovered.
    DiskMounted { client: Uuid },
    /// A client's disk was unregistered. The changes of its objects follow.
    DiskUnmounted { client: Uuid },
    /// A client was removed from the registry.
    ClientExpired { client: Uuid },
    /// A put has started and its space is allocated. Only needed to rebuild a master.
    ObjectStarted(ObjectState<'a>),
    /// An object is readable or changed.
    ObjectStored {
        /// The object's state after the change.
        object: ObjectState<'a>,
        cause: StoreCause,
    },
    Removed {
        tenant: Cow<'a, str>,
        key: Cow<'a, str>,
        group: Option<Cow<'a, str>>,
        /// Tiers that it occupied before.
        tiers: StorageTiers,
        cause: RemoveCause,
    },
    /// A range belongs to no object, but a client may still write to it. Only needed to rebuild a master.
    RangeQuarantined {
        segment: Uuid,
        offset: u64,
        size: u64,
        /// When it will be free.
        until_ms: u64,
    },
    /// A quarantined range is free, or belongs to the object recorded next.
    RangeReleased { segment: Uuid, offset: u64 },
    /// A tenant's quota was set or removed.
    TenantQuota { tenant: Cow<'a, str>, requested: Option<u64> },
    /// What was learned about return times, as bytes of `moongate-retention`: emitted every few minutes, so that a restarted or
    /// newly elected master need not learn it again.
    ReturnTimes { counts: Cow<'a, [u8]> },
    /// A copy or move is in progress. Its target ranges were recorded before, as quarantined.
    TransferStarted(TransferState<'a>),
    /// A copy or move has ended.
    TransferEnded { tenant: Cow<'a, str>, key: Cow<'a, str> },
    /// The current state of a task.
    Task(TaskState<'a>),
    /// The current state of a drain job.
    DrainJob(DrainJobState<'a>),
    /// A drain job started to move an object.
    DrainMoveStarted {
        job: Uuid,
        /// The task that moves it.
        task: Uuid,
        tenant: Cow<'a, str>,
        key: Cow<'a, str>,
        size: u64,
    },
    /// A drain job's move has ended, successfully or not.
    DrainMoveEnded {
        job: Uuid,
        task: Uuid,
        tenant: Cow<'a, str>,
        key: Cow<'a, str>,
        /// Number of failed attempts; 0 after success.
        attempts: u32,
    },
}

/// A copy or move of an object that a node performs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferState<'a> {
    pub tenant: Cow<'a, str>,
    pub key: Cow<'a, str>,
    /// Client that performs the transfer.
    pub client: Uuid,
    /// Id of the source replica.
    pub source: u64,
    /// Whether the source is removed at the end.
    pub is_move: bool,
    pub since_ms: u64,
    /// Lease of the dynamic replication plan, if the master planned it.
    pub lease: Option<DynamicReplicationLease>,
    /// The replicas being written. Their ranges are quarantined.
    pub locations: Cow<'a, [ReplicaLocation]>,
}

/// A task assigned to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskState<'a> {
    pub id: Uuid,
    pub task_type: TaskType,
    pub status: TaskStatus,
    /// JSON payload sent to the node.
    pub payload: Cow<'a, str>,
    pub client: Uuid,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
    /// The node's message on completion.
    pub message: Cow<'a, str>,
}

/// A drain job, without the objects that it currently moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainJobState<'a> {
    pub id: Uuid,
    /// Names of the segments to drain.
    pub segments: Cow<'a, [String]>,
    /// Names of allowed target segments; empty for any.
    pub targets: Cow<'a, [String]>,
    /// Maximum number of objects moved at a time.
    pub concurrency: u64,
    pub status: JobStatus,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
    pub succeeded: u64,
    /// Number of objects that failed all attempts.
    pub failed: u64,
    /// Number of objects that cannot be moved at present.
    pub blocked: u64,
    /// Total bytes moved so far.
    pub moved_bytes: u64,
    pub message: Cow<'a, str>,
}
