//! A master with a simulated clock and its emitted state changes.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{
    ObjectMeta, ReplicaMedium, ReplicaType, ReplicateConfig, Segment, SoftPin, SoftPinAction, Uuid,
};
use moongate_master_core::{
    CallContext, ClientSegment, MasterCore, MasterCoreOptions, ObjectCursor, ObjectState, PutStartRequest,
    RemoveContext, ReplayLane, ReplicaDescriptors, SnapshotCursor, StateChange, StoreCause,
};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const TENANT: &str = "default";
pub(crate) const WRITER: Uuid = Uuid { first: 7, second: 7 };

pub(crate) type TestReplicateConfig = ReplicateConfig<&'static str>;

pub(crate) fn id(number: u64) -> Uuid {
    Uuid { first: number, second: 1 }
}

pub(crate) fn segment(number: u64, size: u64) -> Segment<String> {
    let name = format!("10.0.0.{number}:12000");
    let (protocol, host_id) = ("tcp".to_owned(), format!("host{number}"));
    Segment {
        id: id(number),
        base: number << 40,
        size,
        te_endpoint: name.clone(),
        name,
        protocol,
        host_id,
        locality: None,
    }
}

pub(crate) fn caller(now_ms: u64, client: Uuid) -> CallContext<'static> {
    CallContext { now_ms, client, tenant: TENANT }
}

pub(crate) fn client_segment(segment: Uuid, client: Uuid) -> ClientSegment {
    ClientSegment { segment, client }
}

pub(crate) fn soft_pinned(ttl_ms: u64) -> TestReplicateConfig {
    TestReplicateConfig {
        soft_pin: SoftPin { action: SoftPinAction::ENABLE, ttl_ms: Some(ttl_ms) },
        ..TestReplicateConfig::default()
    }
}

pub(crate) fn hard_pinned() -> TestReplicateConfig {
    TestReplicateConfig { with_hard_pin: true, ..TestReplicateConfig::default() }
}

pub(crate) fn grouped(group: &'static str) -> TestReplicateConfig {
    TestReplicateConfig { group_ids: Some(vec![group]), ..TestReplicateConfig::default() }
}

/// The state of a master in a canonical order.
#[derive(Debug, PartialEq)]
pub(crate) struct ComparableState {
    objects: BTreeMap<String, ObjectState<'static>>,
    used: Vec<(String, u64, String)>,
    quotas: Vec<(String, u64, u64)>,
    /// State changes of copies, moves, tasks and drain jobs.
    work: Vec<String>,
}

pub(crate) struct TestMasterCore {
    pub(crate) master: MasterCore,
    pub(crate) now: u64,
    pub(crate) changes: Vec<StateChange<'static>>,
}

impl TestMasterCore {
    pub(crate) fn new(settings: MasterCoreOptions) -> Self {
        Self {
            master: MasterCore::new(MasterCoreOptions { ramp_ms: 0, ..settings }),
            now: 1_000_000,
            changes: Vec::new(),
        }
    }

    /// Mounts segments of these sizes, each with its own client.
    pub(crate) fn with_segments(settings: MasterCoreOptions, sizes: &[u64]) -> Self {
        let mut world = Self::new(settings);
        for (number, size) in (1..).zip(sizes) {
            world.mount(number, *size).unwrap();
        }
        world
    }

    pub(crate) fn mount(&mut self, number: u64, size: u64) -> Result<(), ErrorCode> {
        self.master.mount(self.now, &segment(number, size), id(100 + number), &mut self.changes)
    }

    pub(crate) fn start(
        &mut self,
        key: &str,
        size: u64,
        config: &TestReplicateConfig,
    ) -> Result<ReplicaDescriptors, ErrorCode> {
        self.master.put_start(
            caller(self.now, WRITER),
            &PutStartRequest { key, size, config },
            &mut self.changes,
        )
    }

    pub(crate) fn end(&mut self, key: &str) -> Result<(), ErrorCode> {
        let meta = ObjectMeta { key, object_checksum: None };
        self.master.put_end(caller(self.now, WRITER), &meta, ReplicaType::ALL, &mut self.changes)
    }

    pub(crate) fn revoke(&mut self, key: &str) -> Result<(), ErrorCode> {
        self.master.put_revoke(caller(self.now, WRITER), key, ReplicaType::ALL, &mut self.changes)
    }

    pub(crate) fn put(
        &mut self,
        key: &str,
        size: u64,
        config: &TestReplicateConfig,
    ) -> Result<(), ErrorCode> {
        self.start(key, size, config)?;
        self.end(key)
    }

    pub(crate) fn exists(&self, key: &str) -> bool {
        self.master.exist(self.now, TENANT, key)
    }

