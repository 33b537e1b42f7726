//! What a master tells about every change of its state.
//!
//! Facts come in the order in which they became true, per key and per range of space. Each carries all that is needed
//! to make it true in another master ([`crate::MasterCore::apply`]), and may be applied again. Leases are not facts: they
//! end within seconds.

use std::borrow::Cow;

use mooncake_wire::admin::JobStatus;
use mooncake_wire::types::{Segment, SegmentStatus, TaskStatus, TaskType, Uuid};

/// Where facts go. It is called while a part of the table is locked, so it must be quick and must not call the master.
pub trait StateChangeSink {
    /// Something has become true.
    fn record(&mut self, fact: StateChange<'_>);

    /// A range with a complete replica belongs to it no more. What becomes of the object is a fact; this is for who records what lies
    /// in a segment.
    fn range_vacated(&mut self, place: ReplicaLocation) {
        let _ = place;
    }
}

/// Nobody wants to know.
impl StateChangeSink for () {
    fn record(&mut self, _: StateChange<'_>) {}
}

impl StateChangeSink for Vec<StateChange<'static>> {
    fn record(&mut self, fact: StateChange<'_>) {
        self.push(fact.into_owned());
    }
}

/// Where one replica's bytes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaLocation {
    /// The replica, unique within a master.
    pub replica: u64,
    /// The segment.
    pub segment: Uuid,
    /// Where in the segment they begin.
    pub offset: u64,
}

/// A copy of an object on a client's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCopyState<'a> {
    /// The copy, unique among the replicas of a master.
    pub replica: u64,
    /// Whose disk.
    pub client: Uuid,
    /// Bytes.
    pub size: u64,
    /// Where to ask for it.
    pub endpoint: Cow<'a, str>,
}

/// An object as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectState<'a> {
    /// Whose it is.
    pub tenant: Cow<'a, str>,
    /// Its key.
    pub key: Cow<'a, str>,
    /// Bytes.
    pub size: u64,
    /// Who wrote it.
    pub client: Uuid,
    /// Where it is in memory: every replica that can be read, or is being written if none can.
    pub locations: Cow<'a, [ReplicaLocation]>,
    /// Its copy on a disk.
    pub disk_copy: Option<DiskCopyState<'a>>,
    /// The writer's checksum.
    pub checksum: Option<u64>,
    /// Whether it is never evicted.
    pub hard_pin: bool,
    /// Until when others are evicted first.
    pub soft_pin_until_ms: Option<u64>,
    /// The group of objects with which it is leased and evicted.
    pub group: Option<Cow<'a, str>>,
    /// When it began to be written, or could first be read.
    pub since_ms: u64,
}

/// Why an object can be read now, or what changed about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreCause {
    /// It has been written.
    Written,
    /// It has other replicas in memory than before, but is there still.
    Replicas,
    /// It has a copy on a disk.
    Offloaded,
    /// It has none on a disk any more.
    DiskCopyLost,
    /// It is only on a disk: its space in memory was needed, or is gone.
    MemoryEvicted,
    /// It is in memory again.
    Promoted,
    /// It is told again, in a snapshot.
    Snapshot,
}

/// Why an object is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoveCause {
    /// Somebody removed it by its key.
    Removed,
    /// Somebody removed it with others: by an expression, or all.
    Cleared,
    /// Others needed its space.
    Evicted,
    /// Its writer gave it up before it could be read.
    Revoked,
    /// Its writer did not end in time.
    PutTimedOut,
    /// It is being written anew.
    Replaced,
    /// The last segment that held it is gone.
    SegmentLost,
}

/// Why a segment is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmountCause {
    /// Its client took it back.
    Unmounted,
    /// Its client was silent for too long.
    ClientExpired,
    /// Its client mounted other memory in its place.
    MemoryLost,
}

/// Where an object is, or was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageTiers {
    /// In a segment.
    pub memory: bool,
    /// On a client's disk.
    pub disk: bool,
}

