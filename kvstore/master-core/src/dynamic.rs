//! Dynamic replication: objects that are read often get more replicas.

use std::collections::HashMap;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ReplicaDescriptor, ReplicaList, ReplicaMedium};

use crate::change::DynamicReplicationLease;
use crate::master::MasterCore;
use crate::object_table::KeyLocation;
use crate::payload::copy_payload;
use crate::settings::DynamicReplicationMode;
use crate::statistics::MasterCounters;

/// How long a plan is valid, in milliseconds.
const LEASE_MS: u64 = 30_000;
/// Minimum time between two plans for an object, in milliseconds.
const COOLDOWN_MS: u64 = 30_000;
/// Minimum free share of a target segment.
const MIN_FREE: f64 = 0.15;
/// Maximum number of objects whose reads are counted at a time.
const MAX_COUNTED: usize = 16_384;

#[derive(Clone, Copy, Debug)]
struct ReadWindow {
    since_ms: u64,
    count: u32,
    planned_at_ms: Option<u64>,
}

/// Read counts of objects, and the valid plans.
#[derive(Debug, Default)]
pub(crate) struct HotObjectTracker {
    reads: HashMap<u64, ReadWindow>,
    plans: HashMap<DynamicReplicationLease, u64>,
    epoch: u64,
}

impl HotObjectTracker {
    /// Counts a read. Returns true if the object has become hot and no plan was made within the cooldown.
    fn count(&mut self, now_ms: u64, hash: u64, (window_ms, hot_reads): (u64, u32)) -> bool {
        if self.reads.len() >= MAX_COUNTED && !self.reads.contains_key(&hash) {
            let is_recent = |window: &ReadWindow| {
                window.since_ms.saturating_add(window_ms.saturating_add(COOLDOWN_MS)) > now_ms
            };
            self.reads.retain(|_, window| is_recent(window));
            if self.reads.len() >= MAX_COUNTED {
                return false;
            }
        }
        let reads =
            self.reads.entry(hash).or_insert(ReadWindow { since_ms: now_ms, count: 0, planned_at_ms: None });
        if reads.since_ms.saturating_add(window_ms) <= now_ms {
            (reads.since_ms, reads.count) = (now_ms, 0);
        }
        reads.count += 1;
        let is_cooling_down =
            reads.planned_at_ms.is_some_and(|planned_ms| planned_ms.saturating_add(COOLDOWN_MS) > now_ms);
        if reads.count < hot_reads || is_cooling_down {
            return false;
        }
        reads.planned_at_ms = Some(now_ms);
        true
    }
}

impl MasterCore {
    pub(crate) fn is_counting_reads(&self) -> bool {
        self.objects.settings.dynamic_replication != DynamicReplicationMode::Off
    }

    /// Counts a read and plans a copy if the object has become hot.
    pub(crate) fn record_read<S>(
        &self,
        now_ms: u64,
        key_location: KeyLocation,
        tenant: &str,
        key: &str,
        list: &ReplicaList<S>,
    ) {
        let is_in_memory =
            |replica: &&ReplicaDescriptor<S>| matches!(replica.medium, ReplicaMedium::Memory(_));
        let replicas = list.replicas.iter().filter(is_in_memory).count();
        if !self.is_counting_reads()
            || replicas == 0
            || replicas >= self.objects.settings.max_hot_replicas.max(1)
        {
            return;
        }
        if !self.tasks.lock().hot_objects.count(
            now_ms,
            self.objects.hash(key_location.tenant, key),
            self.hot_threshold(),
        ) {
            return;
        }
        MasterCounters::add(&self.objects.counters.hot_keys, 1);
        if self.objects.settings.dynamic_replication == DynamicReplicationMode::Enforce {
            // Best effort: without a target or above the task limit nothing is copied.
            let _ = self.plan_copy(now_ms, tenant, key);
        }
    }

    /// The counting window in milliseconds, and the number of reads within it that makes an object hot.
    fn hot_threshold(&self) -> (u64, u32) {
        let window_ms = self.objects.settings.heat_window_ms.max(1);
        let reads = (self.objects.settings.hot_reads_per_second * window_ms as f64 / 1000.0).ceil();
        (window_ms, (reads as u32).max(1))
    }

    fn plan_copy(&self, now_ms: u64, tenant: &str, key: &str) -> Result<(), ErrorCode> {
        let source = self.objects.source_of(tenant, key, None)?;
        let segments = self.objects.segments.load();
        let others = segments.iter().filter(|(_, segment)| {
            segment.is_writable()
                && segment.free_ratio() > MIN_FREE
                && !source.holders.contains(&segment.descriptor.name)
        });
        let emptiest = others.max_by(|(_, a), (_, b)| a.free_ratio().total_cmp(&b.free_ratio()));
        let (_, target) = emptiest.ok_or(ErrorCode::NO_AVAILABLE_HANDLE)?;
        let mut tasks = self.tasks.lock();
        tasks.hot_objects.epoch += 1;
        let lease = (tasks.new_id(), tasks.hot_objects.epoch);
        tasks.hot_objects.plans.retain(|_, until| *until > now_ms);
        tasks.hot_objects.plans.insert(lease, now_ms.saturating_add(LEASE_MS));
        let payload = copy_payload(tenant, key, &source.name, &[&target.descriptor.name], Some(lease))?;
        // Not recorded: another master detects hot objects again within seconds and does not accept this master's plans.
        tasks.add(now_ms, payload, source.client, self.objects.settings.max_tasks, &mut ())?;
        Ok(())
    }

    /// Checks that this master created the plan and that it has not expired.
    pub(crate) fn check_plan(&self, now_ms: u64, lease: DynamicReplicationLease) -> Result<(), ErrorCode> {
        let is_valid = self.tasks.lock().hot_objects.plans.get(&lease).is_some_and(|until| *until > now_ms);
        if is_valid { Ok(()) } else { Err(ErrorCode::INVALID_PARAMS) }
    }
}
