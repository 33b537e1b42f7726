//! What can be set about a master.

/// How space for a new replica is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlacementStrategy {
    /// Any segment with room.
    #[default]
    Random,
    /// The emptiest of a few.
    FreeRatioFirst,
    /// One on the writer's own host if there is one with room, then any.
    LocalFirst,
}

/// Whether objects that are read often get more replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DynamicReplicationMode {
    /// No.
    #[default]
    Off,
    /// It is only counted what would be copied.
    Observe,
    /// Yes.
    Enforce,
}

/// How objects go between memory and nodes' disks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskTierOptions {
    /// Whether an object is put on a disk when it would be evicted; else at once when it has been written.
    pub on_evict: bool,
    /// Whether an object is evicted although it is on no disk, when too many wait to be put there.
    pub force_evict: bool,
    /// Objects that may wait for a node to put them on its disk.
    pub queue_limit: usize,
    /// The share of these that one round of eviction may add.
    pub cap_ratio: f64,
    /// Whether objects that are only on a disk are brought back when they are read.
    pub promote_on_hit: bool,
    /// Reads from which on that is done, roughly counted.
    pub promotion_reads: u8,
    /// Objects that may be on their way back at a time.
    pub promotion_limit: usize,
    /// Objects that a node is asked to bring back at a time.
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

/// Settings of a master. All times are milliseconds. Defaults are those of Mooncake's master, where it has the setting.
#[derive(Clone, Debug, PartialEq)]
pub struct MasterCoreOptions {
    /// Changes what is otherwise arbitrary: places of replicas, ids of tasks.
    pub seed: u64,
    /// Parts of the object table that are locked separately.
    pub shards: usize,
    /// How long a read protects an object from eviction and removal.
    pub lease_ttl_ms: u64,
    /// How long a soft pin lasts if the writer does not say.
    pub soft_pin_ttl_ms: u64,
    /// The longest soft pin.
    pub max_soft_pin_ttl_ms: u64,
    /// Whether soft-pinned objects are evicted when nothing else is left.
    pub evict_soft_pinned: bool,
    /// The share of all space above which the tick evicts.
    pub high_watermark: f64,
    /// The share of objects that one such round evicts at least.
    pub eviction_ratio: f64,
    /// After which time another writer may take over a key whose put was not ended.
    pub put_discard_ms: u64,
    /// After which time the space of a put that was not ended is free.
    pub put_release_ms: u64,
    /// After which silence a client's replicas are no longer handed out.
    pub client_ttl_ms: u64,
    /// After which further silence its replicas are dropped.
    pub client_grace_ms: u64,
    /// How replicas are placed.
    pub placement: PlacementStrategy,
    /// How long a freshly mounted segment takes until it gets its full share of new objects; 0 for at once.
    pub ramp_ms: u64,
    /// Whether tenants have name spaces and quotas of their own. If not, everything belongs to one tenant.
    pub multi_tenant: bool,
    /// Whether objects that are read often get more replicas.
    pub dynamic_replication: DynamicReplicationMode,
    /// Reads per second from which on an object is read often.
    pub hot_reads_per_second: f64,
    /// Over how long reads are counted for that.
    pub heat_window_ms: u64,
    /// Replicas in memory that such an object gets at most.
    pub max_hot_replicas: usize,
    /// How objects go to nodes' disks and back; nothing if they do not.
    pub disks: Option<DiskTierOptions>,
    /// How many tasks may wait, be worked on and be remembered: each.
    pub max_tasks: usize,
    /// After which time a task that waits or is worked on has failed.
    pub task_timeout_ms: u64,
    /// How often a client shall try a task.
    pub task_retries: u32,
}

impl Default for MasterCoreOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            shards: 64,
            lease_ttl_ms: 10_000,
            soft_pin_ttl_ms: 30 * 60_000,
            max_soft_pin_ttl_ms: 24 * 3_600_000,
            evict_soft_pinned: true,
            high_watermark: 0.90,
            eviction_ratio: 0.05,
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
