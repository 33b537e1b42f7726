//! Object entries of the table: 72 bytes each, plus the key.

use mooncake_wire::types::{ReplicaStatus, Uuid};
use moongate_retention::BlockClass;

use crate::change::DynamicReplicationLease;
use crate::disk::{ActiveDiskTask, DiskCopy};
use crate::group::GroupId;
use crate::indices::{AllocatorBlockIndex, EntryIndex, GroupIndex, PrefixIndex, SegmentIndex, TenantIndex};
use crate::key_store::StoredKey;
use crate::writers::WriterIndex;

/// The list that an entry is in. Eviction takes from `Unread` and `Leased` first, then from `SoftPinned`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum EvictionQueue {
    /// The slot has no entry.
    #[default]
    Vacant,
    /// In no list: hard-pinned, being transferred or replaced, or not in memory.
    Unlisted,
    /// Being written, ordered by start time.
    Writing,
    /// Soft-pinned: evicted after all others.
    SoftPinned,
    /// Not read yet, ordered by time of writing.
    Unread(BlockClass),
    /// Read before, ordered by expiry of the last lease.
    Leased(BlockClass),
}

/// Number of values of [`EvictionQueue`] without a class.
const QUEUES_WITHOUT_CLASS: usize = 4;

impl EvictionQueue {
    /// Number of values.
    pub(crate) const COUNT: usize = QUEUES_WITHOUT_CLASS + 2 * BlockClass::COUNT;

    /// Position among all values, below [`Self::COUNT`].
    pub(crate) fn number(self) -> QueueNumber {
        QueueNumber(match self {
            Self::Vacant => QueueNumber::VACANT.0,
            Self::Unlisted => QueueNumber::UNLISTED.0,
            Self::Writing => QueueNumber::WRITING.0,
            Self::SoftPinned => QueueNumber::SOFT_PINNED.0,
            Self::Unread(class) => (QUEUES_WITHOUT_CLASS + class.index()) as u8,
            Self::Leased(class) => (QUEUES_WITHOUT_CLASS + BlockClass::COUNT + class.index()) as u8,
        })
    }

    fn from_number(number: QueueNumber) -> Self {
        match number {
            QueueNumber::VACANT => Self::Vacant,
            QueueNumber::UNLISTED => Self::Unlisted,
            QueueNumber::WRITING => Self::Writing,
            QueueNumber::SOFT_PINNED => Self::SoftPinned,
            QueueNumber(number) => {
                let class = usize::from(number) - QUEUES_WITHOUT_CLASS;
                match class.checked_sub(BlockClass::COUNT) {
                    None => BlockClass::from_index(class).map_or(Self::Vacant, Self::Unread),
                    Some(class) => BlockClass::from_index(class).map_or(Self::Vacant, Self::Leased),
                }
            }
        }
    }

    /// The queues of unpinned objects.
    pub(crate) fn unpinned() -> impl Iterator<Item = Self> {
        (QUEUES_WITHOUT_CLASS..Self::COUNT).map(|number| Self::from_number(QueueNumber(number as u8)))
    }

    /// The class of an unpinned object; that of one that was written only, for all others.
    pub(crate) fn class(self) -> BlockClass {
        match self {
            Self::Unread(class) | Self::Leased(class) => class,
            Self::Vacant | Self::Unlisted | Self::Writing | Self::SoftPinned => BlockClass::default(),
        }
    }
}

/// An [`EvictionQueue`] as a number, for indices and comparisons without decoding it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueNumber(u8);

impl QueueNumber {
    const VACANT: Self = Self(0);
    const UNLISTED: Self = Self(1);
    const WRITING: Self = Self(2);
    pub(crate) const SOFT_PINNED: Self = Self(3);

    pub(crate) fn get(self) -> usize {
        self.0.into()
    }

    /// Whether its entries are in a list.
    pub(crate) fn is_listed(self) -> bool {
        self != Self::VACANT && self != Self::UNLISTED
    }

    pub(crate) fn queue(self) -> EvictionQueue {
        EvictionQueue::from_number(self)
    }

    /// The number at a position below [`EvictionQueue::COUNT`].
    pub(crate) fn of_position(position: usize) -> Self {
        Self(position as u8)
    }
}

/// One replica of an object in a memory segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryReplica {
    /// Replica id, unique within a master.
    pub(crate) id: u64,
    /// Offset in the segment, in bytes.
    pub(crate) offset: u64,
    pub(crate) block: AllocatorBlockIndex,
    pub(crate) segment: SegmentIndex,
    /// Whether it is readable; otherwise it is being written.
    pub(crate) ready: bool,
}

impl Default for MemoryReplica {
    fn default() -> Self {
        Self { id: 0, offset: 0, block: AllocatorBlockIndex::NONE, segment: SegmentIndex::NONE, ready: false }
    }
}

