//! Dynamic replication: objects that are read often get more replicas.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ReplicaDescriptor, ReplicaList, ReplicaMedium};

use crate::change::DynamicReplicationLease;
use crate::hot_objects::HotThreshold;
use crate::master::{MasterCore, TaskPlanner};
use crate::object_table::KeyLocation;
use crate::payload::copy_payload;
use crate::requests::CopyRequest;
use crate::settings::DynamicReplicationMode;
use crate::statistics::MasterCounters;

/// Minimum free share of a target segment.
const MIN_FREE: f64 = 0.15;

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
        if !self.planner.lock().hot_objects.count(
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

    fn hot_threshold(&self) -> HotThreshold {
        let window_ms = self.objects.settings.heat_window_ms.max(1);
        let reads = (self.objects.settings.hot_reads_per_second * window_ms as f64 / 1000.0).ceil();
        HotThreshold { window_ms, reads: (reads as u32).max(1) }
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
        let mut planner = self.planner.lock();
        let TaskPlanner { tasks, hot_objects, .. } = &mut *planner;
        let lease = hot_objects.add_plan(now_ms, tasks.new_id());
        let request = CopyRequest {
            key,
            source: &source.name,
            targets: &[&*target.descriptor.name],
            lease: Some(lease),
        };
        let payload = copy_payload(tenant, &request)?;
        // Not recorded: another master detects hot objects again within seconds and does not accept this master's plans.
        tasks.add(now_ms, payload, source.client, &mut ())?;
        Ok(())
    }

    /// Checks that this master created the plan and that it has not expired.
    pub(crate) fn check_plan(&self, now_ms: u64, lease: DynamicReplicationLease) -> Result<(), ErrorCode> {
        if self.planner.lock().hot_objects.is_planned(now_ms, lease) {
            Ok(())
        } else {
            Err(ErrorCode::INVALID_PARAMS)
        }
    }
}
