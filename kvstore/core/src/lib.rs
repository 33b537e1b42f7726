//! All that a Mooncake master decides, without I/O, clock, threads or a random source of its own.
//!
//! [`Master`] is the whole state. Its methods take `&self`, so that many threads may serve from it at once; each
//! takes the time (`now_ms`, milliseconds of Unix time), and those that change something a sink for [`Fact`]s. The same
//! calls give the same answers: the real server, a standby, a replay and a simulation run the same code.
//!
//! - Reading: [`Master::exist`], [`Master::batch_exist`], [`Master::replicas`], [`Master::batch_replicas`],
//!   [`Master::replicas_by_regex`] lease what they find; [`Master::peek`] does not.
//! - Writing: [`Master::put_start`], [`Master::put_end`], [`Master::put_revoke`], [`Master::upsert_start`] and their
//!   batches. An upsert ends with `put_end` and is given up with `put_revoke`.
//! - Removing: [`Master::remove`], [`Master::batch_remove`], [`Master::remove_by_regex`], [`Master::remove_all`],
//!   [`Master::replica_clear`].
//! - Nodes: [`Master::mount`], [`Master::remount`], [`Master::unmount`], [`Master::graceful_unmount`],
//!   [`Master::ping`], [`Master::client_lost`].
//! - Moving: [`Master::create_copy_task`], [`Master::create_move_task`], [`Master::fetch_tasks`],
//!   [`Master::complete_task`], [`Master::copy_start`], [`Master::move_start`] and their ends,
//!   [`Master::create_drain_job`].
//! - Disks: [`Master::mount_disk`], [`Master::unmount_disk`], [`Master::fetch_offloads`], [`Master::offloaded`],
//!   [`Master::evict_disk_copy`], [`Master::fetch_promotions`], [`Master::promotion_start`] and its ends.
//! - Rebuild: [`Master::open_rebuild`], [`Master::announce_inventory`], [`Master::restore_inventory`],
//!   [`Master::finish_inventory`].
//! - Time: [`Master::tick`].
//! - Facts: [`Effects`] gets every change; [`Master::apply`] makes one true in another master;
//!   [`Master::snapshot`] tells the whole state as facts, in pieces. [`encode`] and [`decode`] turn them into bytes and
//!   back.
//! - Figures: [`Master::segments_detail`], [`Master::fill`], [`Master::counts`], [`Master::prefix_statistics`],
//!   [`Master::keys`], [`Master::quotas`].
//!
//! Errors are Mooncake's own codes. What this master does not do (NVMe over fabrics, shared and distributed file
//! systems) has no method here.

mod allocator;
mod apply;
mod client;
mod codec;
mod count;
mod disk;
mod drain;
mod dynamic;
mod evict;
mod fact;
mod group;
mod locked;
mod master;
mod mount;
mod mount_disk;
mod object;
mod offload;
mod owned;
mod payload;
mod placement;
mod prefix;
mod promote;
mod put;
mod put_end;
mod query;
mod read;
mod rebuild;
mod recent_writes;
mod remove;
mod segment;
mod settings;
mod shard;
mod sketch;
mod slab;
mod snapshot;
mod table;
mod task;
mod tenant;
mod tick;
mod transfer;
mod underway;
mod upsert;
mod whole;

pub use apply::NotApplied;
pub use codec::{DecodeError, decode, encode};
pub use count::Counts;
pub use disk::DiskFill;
pub use fact::{
    DrainState, Effects, Fact, Media, ObjectState, OnDisk, Place, RemoveCause, StoreCause, TaskState,
    TransferState, UnmountCause,
};
pub use master::Master;
pub use query::{Cursor, Fill, PrefixStatistics};
pub use read::{Replicas, WireReplica};
pub use rebuild::{InventoryRecord, ObjectVersion, RestoreOutcome};
pub use settings::{DiskTier, DynamicReplication, Placement, Settings};
pub use snapshot::SnapshotCursor;
pub use transfer::{DynamicPlan, Work};
pub use whole::Whole;
