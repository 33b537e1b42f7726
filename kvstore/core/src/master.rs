//! The master's state.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed};

use arc_swap::ArcSwap;
use foldhash::fast::FixedState;
use mooncake_wire::ErrorCode;
use parking_lot::Mutex;

use crate::client::Registry;
use crate::count::Counters;
use crate::disk::{DiskFigures, Disks};
use crate::group::{GroupId, Groups};
use crate::locked::Spot;
use crate::placement::mix;
use crate::prefix::Prefixes;
use crate::rebuild::{RebuildWindow, RestoreCounters};
use crate::recent_writes::RecentWrites;
use crate::segment::Segments;
use crate::settings::Settings;
use crate::shard::Shard;
use crate::sketch::Sketch;
use crate::task::Tasks;
use crate::tenant::Tenants;
use crate::underway::Noted;

/// All that a master knows and decides. See the crate's documentation for how it is used.
#[derive(Debug)]
pub struct Master {
    pub(crate) settings: Settings,
    hasher: FixedState,
    pub(crate) shards: Box<[Mutex<Shard>]>,
    /// Per shard the stamp of the first entry that has not been read.
    pub(crate) oldest_unread: Box<[AtomicU64]>,
    /// The same for entries that nothing but their leases protect.
    pub(crate) oldest_leased: Box<[AtomicU64]>,
    /// The same for soft-pinned entries.
    pub(crate) oldest_soft: Box<[AtomicU64]>,
    pub(crate) groups: Groups,
    pub(crate) segments: ArcSwap<Segments>,
    pub(crate) registry: Mutex<Registry>,
    pub(crate) tenants: Tenants,
    pub(crate) prefixes: Prefixes,
    pub(crate) tasks: Mutex<Tasks>,
    pub(crate) disks: ArcSwap<Disks>,
    pub(crate) on_disks: DiskFigures,
    pub(crate) sketch: Sketch,
    /// Copies and moves that facts told of.
    pub(crate) noted: Mutex<Noted>,
    pub(crate) counters: Counters,
    /// Locked after the registry, before shards.
    pub(crate) rebuild: Mutex<RebuildWindow>,
    pub(crate) restores: RestoreCounters,
    pub(crate) recent_writes: RecentWrites,
    next_id: AtomicU64,
    /// The shard whose soft pins are looked at next.
    pub(crate) next_unpin: AtomicUsize,
    pub(crate) view_version: AtomicI64,
}

impl Master {
    /// A master that knows nothing yet.
    pub fn new(settings: Settings) -> Self {
        let shards = settings.shards.clamp(1, 1 << 16);
        let stamps = || (0..shards).map(|_| AtomicU64::new(u64::MAX)).collect();
        Self {
            hasher: FixedState::with_seed(settings.seed),
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            oldest_unread: stamps(),
            oldest_leased: stamps(),
            oldest_soft: stamps(),
            groups: Groups::new(),
            segments: ArcSwap::default(),
            registry: Mutex::default(),
            tenants: Tenants::new(settings.multi_tenant),
            prefixes: Prefixes::new(),
            tasks: Mutex::new(Tasks::new(settings.seed)),
            disks: ArcSwap::default(),
            on_disks: DiskFigures::default(),
            sketch: Sketch::new(settings.disks.is_some_and(|it| it.promote_on_hit)),
            noted: Mutex::default(),
            counters: Counters::default(),
            rebuild: Mutex::default(),
            restores: RestoreCounters::default(),
            recent_writes: RecentWrites::default(),
            next_id: AtomicU64::new(1),
            next_unpin: AtomicUsize::new(0),
            view_version: AtomicI64::new(0),
            settings,
        }
    }

    /// What it was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Sets the number by which clients recognise a change of the leader.
    pub fn set_view_version(&self, version: i64) {
        self.view_version.store(version, Relaxed);
    }

    pub(crate) fn hash(&self, tenant: u16, key: &str) -> u64 {
        self.hasher.hash_one(key) ^ u64::from(tenant).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    pub(crate) fn spot(&self, tenant: u16, key: &str) -> Spot {
        let hash = self.hash(tenant, key);
        let shard = ((hash >> 32) * self.shards.len() as u64) >> 32;
        Spot { shard: shard as usize, tag: hash as u32, tenant }
    }

    /// The spot of a reader's key.
    pub(crate) fn spot_of(&self, tenant: &str, key: &str) -> Result<Spot, ErrorCode> {
        let tenant = self.tenants.place(tenant).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        Ok(self.spot(tenant, key))
    }

    pub(crate) fn group(&self, tenant: &str, name: &str) -> GroupId {
        let tenant = if self.tenants.enabled() { tenant } else { "" };
        // FNV-1a: the number outlives this master, so it must not depend on a seed or on a library's release.
        let bytes = tenant.bytes().chain([0xff]).chain(name.bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        GroupId(mix(hash))
    }

    pub(crate) fn new_replica_id(&self) -> u64 {
        self.next_id.fetch_add(1, Relaxed)
    }

    /// Never gives an id that was seen.
    pub(crate) fn saw_replica_id(&self, id: u64) {
        self.next_id.fetch_max(id.saturating_add(1), Relaxed);
    }

    /// Segments were mounted or unmounted.
    pub(crate) fn capacity_changed(&self) {
        let capacity = self.capacity();
        self.tenants.scale(capacity);
        // With everything leased, a pool has at most as much room as the watermark leaves and one round of eviction makes.
        let share = 1.0 - self.settings.high_watermark + self.settings.eviction_ratio;
        self.recent_writes.resize(capacity, share);
    }

    /// Bytes of space that objects may have in all.
    pub(crate) fn capacity(&self) -> u64 {
        self.segments.load().fill().1
    }
}