/// Something that has become true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateChange<'a> {
    /// A client lends memory. Mounting a known segment again hands it to this client.
    SegmentMounted {
        /// The segment.
        segment: Segment<Cow<'a, str>>,
        /// Whose.
        client: Uuid,
        /// When.
        at_ms: u64,
    },
    /// A segment is treated differently.
    SegmentStatus {
        /// The segment.
        segment: Uuid,
        /// How.
        status: SegmentStatus,
        /// When it will be unmounted, if that is settled.
        until_ms: Option<u64>,
    },
    /// A segment is gone. What became of its objects follows.
    SegmentUnmounted {
        /// The segment.
        segment: Uuid,
        /// Why.
        cause: UnmountCause,
    },
    /// A client does not answer: its replicas are not handed out.
    ClientSilent {
        /// The client.
        client: Uuid,
        /// Since when.
        at_ms: u64,
    },
    /// A client is heard of for the first time, or again: its replicas are handed out.
    ClientRecovered {
        /// The client.
        client: Uuid,
        /// When.
        at_ms: u64,
    },
    /// A client has a disk that objects may be put on, or is heard of again.
    DiskMounted {
        /// The client.
        client: Uuid,
    },
    /// A client's disk is gone. What became of its objects follows.
    DiskUnmounted {
        /// The client.
        client: Uuid,
    },
    /// A client is forgotten.
    ClientExpired {
        /// The client.
        client: Uuid,
    },
    /// An object is being written, so its space is taken. Only for those that rebuild a master.
    ObjectStarted(ObjectState<'a>),
    /// An object can be read.
    ObjectStored {
        /// The object as it is now.
        object: ObjectState<'a>,
        /// What changed.
        cause: StoreCause,
    },
    /// An object is gone.
    Removed {
        /// Whose it was.
        tenant: Cow<'a, str>,
        /// Its key.
        key: Cow<'a, str>,
        /// Its group.
        group: Option<Cow<'a, str>>,
        /// Whether it was in memory, and whether it was on a disk.
        tiers: StorageTiers,
        /// Why.
        cause: RemoveCause,
    },
    /// Space belongs to no object, but somebody may still write to it. Only for those that rebuild a master.
    RangeQuarantined {
        /// The segment.
        segment: Uuid,
        /// Where it begins.
        offset: u64,
        /// Bytes.
        size: u64,
        /// When it will be free.
        until_ms: u64,
    },
    /// Held space is free, or belongs to the object that is told next.
    RangeReleased {
        /// The segment.
        segment: Uuid,
        /// Where it begins.
        offset: u64,
    },
    /// A tenant may use that many bytes, or has no quota any more.
    TenantQuota {
        /// The tenant.
        tenant: Cow<'a, str>,
        /// Bytes.
        requested: Option<u64>,
    },
    /// A copy or a move goes on. Its space was told before, as held.
    TransferStarted(TransferState<'a>),
    /// It does not go on any more.
    TransferEnded {
        /// Whose object that was.
        tenant: Cow<'a, str>,
        /// Its key.
        key: Cow<'a, str>,
    },
    /// A task is this now.
    Task(TaskState<'a>),
    /// A drain job is this now.
    DrainJob(DrainJobState<'a>),
    /// A drain job has begun to move an object.
    DrainMoveStarted {
        /// The job.
        job: Uuid,
        /// The task that moves it.
        task: Uuid,
        /// Whose the object is.
        tenant: Cow<'a, str>,
        /// Its key.
        key: Cow<'a, str>,
        /// Its bytes.
        size: u64,
    },
    /// A drain job's task has ended, however that was.
    DrainMoveEnded {
        /// The job.
        job: Uuid,
        /// The task.
        task: Uuid,
        /// Whose the object is.
        tenant: Cow<'a, str>,
        /// Its key.
        key: Cow<'a, str>,
        /// How often it has failed to be moved. 0: it was moved.
        attempts: u32,
    },
}

/// A copy or a move of an object that a node makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferState<'a> {
    /// Whose the object is.
    pub tenant: Cow<'a, str>,
    /// Its key.
    pub key: Cow<'a, str>,
    /// Who makes it.
    pub client: Uuid,
    /// The replica that is read.
    pub source: u64,
    /// Whether that is gone at the end.
    pub is_move: bool,
    /// When it began.
    pub since_ms: u64,
    /// Of the master's plan, if it is the master's.
    pub lease: Option<(Uuid, u64)>,
    /// The replicas that are being written. Their space is held.
    pub locations: Cow<'a, [ReplicaLocation]>,
}

/// Something that a node is asked to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskState<'a> {
    /// The task.
    pub id: Uuid,
    /// What kind it is.
    pub task_type: TaskType,
    /// How far it is.
    pub status: TaskStatus,
    /// What the node is told.
    pub payload: Cow<'a, str>,
    /// The node.
    pub client: Uuid,
    /// When it was made.
    pub created_at_ms: u64,
    /// When it last changed.
    pub updated_at_ms: u64,
    /// What the node says about its end.
    pub message: Cow<'a, str>,
}

/// A job that empties segments, without the objects that it moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainJobState<'a> {
    /// The job.
    pub id: Uuid,
    /// Names of the segments to empty.
    pub segments: Cow<'a, [String]>,
    /// Names of those that may take the objects; none for any.
    pub targets: Cow<'a, [String]>,
    /// Objects that are moved at a time.
    pub concurrency: u64,
    /// How far it is.
    pub status: JobStatus,
    /// When it was made.
    pub created_at_ms: u64,
    /// When it last changed.
    pub updated_at_ms: u64,
    /// Objects that were moved.
    pub succeeded: u64,
    /// Objects that could not be moved.
    pub failed: u64,
    /// Objects that cannot be moved now.
    pub blocked: u64,
    /// Bytes that were moved.
    pub moved_bytes: u64,
    /// How it is, in words.
    pub message: Cow<'a, str>,
}
