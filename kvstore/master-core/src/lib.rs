//! The logic of a Mooncake master, without I/O, clock, threads or a random source.
//!
//! [`MasterCore`] is the whole state. Its methods take `&self`, so that many threads may call it concurrently. Each takes the time
//! (`now_ms`, milliseconds of Unix time), and those that change the state take a sink for [`StateChange`]s. The same calls return
//! the same results: the server, a standby, a replay and a simulation run the same code.
//!
//! - Reading: [`MasterCore::exist`], [`MasterCore::batch_exist`], [`MasterCore::replicas`], [`MasterCore::batch_replicas`],
//!   [`MasterCore::replicas_by_regex`] lease the objects they return; [`MasterCore::peek`] and [`MasterCore::probe`] do not.
//! - Writing: [`MasterCore::put_start`], [`MasterCore::put_end`], [`MasterCore::put_revoke`], [`MasterCore::upsert_start`] and their
//!   batches. An upsert ends with `put_end` or `put_revoke`.
//! - Retention: [`MasterCore::describe_prompt`].
//! - Removing: [`MasterCore::remove`], [`MasterCore::batch_remove`], [`MasterCore::remove_by_regex`], [`MasterCore::remove_all`],
//!   [`MasterCore::replica_clear`].
//! - Nodes: [`MasterCore::mount`], [`MasterCore::remount`], [`MasterCore::unmount`], [`MasterCore::graceful_unmount`],
//!   [`MasterCore::ping`], [`MasterCore::client_disconnected`].
//! - Moving: [`MasterCore::create_copy_task`], [`MasterCore::create_move_task`], [`MasterCore::fetch_tasks`],
//!   [`MasterCore::complete_task`], [`MasterCore::copy_start`], [`MasterCore::move_start`] and their ends,
//!   [`MasterCore::create_drain_job`].
//! - Disks: [`MasterCore::mount_disk`], [`MasterCore::unmount_disk`], [`MasterCore::fetch_offloads`], [`MasterCore::offloaded`],
//!   [`MasterCore::evict_disk_copy`], [`MasterCore::fetch_promotions`], [`MasterCore::promotion_start`] and its ends.
//! - Rebuild: [`MasterCore::open_rebuild`], [`MasterCore::announce_inventory`], [`MasterCore::restore_inventory`],
//!   [`MasterCore::finish_inventory`].
//! - Periodic work: [`MasterCore::tick`].
//! - State changes: [`StateChangeSink`] receives every change; [`MasterCore::apply`] replays one in another master;
//!   [`MasterCore::snapshot`] emits the whole state in parts. [`encode`] and [`decode`] convert to and from bytes.
//! - Replay on several threads: [`MasterCore::begin_bulk_replay`], [`MasterCore::replay_lane`], [`MasterCore::end_bulk_replay`].
//! - Queries: [`MasterCore::segments_detail`], [`MasterCore::space_usage`], [`MasterCore::statistics`],
//!   [`MasterCore::prefix_statistics`], [`MasterCore::keys`], [`MasterCore::readable_objects`],
//!   [`MasterCore::quotas`].
//!
//! From bottom to top: the tables (`object`, `key_store`, `writers`, `segment`, `disk`, `group`, `tenant`, `oldest_entries`, `retention`); `object_table`, which owns them, and `locked_shard`,
//! through which its entries are changed (`disk_task`, `replica_transfer`, `upsert`, `removal`, `storage_loss`, `evict`); the state
//! beside the objects (`client_registry`, `task_table`, `drain_job`, `hot_objects`, `inventory`); `master`, which composes them; and one
//! module for each kind of call.
//!
//! Errors are Mooncake's error codes. Features that this master does not support (NVMe over fabrics, shared and distributed file
//! systems) have no methods.

mod allocator;
mod announced_objects;
mod apply;
mod bulk_replay;
mod change;
mod client;
mod client_registry;
mod codec;
mod describe_prompt;
mod disk;
mod disk_task;
mod drain;
mod drain_job;
mod dynamic;
mod evict;
mod eviction_candidates;
mod eviction_decision;
mod filling;
mod group;
mod hot_objects;
mod indices;
mod intact;
mod inventory;
mod key_store;
mod locked_shard;
mod master;
mod mount;
mod mount_disk;
mod object;
mod object_table;
mod offload;
mod oldest_entries;
mod owned;
mod payload;
mod placement;
mod prefix;
mod probe;
mod promote;
mod put;
mod put_end;
mod put_request;
mod query;
mod read;
mod rebuild;
mod recent_writes;
mod removal;
mod remove;
mod replica_transfer;
mod requests;
mod retention;
mod segment;
mod settings;
mod shard;
mod sketch;
mod slab;
mod snapshot;
mod soft_pin;
mod split_mix;
mod statistics;
mod storage_loss;
mod table;
mod task;
mod task_table;
mod tenant;
mod tick;
mod transfer;
mod transfer_replay;
mod upsert;
mod writers;

pub use apply::ApplyError;
pub use bulk_replay::{JobRunner, ReplayLane};
pub use change::{
    DiskCopyState, DrainJobState, DynamicReplicationLease, ObjectState, RemoveCause, ReplicaLocation,
    StateChange, StateChangeSink, StorageTiers, StoreCause, TaskState, TransferState, UnmountCause,
};
pub use client_registry::ClientCounts;
pub use codec::{StateChangeDecodeError, decode, encode};
pub use describe_prompt::DescribedKeys;
pub use disk::DiskUsage;
pub use intact::IntactRanges;
pub use inventory::{InventoryRecord, ObjectVersion, RestoreOutcome};
pub use locked_shard::ObjectCursor;
pub use master::MasterCore;
pub use moongate_retention::{PromptDescription, PromptLength, ReturnHint, TenantBucket, TrialHits};
pub use mount::SegmentRange;
pub use query::{PrefixStatistics, SpaceUsage};
pub use requests::{
    BatchPutStartRequest, CallContext, ClientSegment, CopyRequest, CopyTaskRequest, MoveRequest,
    OffloadReport, PromotionRequest, PromptUse, PutStartRequest, RemoveContext,
};
pub use segment::{ReplicaDescriptors, SharedReplicaDescriptor};
pub use settings::{
    DiskTierOptions, DynamicReplicationMode, MasterCoreOptions, PlacementStrategy, RetentionPolicy,
};
pub use snapshot::SnapshotCursor;
pub use statistics::MasterStatistics;
