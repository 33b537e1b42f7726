//! An object as the table keeps it: one entry of 96 bytes and its key.

use mooncake_wire::types::{ReplicaStatus, Uuid};

use crate::disk::{ActiveDiskTask, DiskCopy};
use crate::group::GroupId;
use crate::slab::NIL;

/// In which list an entry is. The order of eviction is that of the lists `Unread` and `Leased`, then `Soft`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum EvictionQueue {
    /// There is no entry here.
    #[default]
    Vacant,
    /// In none: pinned hard, being copied or moved to or from a disk, or not in memory.
    Unlisted,
    /// Being written, by when that began.
    Writing,
    /// Not read yet, by when it was written.
    Unread,
    /// Read, by when the last lease ends or ended.
    Leased,
    /// Pinned softly.
    SoftPinned,
}

/// One copy in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryReplica {
    /// Unique within a master.
    pub(crate) id: u64,
    /// Where it begins in its segment.
    pub(crate) offset: u64,
    /// By which its space is given back.
    pub(crate) block: u32,
    /// Which segment.
    pub(crate) segment: u16,
    /// Whether it can be read, or is being written by a copy.
    pub(crate) ready: bool,
}

/// The place of no segment.
const NO_SEGMENT: u16 = u16::MAX;

impl Default for MemoryReplica {
    fn default() -> Self {
        Self { id: 0, offset: 0, block: NIL, segment: NO_SEGMENT, ready: false }
    }
}

impl MemoryReplica {
    pub(crate) fn status(self) -> ReplicaStatus {
        if self.ready { ReplicaStatus::COMPLETE } else { ReplicaStatus::PROCESSING }
    }
}

/// A copy or a move that goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReplicaTransfer {
    /// Who does it.
    pub(crate) client: Uuid,
    /// The replica that is read.
    pub(crate) source: u64,
    /// Whether the source goes away at the end.
    pub(crate) is_move: bool,
    /// When it began.
    pub(crate) since_ms: u64,
    /// Of the master's plan, if it is the master's.
    pub(crate) lease: Option<(Uuid, u64)>,
}

/// A new version of an object that is being written while the present one can be read.
#[derive(Debug)]
pub(crate) struct PendingVersion {
    pub(crate) client: Uuid,
    pub(crate) size: u64,
    /// When the writing began.
    pub(crate) since_ms: u64,
    pub(crate) replicas: Vec<MemoryReplica>,
    pub(crate) hard_pin: bool,
    pub(crate) soft_pin_until_ms: Option<u64>,
    pub(crate) group: Option<(GroupId, Box<str>)>,
}

impl PendingVersion {
    /// Bytes, all replicas counted.
    pub(crate) fn bytes(&self) -> u64 {
        self.size.saturating_mul(self.replicas.len() as u64)
    }
}

/// What few objects have.
#[derive(Debug, Default)]
pub(crate) struct ObjectExtras {
    /// Replicas after the first.
    pub(crate) more: Vec<MemoryReplica>,
    pub(crate) checksum: Option<u64>,
    pub(crate) soft_pin_until_ms: Option<u64>,
    pub(crate) transfer: Option<ReplicaTransfer>,
    pub(crate) copy: Option<DiskCopy>,
    pub(crate) work: Option<Box<ActiveDiskTask>>,
    pub(crate) pending: Option<Box<PendingVersion>>,
}

/// An object.
#[derive(Debug, Default)]
pub(crate) struct ObjectEntry {
    pub(crate) key: Box<str>,
    pub(crate) client: Uuid,
    pub(crate) size: u64,
    /// When the writing began; once it can be read, when its lease ends or ended.
    pub(crate) stamp: u64,
    /// The first replica in memory, or one on no segment if there is none.
    pub(crate) first: MemoryReplica,
    pub(crate) extra: Option<Box<ObjectExtras>>,
    pub(crate) group: u32,
    pub(crate) previous: u32,
    pub(crate) next: u32,
    pub(crate) tenant: u16,
    pub(crate) prefix: u8,
    /// See [`ObjectEntry::queue`] and [`ObjectEntry::hard_pin`].
    pub(crate) flags: EntryFlags,
}

/// List and hard pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EntryFlags(u8);

const HARD_PIN: u8 = 0x80;

