//! The state of a master.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed};

use arc_swap::ArcSwap;
use foldhash::fast::FixedState;
use mooncake_wire::ErrorCode;
use parking_lot::Mutex;

use crate::client::ClientRegistry;
use crate::disk::{ClientDisks, DiskTaskTotals};
use crate::group::{GroupId, GroupTable};
use crate::locked_shard::KeyLocation;
use crate::prefix::PrefixTable;
use crate::rebuild::{RebuildWindow, RestoreCounters};
use crate::recent_writes::RecentWrites;
use crate::segment::SegmentTable;
use crate::settings::MasterCoreOptions;
use crate::shard::ObjectShard;
use crate::sketch::CountMinSketch;
use crate::split_mix::mix;
use crate::statistics::MasterCounters;
use crate::task::TaskTable;
use crate::tenant::TenantTable;
use crate::transfer_replay::PendingTransfers;

/// The state and logic of a master. See the crate's documentation for its use.
#[derive(Debug)]
pub struct MasterCore {
    pub(crate) settings: MasterCoreOptions,
    hasher: FixedState,
    pub(crate) shards: Box<[Mutex<ObjectShard>]>,
    /// Per shard, the stamp of the first unread entry.
    pub(crate) oldest_unread: Box<[AtomicU64]>,
    /// Per shard, the stamp of the first entry that was read.
    pub(crate) oldest_leased: Box<[AtomicU64]>,
    /// Per shard, the stamp of the first soft-pinned entry.
    pub(crate) oldest_soft: Box<[AtomicU64]>,
    pub(crate) groups: GroupTable,
    pub(crate) segments: ArcSwap<SegmentTable>,
    pub(crate) registry: Mutex<ClientRegistry>,
    pub(crate) tenants: TenantTable,
    pub(crate) prefixes: PrefixTable,
    pub(crate) tasks: Mutex<TaskTable>,
    pub(crate) disks: ArcSwap<ClientDisks>,
    pub(crate) disk_task_totals: DiskTaskTotals,
    pub(crate) sketch: CountMinSketch,
    /// Copies and moves found during replay.
    pub(crate) pending_transfers: Mutex<PendingTransfers>,
    pub(crate) counters: MasterCounters,
    /// Locked after the registry, before shards.
    pub(crate) rebuild: Mutex<RebuildWindow>,
    pub(crate) restores: RestoreCounters,
    pub(crate) recent_writes: RecentWrites,
    next_id: AtomicU64,
    /// The shard whose soft pins are checked next.
    pub(crate) next_unpin: AtomicUsize,
    pub(crate) view_version: AtomicI64,
}

impl MasterCore {
    pub fn new(settings: MasterCoreOptions) -> Self {
        let shards = settings.shards.clamp(1, 1 << 16);
        let stamps = || (0..shards).map(|_| AtomicU64::new(u64::MAX)).collect();
        Self {
            hasher: FixedState::with_seed(settings.seed),
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            oldest_unread: stamps(),
            oldest_leased: stamps(),
            oldest_soft: stamps(),
            groups: GroupTable::new(),
            segments: ArcSwap::default(),
            registry: Mutex::default(),
            tenants: TenantTable::new(settings.multi_tenant),
            prefixes: PrefixTable::new(),
            tasks: Mutex::new(TaskTable::new(settings.seed)),
            disks: ArcSwap::default(),
            disk_task_totals: DiskTaskTotals::default(),
            sketch: CountMinSketch::new(settings.disks.is_some_and(|tier| tier.promote_on_hit)),
            pending_transfers: Mutex::default(),
            counters: MasterCounters::default(),
            rebuild: Mutex::default(),
            restores: RestoreCounters::default(),
            recent_writes: RecentWrites::default(),
            next_id: AtomicU64::new(1),
            next_unpin: AtomicUsize::new(0),
            view_version: AtomicI64::new(0),
            settings,
        }
    }

    /// The settings passed to [`Self::new`].
    pub fn settings(&self) -> &MasterCoreOptions {
        &self.settings
    }

    /// Sets the view version by which clients detect a change of the leader.
    pub fn set_view_version(&self, version: i64) {
        self.view_version.store(version, Relaxed);
    }

    pub(crate) fn hash(&self, tenant: u16, key: &str) -> u64 {
        self.hasher.hash_one(key) ^ u64::from(tenant).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    pub(crate) fn locate_key(&self, tenant: u16, key: &str) -> KeyLocation {
        let hash = self.hash(tenant, key);
        let shard = ((hash >> 32) * self.shards.len() as u64) >> 32;
        KeyLocation { shard: shard as usize, tag: hash as u32, tenant }
    }

    /// Location of a reader's key.
    pub(crate) fn locate_reader_key(&self, tenant: &str, key: &str) -> Result<KeyLocation, ErrorCode> {
        let tenant = self.tenants.index_of(tenant).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        Ok(self.locate_key(tenant, key))
    }

    pub(crate) fn group(&self, tenant: &str, name: &str) -> GroupId {
        let tenant = if self.tenants.enabled() { tenant } else { "" };
        // FNV-1a: independent of the seed and of library versions, so that a replay yields the same ids.
        let bytes = tenant.bytes().chain([0xff]).chain(name.bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        GroupId(mix(hash))
    }

    pub(crate) fn new_replica_id(&self) -> u64 {
        self.next_id.fetch_add(1, Relaxed)
    }

    /// Ensures that new ids are greater than `id`.
    pub(crate) fn reserve_replica_id(&self, id: u64) {
        self.next_id.fetch_max(id.saturating_add(1), Relaxed);
    }

    /// Updates what depends on the pool's capacity, after segments were mounted or unmounted.
    pub(crate) fn capacity_changed(&self) {
        let capacity = self.capacity();
        self.tenants.scale(capacity);
        // If everything is leased, free space is at most the share above the watermark plus one round of eviction.
        let share = 1.0 - self.settings.high_watermark + self.settings.eviction_ratio;
        self.recent_writes.resize(capacity, share);
    }

    /// Total capacity of all segments in bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.segments.load().usage().1
    }
}