    /// Whether a key is readable, without leasing it.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.master.peek(TENANT, &[key])[0].is_ok()
    }

    pub(crate) fn remove(&mut self, key: &str) -> Result<(), ErrorCode> {
        self.master.remove(
            RemoveContext { now_ms: self.now, tenant: TENANT, force: false },
            key,
            &mut self.changes,
        )
    }

    pub(crate) fn tick(&mut self, ms: u64) {
        self.now += ms;
        self.master.tick(self.now, &mut self.changes);
    }

    /// Advances the time while these nodes send heartbeats.
    pub(crate) fn advance_with_heartbeats(&mut self, ms: u64, nodes: &[u64]) {
        for _ in 0..ms.div_ceil(1000) {
            self.now += 1000.min(ms);
            for node in nodes {
                self.master.ping(self.now, id(100 + node));
            }
            self.master.tick(self.now, &mut self.changes);
        }
    }

    pub(crate) fn keys(&self) -> BTreeSet<String> {
        let mut keys = BTreeSet::new();
        let mut cursor = Some(ObjectCursor::default());
        while let Some(from) = cursor {
            cursor = self.master.keys(from, 10, |_, key| assert!(keys.insert(key.to_owned())));
        }
        keys
    }

    /// Names of the segments with a replica of an object.
    pub(crate) fn segments_of(&self, key: &str) -> Vec<String> {
        endpoints(&self.master.peek(TENANT, &[key])[0].clone().unwrap())
    }

    /// Allocated bytes of all segments.
    pub(crate) fn used(&self) -> u64 {
        self.master.space_usage().used
    }
}

pub(crate) fn endpoints(replicas: &ReplicaDescriptors) -> Vec<String> {
    let endpoint = |it: &ReplicaMedium<std::sync::Arc<str>>| match it {
        ReplicaMedium::Memory(buffer) => buffer.endpoint.to_string(),
        _ => String::new(),
    };
    replicas.iter().map(|it| endpoint(&it.medium)).collect()
}

pub(crate) fn snapshot(master: &MasterCore, limit: u32) -> Vec<StateChange<'static>> {
    let mut changes = Vec::new();
    let mut cursor = Some(SnapshotCursor::default());
    while let Some(from) = cursor {
        cursor = master.snapshot(from, limit, &mut changes);
    }
    changes
}

/// The comparable state of a master. Leases are not recorded, so times of readable objects are omitted.
pub(crate) fn comparable_state(master: &MasterCore) -> ComparableState {
    let mut objects = BTreeMap::new();
    let mut work = Vec::new();
    for change in snapshot(master, 100) {
        if matches!(
            change,
            StateChange::TransferStarted(_)
                | StateChange::Task(_)
                | StateChange::DrainJob(_)
                | StateChange::DrainMoveStarted { .. }
                | StateChange::DrainMoveEnded { .. }
        ) {
            work.push(format!("{change:?}"));
            continue;
        }
        let (is_stored, object) = match change {
            StateChange::ObjectStored { object, cause: StoreCause::Snapshot } => (true, object),
            StateChange::ObjectStarted(object) => (false, object),
            _ => continue,
        };
        let name = format!("{}/{}/{is_stored}", object.tenant, object.key);
        let since_ms = if is_stored { 0 } else { object.since_ms };
        assert!(objects.insert(name, ObjectState { since_ms, ..object }).is_none());
    }
    let details = master.segments_detail().segments.into_iter();
    let mut used: Vec<_> = details.map(|it| (it.segment_name, it.allocator_used_bytes, it.status)).collect();
    used.sort();
    let quota =
        |it: mooncake_wire::admin::TenantQuota| (it.tenant_id, it.effective_quota_bytes, it.charged_bytes);
    let quotas = master.quotas().unwrap_or_default().into_iter().map(quota).collect();
    // Transfers are emitted in the order of the shards' tables.
    let (mut transfers, ordered): (Vec<_>, Vec<_>) =
        work.into_iter().partition(|it: &String| it.starts_with("TransferStarted"));
    transfers.sort();
    let work = [transfers, ordered].concat();
    ComparableState { objects, used, quotas, work }
}

/// A master that has applied these state changes.
pub(crate) fn replayed(
    settings: &MasterCoreOptions,
    changes: &[StateChange<'static>],
    now: u64,
) -> MasterCore {
    let records = changes.iter().map(|change| {
        let mut bytes = Vec::new();
        moongate_master_core::encode(change, &mut bytes);
        bytes
    });
    let records: Vec<Vec<u8>> = records.collect();
    let master = MasterCore::new(settings.clone());
    records.iter().for_each(|record| apply_record(&master, record));
    master.finish_replay(now, &());
    assert_eq!(comparable_state(&replayed_in_bulk(settings, &records, now)), comparable_state(&master));
    master
}

fn apply_record(master: &MasterCore, record: &[u8]) {
    let (change, rest) = moongate_master_core::decode(record).unwrap();
    assert!(rest.is_empty());
    let _ = master.apply(&change);
}

/// A master that has applied these records lane by lane, as far as their order allows.
fn replayed_in_bulk(settings: &MasterCoreOptions, records: &[Vec<u8>], now: u64) -> MasterCore {
    let master = MasterCore::new(settings.clone());
    master.begin_bulk_replay();
    let mut lanes: BTreeMap<usize, Vec<&[u8]>> = BTreeMap::new();
    let apply_lanes = |lanes: &mut BTreeMap<usize, Vec<&[u8]>>| {
        while let Some((_, records)) = lanes.pop_last() {
            records.into_iter().for_each(|record| apply_record(&master, record));
        }
    };
    for record in records {
        match master.replay_lane(record) {
            ReplayLane::Shard(shard) => lanes.entry(shard).or_default().push(record),
            ReplayLane::Exclusive => {
                apply_lanes(&mut lanes);
                apply_record(&master, record);
            }
        }
    }
    apply_lanes(&mut lanes);
    master.finish_replay(now, &());
    master
}
