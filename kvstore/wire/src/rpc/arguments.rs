//! Arguments of RPCs, with the fields in wire order.

use crate::pack::arguments;
use crate::types::{
    DEFAULT_TENANT, GrantLeasePolicy, NofSegment, ObjectMeta, OffloadTask, ReplicaType, ReplicateConfig,
    Segment, StorageObjectMetadata, TaskCompletion, Uuid,
};

/// Declares argument structs together with their layouts. Many have the field `tenant`: the tenant that owns the keys, which
/// releases before 0.3.12 do not send.
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
    /// A key of a tenant.
    KeyArguments<S> {
        /// The key, or a regular expression for keys.
        key: S,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// Several keys of a tenant.
    KeysArguments<S> {
        keys: Vec<S>,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// Several keys of a tenant to look up.
    BatchProbeArguments<S> {
        /// Which of the keys to lease.
        policy: GrantLeasePolicy,
        keys: Vec<S>,
        tenant: S,
    }

    ClientsArguments {
        client_ids: Vec<Uuid>,
    }

    /// Replicas of several keys on one segment.
    ReplicaClearArguments<S> {
        keys: Vec<S>,
        client_id: Uuid,
        segment: S,
        /// The tenant that owns the keys. Unlike in other RPCs, since 0.3.14.
        tenant: S [since V0_3_14 or S::from(DEFAULT_TENANT)],
    }

    /// The start of a put.
    PutStartArguments<S> {
        client_id: Uuid,
        key: S,
        /// Size of the object in bytes.
        size: u64,
        /// Replication settings of the object.
        config: ReplicateConfig<S>,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The start of several puts.
    BatchPutStartArguments<S> {
        client_id: Uuid,
        keys: Vec<S>,
        /// Sizes of the objects in bytes.
        sizes: Vec<u64>,
        /// Replication settings of the objects.
        config: ReplicateConfig<S>,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The end of a put.
    PutEndArguments<S> {
        client_id: Uuid,
        object: ObjectMeta<S>,
        /// Type of the written replicas.
        replica_type: ReplicaType,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The end of several puts.
    BatchPutEndArguments<S> {
        client_id: Uuid,
        objects: Vec<ObjectMeta<S>>,
        /// Type of the written replicas.
        replica_type: ReplicaType [since V0_3_11 or ReplicaType::ALL],
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The revocation of a put.
    PutRevokeArguments<S> {
        client_id: Uuid,
        key: S,
        /// Type of the revoked replicas.
        replica_type: ReplicaType,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The revocation of several puts.
    BatchPutRevokeArguments<S> {
        client_id: Uuid,
        keys: Vec<S>,
        /// Type of the revoked replicas.
        replica_type: ReplicaType [since V0_3_11 or ReplicaType::ALL],
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The end of several upserts.
    BatchUpsertEndArguments<S> {
        client_id: Uuid,
        objects: Vec<ObjectMeta<S>>,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// The revocation of several upserts.
    BatchUpsertRevokeArguments<S> {
        client_id: Uuid,
        keys: Vec<S>,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    RemoveArguments<S> {
        /// The key, or a regular expression for keys.
        key: S,
        /// Whether to remove leased objects too.
        force: bool,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    BatchRemoveArguments<S> {
        keys: Vec<S>,
        /// Whether to remove leased objects too.
        force: bool,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// All keys of a tenant to remove.
    RemoveAllArguments<S> {
        /// Whether to remove leased objects too.
        force: bool,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    MountArguments<S> {
        segment: Segment<S>,
        client_id: Uuid,
    }

    RemountArguments<S> {
        segments: Vec<Segment<S>>,
        client_id: Uuid,
    }

    /// An NVMe-oF segment to mount.
    MountNofArguments<S> {
        segment: NofSegment<S>,
        client_id: Uuid,
    }

    /// NVMe-oF segments to mount again.
    RemountNofArguments<S> {
        segments: Vec<NofSegment<S>>,
        client_id: Uuid,
    }

    UnmountArguments {
        segment_id: Uuid,
        client_id: Uuid,
    }

    /// A segment to unmount after a grace period.
    GracefulUnmountArguments {
        segment_id: Uuid,
        client_id: Uuid,
        /// How long the segment stays readable, in milliseconds.
        grace_period_ms: u64,
    }

    SegmentNameArguments<S> {
        name: S,
    }

    SegmentIdArguments {
        segment_id: Uuid,
    }

    ClientArguments {
        client_id: Uuid,
    }

    /// A client, and whether it offloads objects to its disk.
    OffloadingArguments {
        client_id: Uuid,
        /// Whether the client accepts objects to offload.
        enable_offloading: bool,
    }

    /// The disk capacity of a client.
    SsdCapacityArguments {
        client_id: Uuid,
        /// Capacity of the disk in bytes.
        total_bytes: i64,
    }

    /// Objects that a client has stored on its disk.
    OffloadedArguments<S> {
        client_id: Uuid,
        tasks: Vec<OffloadTask<S>>,
        /// Location of each object on the disk.
        stored: Vec<StorageObjectMetadata<S>>,
    }

    /// A key that a client operates on.
    ClientKeyArguments<S> {
        client_id: Uuid,
        key: S,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
    }

    /// An object to promote from disk to memory.
    PromotionArguments<S> {
        /// The client with the disk copy.
        client_id: Uuid,
        key: S,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// Size of the object in bytes.
        size: u64,
        /// Names of segments that are tried first.
        preferred_segments: Vec<S>,
    }

    /// The start of a copy.
    CopyStartArguments<S> {
        client_id: Uuid,
        key: S,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// Name of the source segment.
        source: S,
        /// Names of the target segments.
        targets: Vec<S>,
    }

    /// The start of a copy planned by dynamic replication.
    DynamicCopyStartArguments<S> {
        client_id: Uuid,
        key: S,
        tenant: S,
        /// Name of the source segment.
        source: S,
        /// Names of the target segments.
        targets: Vec<S>,
        /// Lease of the master's plan.
        lease_id: Uuid,
        /// Epoch of the master's plan.
        version_epoch: u64,
    }

    /// The end of a copy planned by dynamic replication.
    DynamicCopyEndArguments<S> {
        client_id: Uuid,
        key: S,
        tenant: S,
        /// Lease of the master's plan.
        lease_id: Uuid,
        /// Epoch of the master's plan.
        version_epoch: u64,
    }

    /// The start of a move.
    MoveStartArguments<S> {
        client_id: Uuid,
        key: S,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// Name of the source segment.
        source: S,
        /// Name of the target segment.
        target: S,
    }

    /// A disk replica that was removed.
    EvictDiskArguments<S> {
        client_id: Uuid,
        key: S,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// Type of the removed replica.
        replica_type: ReplicaType,
    }

    /// A disk replica that was removed.
    EvictDiskIfCurrentArguments<S> {
        client_id: Uuid,
        key: S,
        tenant: S,
        /// Type of the removed replica.
        replica_type: ReplicaType,
        /// Id of the removed replica.
        replica_id: u64,
    }

    /// Several disk replicas that were removed.
    BatchEvictDiskArguments<S> {
        client_id: Uuid,
        keys: Vec<S>,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// Type of the removed replicas.
        replica_type: ReplicaType,
    }

    /// A request for a copy task.
    CopyTaskArguments<S> {
        key: S,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// Names of the target segments.
        targets: Vec<S>,
    }

    /// A request for a move task.
    MoveTaskArguments<S> {
        key: S,
        tenant: S [since V0_3_12 or S::from(DEFAULT_TENANT)],
        /// Name of the source segment.
        source: S,
        /// Name of the target segment.
        target: S,
    }

    /// The id of a task.
    TaskArguments {
        task_id: Uuid,
    }

    /// A client's request for tasks.
    FetchTasksArguments {
        client_id: Uuid,
        /// Maximum number of tasks to return.
        limit: u64,
    }

    /// A client's report of a task's end.
    CompleteTaskArguments<S> {
        client_id: Uuid,
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
