//! Settings of a master.

/// Strategy for choosing the segment of a new replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlacementStrategy {
    /// Any segment with free space.
    #[default]
    Random,
    /// The emptiest of six random segments.
    FreeRatioFirst,
    /// A segment on the writer's host with free space, otherwise any.
    LocalFirst,
}

/// Which objects are evicted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RetentionPolicy {
    /// Those that were read or written least recently.
    Lru,
    /// Those that are least likely to be read soon, by learned return times. Without statistics as `Lru`.
    #[default]
    Learned,
}

/// Mode of dynamic replication: more replicas for objects that are read often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DynamicReplicationMode {
    #[default]
    Off,
    /// Only count the copies that would be made.
    Observe,
    /// Plan copies of hot objects.
    Enforce,
}

/// Settings for offloading to and promotion from nodes' disks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskTierOptions {
    /// Whether an object is offloaded when it would be evicted; otherwise as soon as its put ends.
    pub on_evict: bool,
    /// Whether an object without a disk copy is evicted when the offload queue is full.
    pub force_evict: bool,
    /// Maximum number of queued offloads per node.
    pub queue_limit: usize,
    /// Maximum share of the queue that one round of eviction may add.
    pub cap_ratio: f64,
    /// Whether objects that are only on a disk are promoted when they are read.
    pub promote_on_hit: bool,
    /// Minimum number of reads for a promotion (approximate count).
    pub promotion_reads: u8,
    /// Maximum number of active promotions.
    pub promotion_limit: usize,
    /// Maximum number of promotions that a node gets per heartbeat.
    pub promotions_per_heartbeat: usize,
}

impl Default for DiskTierOptions {
    fn default() -> Self {
        Self {
            on_evict: false,
            force_evict: false,
            queue_limit: 50_000,
            cap_ratio: 0.5,
            promote_on_hit: false,
            promotion_reads: 2,
            promotion_limit: 50_000,
            promotions_per_heartbeat: 1,
        }
    }
}

/// Settings of a master. All times are in milliseconds. Defaults are those of Mooncake's master, where it has the setting.
#[derive(Clone, Debug, PartialEq)]
pub struct MasterCoreOptions {
    /// Seed of random choices: placement of replicas, ids of tasks.
    pub seed: u64,
    /// Number of separately locked shards of the object table, 1 to 65 536.
    pub shards: usize,
    /// How long a read protects an object from eviction and removal.
    pub lease_ttl_ms: u64,
    /// Default duration of a soft pin.
    pub soft_pin_ttl_ms: u64,
    /// Maximum duration of a soft pin.
    pub max_soft_pin_ttl_ms: u64,
    /// Whether soft-pinned objects are evicted when no others are left.
    pub evict_soft_pinned: bool,
    /// Share of used space above which the tick evicts, 0 to 1.
    pub high_watermark: f64,
    /// Minimum share of objects that one such round evicts, 0 to 1.
    pub eviction_ratio: f64,
    /// Which objects are evicted first.
    pub retention: RetentionPolicy,
    /// Time after which another writer may replace a put that has not ended.
    pub put_discard_ms: u64,
    /// Time after which the space of a put that has not ended is freed.
    pub put_release_ms: u64,
    /// Time without heartbeats after which a client's replicas are not returned to readers.
    pub client_ttl_ms: u64,
    /// Further time without heartbeats after which its replicas are dropped.
    pub client_grace_ms: u64,
    /// Strategy for choosing segments of new replicas.
    pub placement: PlacementStrategy,
    /// Time until a newly mounted segment gets its full share of new objects; 0 for immediately.
    pub ramp_ms: u64,
    /// Whether tenants have separate namespaces and quotas. If not, everything belongs to one tenant.
    pub multi_tenant: bool,
    /// Whether objects that are read often get more replicas.
    pub dynamic_replication: DynamicReplicationMode,
    /// Reads per second above which an object is hot.
    pub hot_reads_per_second: f64,
    /// Window over which reads are counted.
    pub heat_window_ms: u64,
    /// Maximum number of memory replicas of a hot object.
    pub max_hot_replicas: usize,
    /// Settings of nodes' disks; `None` disables them.
    pub disks: Option<DiskTierOptions>,
    /// Maximum number of pending, of processing and of finished tasks (each).
    pub max_tasks: usize,
    /// Time after which a pending or processing task fails.
    pub task_timeout_ms: u64,
    /// Maximum number of attempts of a task by a client.
    pub task_retries: u32,
}

impl Default for MasterCoreOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            shards: 64,
            lease_ttl_ms: 10_000,
            soft_pin_ttl_ms: 30 * 60_000,
            max_soft_pin_ttl_ms: 7 * 24 * 3_600_000,
            evict_soft_pinned: true,
            high_watermark: 0.90,
            eviction_ratio: 0.05,
            retention: RetentionPolicy::default(),
            put_discard_ms: 30_000,
            put_release_ms: 600_000,
            client_ttl_ms: 10_000,
            client_grace_ms: 60_000,
            placement: PlacementStrategy::Random,
            ramp_ms: 60_000,
            multi_tenant: false,
            dynamic_replication: DynamicReplicationMode::Off,
            hot_reads_per_second: 0.8,
            heat_window_ms: 10_000,
            max_hot_replicas: 2,
            disks: None,
            max_tasks: 10_000,
            task_timeout_ms: 300_000,
            task_retries: 10,
        }
    }
}