impl MemoryReplica {
    pub(crate) fn status(self) -> ReplicaStatus {
        if self.ready { ReplicaStatus::COMPLETE } else { ReplicaStatus::PROCESSING }
    }
}

/// A key with its tenant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ObjectName {
    pub(crate) tenant: String,
    pub(crate) key: String,
}

impl ObjectName {
    pub(crate) fn new(tenant: &str, key: &str) -> Self {
        Self { tenant: tenant.to_owned(), key: key.to_owned() }
    }
}

/// A copy or move in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReplicaTransfer {
    /// The client that performs the transfer.
    pub(crate) client: Uuid,
    /// Id of the source replica.
    pub(crate) source: u64,
    /// Whether the source is removed at the end.
    pub(crate) is_move: bool,
    pub(crate) since_ms: u64,
    /// Lease of the dynamic replication plan, if the master planned it.
    pub(crate) lease: Option<DynamicReplicationLease>,
}

/// A new version of an object that is being written while the current one is readable.
#[derive(Debug)]
pub(crate) struct PendingVersion {
    pub(crate) client: Uuid,
    pub(crate) size: u64,
    /// When the put of this version started.
    pub(crate) since_ms: u64,
    pub(crate) replicas: Vec<MemoryReplica>,
    pub(crate) hard_pin: bool,
    pub(crate) soft_pin_until_ms: Option<u64>,
    pub(crate) group: Option<(GroupId, Box<str>)>,
}

impl PendingVersion {
    /// Total bytes of all replicas.
    pub(crate) fn bytes(&self) -> u64 {
        self.size.saturating_mul(self.replicas.len() as u64)
    }
}

/// Rarely used fields of an object, allocated on demand.
#[derive(Debug, Default)]
pub(crate) struct ObjectExtras {
    /// Memory replicas after the first one.
    pub(crate) more: Vec<MemoryReplica>,
    pub(crate) checksum: Option<u64>,
    pub(crate) soft_pin_until_ms: Option<u64>,
    pub(crate) transfer: Option<ReplicaTransfer>,
    pub(crate) copy: Option<DiskCopy>,
    pub(crate) work: Option<Box<ActiveDiskTask>>,
    pub(crate) pending: Option<Box<PendingVersion>>,
    pub(crate) writer: Option<Uuid>,
}

#[derive(Debug, Default)]
pub(crate) struct ObjectEntry {
    pub(crate) key: StoredKey,
    /// The client that wrote it; [`ObjectExtras::writer`] if the shard's table has no slot for it.
    pub(crate) writer: WriterIndex,
    pub(crate) size: u64,
    /// While it is written, when the put started; once it is readable, when its lease expires or expired.
    pub(crate) stamp: u64,
    /// The first memory replica; its segment is `NONE` if there is none.
    pub(crate) first: MemoryReplica,
    pub(crate) extra: Option<Box<ObjectExtras>>,
    pub(crate) group: GroupIndex,
    pub(crate) previous: EntryIndex,
    pub(crate) next: EntryIndex,
    pub(crate) tenant: TenantIndex,
    pub(crate) prefix: PrefixIndex,
    pub(crate) flags: EntryFlags,
}

/// Eviction queue and hard pin in one byte: the number of the queue, or one of two others for hard-pinned objects, which are either
/// being written or unlisted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EntryFlags(u8);

const HARD_PINNED_WRITING: u8 = u8::MAX - 1;
const HARD_PINNED_UNLISTED: u8 = u8::MAX;

const _: () = assert!(EvictionQueue::COUNT <= HARD_PINNED_WRITING as usize, "a queue's number has one byte");

impl EntryFlags {
    pub(crate) fn new(queue: EvictionQueue, hard_pin: bool) -> Self {
        debug_assert!(!hard_pin || matches!(queue, EvictionQueue::Writing | EvictionQueue::Unlisted));
        Self(match queue {
            EvictionQueue::Writing if hard_pin => HARD_PINNED_WRITING,
            _ if hard_pin => HARD_PINNED_UNLISTED,
            _ => queue.number().0,
        })
    }
}

impl ObjectEntry {
    pub(crate) fn queue(&self) -> EvictionQueue {
        self.queue_number().queue()
    }

    pub(crate) fn queue_number(&self) -> QueueNumber {
        match self.flags.0 {
            HARD_PINNED_WRITING => QueueNumber::WRITING,
            HARD_PINNED_UNLISTED => QueueNumber::UNLISTED,
            number => QueueNumber(number),
        }
    }

    pub(crate) fn set_queue(&mut self, queue: EvictionQueue) {
        self.flags = EntryFlags::new(queue, self.hard_pin());
    }

    pub(crate) fn hard_pin(&self) -> bool {
        self.flags.0 >= HARD_PINNED_WRITING
    }