impl EntryFlags {
    pub(crate) fn new(queue: EvictionQueue, hard_pin: bool) -> Self {
        Self(queue as u8 | if hard_pin { HARD_PIN } else { 0 })
    }
}

impl ObjectEntry {
    pub(crate) fn queue(&self) -> EvictionQueue {
        match self.flags.0 & !HARD_PIN {
            1 => EvictionQueue::Unlisted,
            2 => EvictionQueue::Writing,
            3 => EvictionQueue::Unread,
            4 => EvictionQueue::Leased,
            5 => EvictionQueue::SoftPinned,
            _ => EvictionQueue::Vacant,
        }
    }

    pub(crate) fn set_queue(&mut self, queue: EvictionQueue) {
        self.flags = EntryFlags::new(queue, self.hard_pin());
    }

    pub(crate) fn hard_pin(&self) -> bool {
        self.flags.0 & HARD_PIN != 0
    }

    /// Whether it has been written.
    pub(crate) fn is_complete(&self) -> bool {
        !matches!(self.queue(), EvictionQueue::Vacant | EvictionQueue::Writing)
    }

    /// Whether a reader may be reading it.
    pub(crate) fn is_leased(&self, now_ms: u64) -> bool {
        self.is_complete() && self.stamp > now_ms
    }

    /// Whether there is a replica in memory, readable or not.
    pub(crate) fn has_memory(&self) -> bool {
        self.first.segment != NO_SEGMENT
    }

    /// The replicas in memory.
    pub(crate) fn replicas(&self) -> impl Iterator<Item = &MemoryReplica> {
        let first = self.has_memory().then_some(&self.first);
        first.into_iter().chain(self.extra.iter().flat_map(|extra| &extra.more))
    }

    pub(crate) fn replicas_mut(&mut self) -> impl Iterator<Item = &mut MemoryReplica> {
        let first = self.has_memory().then_some(&mut self.first);
        first.into_iter().chain(self.extra.iter_mut().flat_map(|extra| &mut extra.more))
    }

    /// Replaces all replicas in memory.
    pub(crate) fn set_replicas(&mut self, replicas: &[MemoryReplica]) {
        let nowhere = (&MemoryReplica::default(), &[][..]);
        let (first, more) = replicas.split_first().unwrap_or(nowhere);
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

    /// The copy on a disk.
    pub(crate) fn copy(&self) -> Option<&DiskCopy> {
        self.extra.as_ref()?.copy.as_ref()
    }

    /// What is being done about it between memory and disk.
    pub(crate) fn work(&self) -> Option<&ActiveDiskTask> {
        self.extra.as_ref()?.work.as_deref()
    }

    /// The new version that is being written.
    pub(crate) fn pending(&self) -> Option<&PendingVersion> {
        self.extra.as_ref()?.pending.as_deref()
    }

    pub(crate) fn checksum(&self) -> Option<u64> {
        self.extra.as_ref()?.checksum
    }

    pub(crate) fn soft_pin_until_ms(&self) -> Option<u64> {
        self.extra.as_ref()?.soft_pin_until_ms
    }

    /// Gives back the memory of what it no longer has.
    pub(crate) fn drop_empty_extras(&mut self) {
        let is_idle = |it: &ObjectExtras| {
            it.more.is_empty()
                && it.checksum.is_none()
                && it.soft_pin_until_ms.is_none()
                && it.transfer.is_none()
                && it.copy.is_none()
                && it.work.is_none()
                && it.pending.is_none()
        };
        if self.extra.as_deref().is_some_and(is_idle) {
            self.extra = None;
        }
    }

    /// The list for an object that has been written.
    pub(crate) fn target_queue(&self, now_ms: u64) -> EvictionQueue {
        let is_busy = self.transfer().is_some() || self.work().is_some() || self.pending().is_some();
        if self.hard_pin() || is_busy || !self.has_memory() {
            EvictionQueue::Unlisted
        } else if self.soft_pin_until_ms().is_some_and(|until| until > now_ms) {
            EvictionQueue::SoftPinned
        } else if self.stamp > now_ms {
            EvictionQueue::Leased
        } else {
            EvictionQueue::Unread
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A million objects are worth counting bytes for.
    #[test]
    fn an_entry_is_small() {
        assert_eq!(size_of::<ObjectEntry>(), 96);
    }
}
