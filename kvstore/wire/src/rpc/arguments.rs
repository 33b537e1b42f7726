//! The arguments of RPCs, in the order of the wire.

use crate::pack::arguments;
use crate::types::{
    DEFAULT_TENANT, NofSegment, ObjectMeta, OffloadTask, ReplicaType, ReplicateConfig, Segment,
    StorageObjectMetadata, TaskCompletion, Uuid,
};

/// Declares structs of arguments together with their layout. `tenant` is a member of many of them: the tenant
/// that owns the keys, which releases before 0.3.12 do not know.
macro_rules! argument_structs {
    ($(
        $(#[$meta:meta])*
        $name:ident $(<$s:ident>)? {
            $($(#[$field_meta:meta])* $field:ident: $type:ty $([since $since:ident $(or $default:expr)?])?,)+
        }
    )+) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name $(<$s>)? {
            $($(#[$field_meta])* pub $field: $type,)+
        }

        arguments! { $name $(<$s>)? { $($field $(since $since $(or $default)?)?),+ } }
    )+};
}

argument_structs! {
    /// A key.
    KeyArguments<S> {
        /// The key, or a regular expression for keys.
        key: S,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// Several keys.
    KeysArguments<S> {
        /// The keys.
        keys: Vec<S>,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// Several clients.
    ClientsArguments {
        /// The clients.
        client_ids: Vec<Uuid>,
    }

    /// Replicas of several keys on one segment.
    ReplicaClearArguments<S> {
        /// The keys.
        keys: Vec<S>,
        /// Who asks.
        client_id: Uuid,
        /// The segment's name.
        segment: S,
    }

    /// The start of a put.
    PutStartArguments<S> {
        /// Who writes.
        client_id: Uuid,
        /// The key.
        key: S,
        /// Bytes of the object.
        size: u64,
        /// How to keep it.
        config: ReplicateConfig<S>,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The start of several puts.
    BatchPutStartArguments<S> {
        /// Who writes.
        client_id: Uuid,
        /// The keys.
        keys: Vec<S>,
        /// Bytes of each object.
        sizes: Vec<u64>,
        /// How to keep them.
        config: ReplicateConfig<S>,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The end of a put.
    PutEndArguments<S> {
        /// Who wrote.
        client_id: Uuid,
        /// What.
        object: ObjectMeta<S>,
        /// Which replicas are written.
        replica_type: ReplicaType,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The end of several puts.
    BatchPutEndArguments<S> {
        /// Who wrote.
        client_id: Uuid,
        /// What.
        objects: Vec<ObjectMeta<S>>,
        /// Which replicas are written.
        replica_type: ReplicaType [since V0_3_11 or ReplicaType::ALL],
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// A put that is given up.
    PutRevokeArguments<S> {
        /// Who wrote.
        client_id: Uuid,
        /// The key.
        key: S,
        /// Which replicas are given up.
        replica_type: ReplicaType,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// Several puts that are given up.
    BatchPutRevokeArguments<S> {
        /// Who wrote.
        client_id: Uuid,
        /// The keys.
        keys: Vec<S>,
        /// Which replicas are given up.
        replica_type: ReplicaType [since V0_3_11 or ReplicaType::ALL],
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The end of several upserts.
    BatchUpsertEndArguments<S> {
        /// Who wrote.
        client_id: Uuid,
        /// What.
        objects: Vec<ObjectMeta<S>>,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// Several upserts that are given up.
    BatchUpsertRevokeArguments<S> {
        /// Who wrote.
        client_id: Uuid,
        /// The keys.
        keys: Vec<S>,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// A key to remove.
    RemoveArguments<S> {
        /// The key, or a regular expression for keys.
        key: S,
        /// Whether to remove what is leased too.
        force: bool,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// Several keys to remove.
    BatchRemoveArguments<S> {
        /// The keys.
        keys: Vec<S>,
        /// Whether to remove what is leased too.
        force: bool,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// All keys of a tenant to remove.
    RemoveAllArguments<S> {
        /// Whether to remove what is leased too.
        force: bool,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// A segment to mount.
    MountArguments<S> {
        /// The segment.
        segment: Segment<S>,
        /// Whose.
        client_id: Uuid,
    }

    /// Segments to mount again.
    RemountArguments<S> {
        /// The segments.
        segments: Vec<Segment<S>>,
        /// Whose.
        client_id: Uuid,
    }

    /// An NVMe-oF segment to mount.
    MountNofArguments<S> {
        /// The segment.
        segment: NofSegment<S>,
        /// Whose.
        client_id: Uuid,
    }

    /// NVMe-oF segments to mount again.
    RemountNofArguments<S> {
        /// The segments.
        segments: Vec<NofSegment<S>>,
        /// Whose.
        client_id: Uuid,
    }

    /// A segment to unmount.
    UnmountArguments {
        /// The segment.
        segment_id: Uuid,
        /// Whose.
        client_id: Uuid,
    }

    /// A segment to unmount after a while.
    GracefulUnmountArguments {
        /// The segment.
        segment_id: Uuid,
        /// Whose.
        client_id: Uuid,
        /// For how long it can still be read, in milliseconds.
        grace_period_ms: u64,
    }

    /// A segment's name.
    SegmentNameArguments<S> {
        /// The name.
        name: S,
    }

    /// A segment's id.
    SegmentIdArguments {
        /// The segment.
        segment_id: Uuid,
    }

    /// A client.
    ClientArguments {
        /// The client.
        client_id: Uuid,
    }

    /// A client and whether it offloads objects to its disk.
    OffloadingArguments {
        /// The client.
        client_id: Uuid,
        /// Whether it does.
        enable_offloading: bool,
    }

    /// How much disk a client has.
    SsdCapacityArguments {
        /// The client.
        client_id: Uuid,
        /// Bytes.
        total_bytes: i64,
    }

    /// Objects that a client has put on its disk.
    OffloadedArguments<S> {
        /// The client.
        client_id: Uuid,
        /// The objects.
        tasks: Vec<OffloadTask<S>>,
        /// Where each of them is.
        stored: Vec<StorageObjectMetadata<S>>,
    }

    /// A key that a client works on.
    ClientKeyArguments<S> {
        /// The client.
        client_id: Uuid,
        /// The key.
        key: S,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// An object to be brought from disk into memory.
    PromotionArguments<S> {
        /// The client that has it on disk.
        client_id: Uuid,
        /// The key.
        key: S,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// Bytes of the object.
        size: u64,
        /// Names of segments to try first.
        preferred_segments: Vec<S>,
    }

    /// The start of a copy.
    CopyStartArguments<S> {
        /// Who copies.
        client_id: Uuid,
        /// The key.
        key: S,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// The name of the segment to copy from.
        source: S,
        /// The names of the segments to copy to.
        targets: Vec<S>,
    }

    /// The start of a copy that the master made up because of load.
    DynamicCopyStartArguments<S> {
        /// Who copies.
        client_id: Uuid,
        /// The key.
        key: S,
        /// Whose.
        tenant: S,
        /// The name of the segment to copy from.
        source: S,
        /// The names of the segments to copy to.
        targets: Vec<S>,
        /// Of the master's plan.
        lease_id: Uuid,
        /// Of the master's plan.
        version_epoch: u64,
    }

    /// The end of a copy that the master made up because of load.
    DynamicCopyEndArguments<S> {
        /// Who copied.
        client_id: Uuid,
        /// The key.
        key: S,
        /// Whose.
        tenant: S,
        /// Of the master's plan.
        lease_id: Uuid,
        /// Of the master's plan.
        version_epoch: u64,
    }

    /// The start of a move.
    MoveStartArguments<S> {
        /// Who moves.
        client_id: Uuid,
        /// The key.
        key: S,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// The name of the segment to move from.
        source: S,
        /// The name of the segment to move to.
        target: S,
    }

    /// A replica on disk that is gone.
    EvictDiskArguments<S> {
        /// Who had it.
        client_id: Uuid,
        /// The key.
        key: S,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// What kind of replica.
        replica_type: ReplicaType,
    }

    /// Several replicas on disk that are gone.
    BatchEvictDiskArguments<S> {
        /// Who had them.
        client_id: Uuid,
        /// The keys.
        keys: Vec<S>,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// What kind of replicas.
        replica_type: ReplicaType,
    }

    /// A copy that somebody wants.
    CopyTaskArguments<S> {
        /// The key.
        key: S,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// The names of the segments to copy to.
        targets: Vec<S>,
    }

    /// A move that somebody wants.
    MoveTaskArguments<S> {
        /// The key.
        key: S,
        /// Whose.
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// The name of the segment to move from.
        source: S,
        /// The name of the segment to move to.
        target: S,
    }

    /// A task.
    TaskArguments {
        /// The task.
        task_id: Uuid,
    }

    /// How many tasks a client takes.
    FetchTasksArguments {
        /// The client.
        client_id: Uuid,
        /// How many at most.
        limit: u64,
    }

    /// The end of a task.
    CompleteTaskArguments<S> {
        /// The client.
        client_id: Uuid,
        /// How it ended.
        completion: TaskCompletion<S>,
    }
}

/// No arguments: the request has no body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoArguments;

impl crate::pack::Pack for NoArguments {
    fn literal(_: crate::Dialect, _: &mut Vec<u8>) {}

    fn write(&self, _: &mut crate::pack::PackWriter<'_>) -> Result<(), crate::pack::PackError> {
        Ok(())
    }
}

impl crate::pack::Unpack<'_> for NoArguments {
    fn min_size(_: crate::Dialect) -> usize {
        0
    }

    fn read(_: &mut crate::pack::PackReader<'_>) -> Result<Self, crate::pack::UnpackError> {
        Ok(Self)
    }
}