    /// Whether the put has ended.
    pub(crate) fn is_complete(&self) -> bool {
        !matches!(self.queue_number(), QueueNumber::VACANT | QueueNumber::WRITING)
    }

    /// Whether a reader has an unexpired lease.
    pub(crate) fn is_leased(&self, now_ms: u64) -> bool {
        self.is_complete() && self.stamp > now_ms
    }

    /// Whether it has a memory replica, readable or not.
    pub(crate) fn has_memory(&self) -> bool {
        self.first.segment != SegmentIndex::NONE
    }

    /// All memory replicas, readable or not.
    pub(crate) fn replicas(&self) -> impl Iterator<Item = &MemoryReplica> {
        let first = self.has_memory().then_some(&self.first);
        first.into_iter().chain(self.extra.iter().flat_map(|extra| &extra.more))
    }

    pub(crate) fn replicas_mut(&mut self) -> impl Iterator<Item = &mut MemoryReplica> {
        let first = self.has_memory().then_some(&mut self.first);
        first.into_iter().chain(self.extra.iter_mut().flat_map(|extra| &mut extra.more))
    }

    /// Replaces all memory replicas by these.
    pub(crate) fn set_replicas(&mut self, replicas: &[MemoryReplica]) {
        let none = (&MemoryReplica::default(), &[][..]);
        let (first, more) = replicas.split_first().unwrap_or(none);
        self.first = *first;
        if !more.is_empty() || self.extra.is_some() {
            self.extra_mut().more = more.to_vec();
        }
        self.drop_empty_extras();
    }

    pub(crate) fn extra_mut(&mut self) -> &mut ObjectExtras {
        self.extra.get_or_insert_default()
    }

    pub(crate) fn transfer(&self) -> Option<&ReplicaTransfer> {
        self.extra.as_ref()?.transfer.as_ref()
    }

    /// The copy on a node's disk.
    pub(crate) fn copy(&self) -> Option<&DiskCopy> {
        self.extra.as_ref()?.copy.as_ref()
    }

    /// The active offload or promotion.
    pub(crate) fn work(&self) -> Option<&ActiveDiskTask> {
        self.extra.as_ref()?.work.as_deref()
    }

    /// The new version that is currently being written.
    pub(crate) fn pending(&self) -> Option<&PendingVersion> {
        self.extra.as_ref()?.pending.as_deref()
    }

    pub(crate) fn checksum(&self) -> Option<u64> {
        self.extra.as_ref()?.checksum
    }

    pub(crate) fn soft_pin_until_ms(&self) -> Option<u64> {
        self.extra.as_ref()?.soft_pin_until_ms
    }

    /// Frees `extra` if all of its fields are empty.
    pub(crate) fn drop_empty_extras(&mut self) {
        let is_idle = |extra: &ObjectExtras| {
            extra.more.is_empty()
                && extra.checksum.is_none()
                && extra.soft_pin_until_ms.is_none()
                && extra.transfer.is_none()
                && extra.copy.is_none()
                && extra.work.is_none()
                && extra.pending.is_none()
                && extra.writer.is_none()
        };
        if self.extra.as_deref().is_some_and(is_idle) {
            self.extra = None;
        }
    }

    /// The queue that a completely written object belongs to.
    pub(crate) fn target_queue(&self, now_ms: u64) -> EvictionQueue {
        let is_busy = self.transfer().is_some() || self.work().is_some() || self.pending().is_some();
        if self.hard_pin() || is_busy || !self.has_memory() {
            EvictionQueue::Unlisted
        } else if self.soft_pin_until_ms().is_some_and(|until| until > now_ms) {
            EvictionQueue::SoftPinned
        } else if self.stamp > now_ms {
            EvictionQueue::Leased(self.queue().class())
        } else {
            EvictionQueue::Unread(self.queue().class())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A master holds millions of entries, so each byte counts.
    #[test]
    fn an_entry_takes_72_bytes() {
        assert_eq!(size_of::<ObjectEntry>(), 72);
    }

    #[test]
    fn flags_hold_every_queue_and_hard_pins() {
        let entry =
            |queue, hard_pin| ObjectEntry { flags: EntryFlags::new(queue, hard_pin), ..Default::default() };
        let classless = [
            EvictionQueue::Vacant,
            EvictionQueue::Unlisted,
            EvictionQueue::Writing,
            EvictionQueue::SoftPinned,
        ];
        for queue in classless.into_iter().chain(EvictionQueue::unpinned()) {
            let entry = entry(queue, false);
            assert_eq!((entry.queue(), entry.hard_pin()), (queue, false));
        }
        let mut pinned = entry(EvictionQueue::Writing, true);
        assert_eq!((pinned.queue(), pinned.hard_pin()), (EvictionQueue::Writing, true));
        pinned.set_queue(EvictionQueue::Unlisted);
        assert_eq!((pinned.queue(), pinned.hard_pin()), (EvictionQueue::Unlisted, true));
    }
}
