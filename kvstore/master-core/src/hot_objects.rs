//! Read counts of objects, for dynamic replication.

use std::collections::HashMap;

use mooncake_wire::types::Uuid;

use crate::change::DynamicReplicationLease;

/// How long a plan is valid, in milliseconds.
const LEASE_MS: u64 = 30_000;
/// Minimum time between two plans for an object, in milliseconds.
const COOLDOWN_MS: u64 = 30_000;
/// Maximum number of objects whose reads are counted at a time.
const MAX_COUNTED: usize = 16_384;

#[derive(Clone, Copy, Debug)]
struct ReadWindow {
    since_ms: u64,
    count: u32,
    planned_at_ms: Option<u64>,
}

/// When an object is hot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HotThreshold {
    /// Time over which reads are counted.
    pub(crate) window_ms: u64,
    /// Number of reads within it that makes an object hot.
    pub(crate) reads: u32,
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
    pub(crate) fn count(&mut self, now_ms: u64, hash: u64, threshold: HotThreshold) -> bool {
        let HotThreshold { window_ms, reads: hot_reads } = threshold;
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

    /// Records a new plan with this id. Returns its lease.
    pub(crate) fn add_plan(&mut self, now_ms: u64, id: Uuid) -> DynamicReplicationLease {
        self.epoch += 1;
        let lease = DynamicReplicationLease { id, epoch: self.epoch };
        self.plans.retain(|_, until| *until > now_ms);
        self.plans.insert(lease, now_ms.saturating_add(LEASE_MS));
        lease
    }

    /// Whether this master created the plan and it has not expired.
    pub(crate) fn is_planned(&self, now_ms: u64, lease: DynamicReplicationLease) -> bool {
        self.plans.get(&lease).is_some_and(|until| *until > now_ms)
    }
}
