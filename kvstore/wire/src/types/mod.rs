//! Types in RPC arguments and replies, one type per concept, with the fields of the newest release.
//!
//! The string type `S` is chosen by the caller: `&str` borrows from the message, `String` and `Arc<str>` own.

mod object;
mod offload;
mod probe;
mod replica;
mod segment;
mod task;
mod uuid;

pub use object::{DataType, ObjectMeta, ReplicateConfig, SoftPin, SoftPinAction};
pub use offload::{OffloadTask, OffloadTasks, StorageConfig, StorageObjectMetadata};
pub use probe::{GrantLeasePolicy, ProbePolicy};
pub use replica::{
    BufferDescriptor, DfsReplica, DiskReplica, LocalDiskReplica, ReplicaDescriptor, ReplicaList,
    ReplicaMedium, ReplicaStatus, ReplicaType,
};
pub use segment::{
    ClientStatus, NofSegment, NofSegmentOwner, PingReply, Segment, SegmentLocality, SegmentStatus,
};
pub use task::{
    CopyPlan, MovePlan, PromotionAllocation, TaskAssignment, TaskCompletion, TaskReport, TaskStatus, TaskType,
};
pub use uuid::{ParseUuidError, Uuid};

/// The tenant of callers that do not specify one.
pub const DEFAULT_TENANT: &str = "default";
