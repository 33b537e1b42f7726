//! The objects of a master, and the segments, disks, groups and tenants that they refer to.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;
use foldhash::fast::FixedState;
use mooncake_wire::ErrorCode;
use mooncake_wire::types::{DEFAULT_TENANT, SegmentStatus, Uuid};
use parking_lot::Mutex;

use crate::announced_objects::AnnouncedObjects;
use crate::change::StateChangeSink;
use crate::disk::{ClientDisk, ClientDisks, DiskTaskTotals};
use crate::filling::FallbackShare;
use crate::group::{GroupId, GroupTable};
use crate::indices::{ShardIndex, TenantIndex};
use crate::oldest_entries::OldestEntries;
use crate::prefix::PrefixTable;
use crate::recent_writes::RecentWrites;
use crate::retention::ObjectRetention;
use crate::segment::SegmentTable;
use crate::settings::{MasterCoreOptions, RetentionPolicy};
use crate::shard::ObjectShard;
use crate::split_mix::mix;
use crate::statistics::MasterCounters;
use crate::tenant::TenantTable;

/// Shard and hash tag of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyLocation {
    pub(crate) shard: ShardIndex,
    pub(crate) tag: u32,
    pub(crate) tenant: TenantIndex,
}

impl KeyLocation {
    /// A hash of the key; its upper half is uniformly distributed.
    pub(crate) fn hash(self) -> u64 {
        u64::from(self.tag) << 32 | self.shard.get() as u64
    }
}

/// All objects in separately locked shards, with the tables that entries refer to by index.
#[derive(Debug)]
pub(crate) struct ObjectTable {
    pub(crate) settings: MasterCoreOptions,
    hasher: FixedState,
    pub(crate) shards: Box<[Mutex<ObjectShard>]>,
    pub(crate) oldest_entries: OldestEntries,
    pub(crate) retention: ObjectRetention,
    pub(crate) announced: AnnouncedObjects,
    pub(crate) groups: GroupTable,
    pub(crate) segments: ArcSwap<SegmentTable>,
    pub(crate) fallback_share: FallbackShare,
    pub(crate) tenants: TenantTable,
    pub(crate) prefixes: PrefixTable,
    pub(crate) disks: ArcSwap<ClientDisks>,
    pub(crate) disk_task_totals: DiskTaskTotals,
    pub(crate) counters: MasterCounters,
    pub(crate) recent_writes: RecentWrites,
    next_id: AtomicU64,
    /// Whether the ranges of replayed objects are not allocated yet.
    pub(crate) bulk_replay: AtomicBool,
}

impl ObjectTable {
    pub(crate) fn new(settings: MasterCoreOptions) -> Self {
        let shards = settings.shards.clamp(1, 1 << 16);
        Self {
            hasher: FixedState::with_seed(settings.seed),
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            oldest_entries: OldestEntries::new(shards),
            retention: ObjectRetention::new(settings.retention == RetentionPolicy::Learned),
            announced: AnnouncedObjects::default(),
            groups: GroupTable::new(),
            segments: ArcSwap::default(),
            fallback_share: FallbackShare::default(),
            tenants: TenantTable::new(settings.multi_tenant),
            prefixes: PrefixTable::new(),
            disks: ArcSwap::default(),
            disk_task_totals: DiskTaskTotals::default(),
            counters: MasterCounters::default(),
            recent_writes: RecentWrites::default(),
            next_id: AtomicU64::new(1),
            bulk_replay: AtomicBool::new(false),
            settings,
        }
    }

