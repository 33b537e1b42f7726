//! Inventories of nodes: their records, and the state of a rebuild from them.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_wire::types::Uuid;

use crate::change::RemoveCause;

/// How long a segment accepts no new objects while its inventory is pending, counted from the latest batch.
pub(crate) const INVENTORY_TIMEOUT_MS: u64 = 30_000;
/// Maximum number of segments with an announced inventory that are not mounted yet.
const MAX_ANNOUNCED: usize = 4096;
/// Maximum number of keys per shard recorded as removed during the rebuild. Above it, the shard stops restoring.
const MAX_REMOVED: usize = 65_536;

/// Orders the versions of a key: by the master's epoch, then by the replica's number within that epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectVersion {
    /// Epoch of the master that registered the object with the node.
    pub epoch: u64,
    /// The replica's number within that epoch.
    pub sequence: u64,
}

/// One record of a node's inventory: an object whose bytes the node has verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InventoryRecord<'a> {
    pub tenant: &'a str,
    pub key: &'a str,
    /// The object's group; empty for none.
    pub group: &'a str,
    /// Offset of the object in the segment, in bytes.
    pub offset: u64,
    pub size: u64,
    /// Which version of the key it is.
    pub version: ObjectVersion,
    /// Checksum that the writer supplied, if any.
    pub checksum: Option<u64>,
    /// Whether the object is excluded from eviction.
    pub hard_pin: bool,
    /// CRC-32C of the object's bytes, computed by the node.
    pub crc: u32,
}

/// Result of restoring one inventory record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreOutcome {
    /// The object is readable again.
    Restored,
    /// Another node has restored the same bytes: the object has one more replica.
    Merged,
    /// This replica was restored before.
    Present,
    /// The range lies outside the segment, or the key is empty.
    OutsideSegment,
    /// The range overlaps another object.
    Overlapping,
    /// Another node has restored a later version.
    OlderVersion,
    /// A client has removed the key since.
    RemovedSince,
    /// A client has written the key since.
    WrittenSince,
    /// The maximum number of tenants is reached.
    TenantRefused,
    /// The rebuild window is closed.
    Closed,
}

impl RestoreOutcome {
    /// All outcomes in the order of their numbers on the wire.
    pub const ALL: [Self; 10] = [
        Self::Restored,
        Self::Merged,
        Self::Present,
        Self::OutsideSegment,
        Self::Overlapping,
        Self::OlderVersion,
        Self::RemovedSince,
        Self::WrittenSince,
        Self::TenantRefused,
        Self::Closed,
    ];

    /// Value of the `outcome` label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Restored => "restored",
            Self::Merged => "merged",
            Self::Present => "present",
            Self::OutsideSegment => "outside_segment",
            Self::Overlapping => "overlapping",
            Self::OlderVersion => "older_version",
            Self::RemovedSince => "removed_since",
            Self::WrittenSince => "written_since",
            Self::TenantRefused => "tenant_refused",
            Self::Closed => "closed",
        }
    }

    /// Whether the object is in the table, so that the node keeps its inventory record.
    pub fn is_accepted(self) -> bool {
        matches!(self, Self::Restored | Self::Merged | Self::Present)
    }

    fn index(self) -> usize {
        Self::ALL.iter().position(|outcome| *outcome == self).unwrap_or(0)
    }
}

/// Number of inventory records by outcome.
#[derive(Debug, Default)]
pub(crate) struct RestoreCounters([AtomicU64; RestoreOutcome::ALL.len()]);

impl RestoreCounters {
    pub(crate) fn add(&self, outcome: RestoreOutcome) {
        if let Some(counter) = self.0.get(outcome.index()) {
            counter.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn read(&self) -> [(RestoreOutcome, u64); RestoreOutcome::ALL.len()] {
        RestoreOutcome::ALL
            .map(|outcome| (outcome, self.0.get(outcome.index()).map_or(0, |count| count.load(Relaxed))))
    }
}

/// State of the rebuild, shared by all shards.
#[derive(Debug, Default)]
pub(crate) struct RebuildWindow {
    /// When the window closes; 0 when it is closed.
    until_ms: u64,
    /// Segments announced but not mounted yet, with the deadline for mounting them.
    announced: HashMap<Uuid, u64>,
}

impl RebuildWindow {
    pub(crate) fn new(until_ms: u64) -> Self {
        Self { until_ms, announced: HashMap::new() }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.until_ms > 0
    }

    /// Drops announcements whose deadline has passed. Returns whether the window's own has passed.
    pub(crate) fn expire(&mut self, now_ms: u64) -> bool {
        self.announced.retain(|_, until| *until > now_ms);
        self.until_ms <= now_ms
    }

    /// Announces a segment that is not mounted yet. Returns whether its inventory will be accepted.
    pub(crate) fn announce(&mut self, now_ms: u64, segment: Uuid) -> bool {
        if self.until_ms <= now_ms || self.announced.len() >= MAX_ANNOUNCED {
            return false;
        }
        self.announced.insert(segment, now_ms.saturating_add(INVENTORY_TIMEOUT_MS));
        true
    }

    /// Called before a segment is mounted. Returns whether its inventory was announced.
    pub(crate) fn take_announced(&mut self, segment: Uuid) -> bool {
        self.announced.remove(&segment).is_some()
    }
}

/// State of the rebuild in one shard, while the window is open.
#[derive(Debug, Default)]
pub(crate) struct ShardRebuild {
    removed: HashSet<u64>,
    restored: HashMap<u64, RestoredObject>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RestoredObject {
    pub(crate) version: ObjectVersion,
    pub(crate) crc: u32,
}

impl ShardRebuild {
    /// Whether a client has removed the key.
    pub(crate) fn is_removed(&self, hash: u64) -> bool {
        self.removed.contains(&hash)
    }

    /// What was restored of a key, unless a client has written or removed it since.
    pub(crate) fn restored(&self, hash: u64) -> Option<RestoredObject> {
        self.restored.get(&hash).copied()
    }

    pub(crate) fn record_restored(&mut self, hash: u64, object: RestoredObject) {
        self.removed.remove(&hash);
        self.restored.insert(hash, object);
    }

    pub(crate) fn record_rewritten(&mut self, hash: u64) {
        self.restored.remove(&hash);
    }

    /// Records the removal of a key. Returns false above the limit: the shard must stop restoring.
    pub(crate) fn record_removed(&mut self, hash: u64, cause: RemoveCause) -> bool {
        self.restored.remove(&hash);
        // Another node may restore an object whose segment is lost.
        if cause != RemoveCause::SegmentLost {
            self.removed.insert(hash);
        }
        self.removed.len() <= MAX_REMOVED
    }
}