    pub(crate) fn hash(&self, tenant: TenantIndex, key: &str) -> u64 {
        self.hasher.hash_one(key) ^ (tenant.get() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    pub(crate) fn locate_key(&self, tenant: TenantIndex, key: &str) -> KeyLocation {
        let hash = self.hash(tenant, key);
        let shard = ((hash >> 32) * self.shards.len() as u64) >> 32;
        KeyLocation { shard: ShardIndex::new(shard as usize), tag: hash as u32, tenant }
    }

    /// Location of a reader's key.
    pub(crate) fn locate_reader_key(&self, tenant: &str, key: &str) -> Result<KeyLocation, ErrorCode> {
        let tenant = self.tenants.index_of(tenant).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        Ok(self.locate_key(tenant, key))
    }

    pub(crate) fn shard_indices(&self) -> impl Iterator<Item = ShardIndex> + use<> {
        (0..self.shards.len()).map(ShardIndex::new)
    }

    pub(crate) fn shard_after(&self, shard: ShardIndex) -> Option<ShardIndex> {
        Some(shard.get() + 1).filter(|next| *next < self.shards.len()).map(ShardIndex::new)
    }

    pub(crate) fn group(&self, tenant: &str, name: &str) -> GroupId {
        GroupId::new(if self.tenants.enabled() { tenant } else { "" }, name)
    }

    /// The shard that keeps a replayed quarantined range.
    pub(crate) fn quarantine_shard(&self, segment: Uuid, offset: u64) -> ShardIndex {
        let hash = mix(segment.first ^ mix(segment.second ^ mix(offset)));
        ShardIndex::new((hash % self.shards.len() as u64) as usize)
    }

    pub(crate) fn new_replica_id(&self) -> u64 {
        self.next_id.fetch_add(1, Relaxed)
    }

    /// Ensures that new ids are greater than `id`.
    pub(crate) fn reserve_replica_id(&self, id: u64) {
        // Mostly it is lower, and the threads of a replay share the counter.
        if self.next_id.load(Relaxed) <= id {
            self.next_id.fetch_max(id.saturating_add(1), Relaxed);
        }
    }

    /// Updates what depends on the pool's capacity, after segments were mounted or unmounted.
    pub(crate) fn capacity_changed(&self) {
        let capacity = self.capacity();
        self.tenants.scale(capacity);
        // If everything is leased, free space is at most the share above the watermark plus one round of eviction.
        let share = 1.0 - self.settings.high_watermark + self.settings.eviction_ratio;
        self.recent_writes.resize(capacity, share);
        self.refresh_filling_segments();
    }

    /// Determines which segments are filling, unless new segments get their full share of writes at once.
    pub(crate) fn refresh_filling_segments(&self) {
        if self.settings.ramp_ms > 0 {
            self.fallback_share.refresh(&self.segments.load());
        }
    }

    /// Total capacity of all segments in bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.segments.load().usage().capacity
    }

    /// Number of objects, including those being written.
    pub(crate) fn key_count(&self) -> u64 {
        self.shards.iter().map(|shard| shard.lock().entries.len() as u64).sum()
    }

    /// Sets the status of all segments with these names and emits it.
    pub(crate) fn set_segment_statuses(
        &self,
        names: &[String],
        status: SegmentStatus,
        fx: &mut dyn StateChangeSink,
    ) {
        let segments = self.segments.load();
        for index in names.iter().flat_map(|name| segments.indices_by_name(name)) {
            if let Some(mounted) = segments.get(*index) {
                mounted.change_status(status, None, fx);
            }
        }
    }

    pub(crate) fn tenant_name(&self, tenant: TenantIndex) -> String {
        self.tenants.get(tenant).map_or_else(|| DEFAULT_TENANT.to_owned(), |entry| entry.name.to_string())
    }

    pub(crate) fn disk(&self, client: Uuid) -> Option<Arc<ClientDisk>> {
        self.disks.load().get(&client).cloned()
    }

    /// The caller must hold the registry lock.
    pub(crate) fn update_disks(&self, change: impl FnOnce(&mut ClientDisks)) {
        let mut disks = ClientDisks::clone(&self.disks.load());
        change(&mut disks);
        self.disks.store(Arc::new(disks));
    }
}
