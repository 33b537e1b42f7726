//! An object as the table keeps it: one entry of 96 bytes and its key.

use mooncake_wire::types::{ReplicaStatus, Uuid};

use crate::slab::NIL;

/// In which list an entry is. The order of eviction is that of the lists `Unread` and `Leased`, then `Soft`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Queue {
    /// There is no entry here.
    #[default]
    Vacant,
    /// In none: pinned hard, or being copied.
    Apart,
    /// Being written, by when that began.
    Writing,
    /// Not read yet, by when it was written.
    Unread,
    /// Read, by when the last lease ends or ended.
    Leased,
    /// Pinned softly.
    Soft,
}

/// One copy in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Replica {
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

impl Default for Replica {
    fn default() -> Self {
        Self { id: 0, offset: 0, block: NIL, segment: u16::MAX, ready: false }
    }
}

impl Replica {
    pub(crate) fn status(self) -> ReplicaStatus {
        if self.ready { ReplicaStatus::COMPLETE } else { ReplicaStatus::PROCESSING }
    }
}

/// A copy or a move that goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// Who does it.
    pub(crate) client: Uuid,
    /// The replica that is read.
    pub(crate) source: u64,
    /// Whether the source goes away at the end.
    pub(crate) moves: bool,
    /// When it began.
    pub(crate) since_ms: u64,
    /// Of the master's plan, if it is the master's.
    pub(crate) plan: Option<(Uuid, u64)>,
}

/// What few objects have.
#[derive(Debug, Default)]
pub(crate) struct Extra {
    /// Replicas after the first.
    pub(crate) more: Vec<Replica>,
    pub(crate) checksum: Option<u64>,
    pub(crate) soft_pin_until_ms: Option<u64>,
    pub(crate) transfer: Option<Transfer>,
}

/// An object.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    pub(crate) key: Box<str>,
    pub(crate) client: Uuid,
    pub(crate) size: u64,
    /// When the writing began; once it can be read, when its lease ends or ended.
    pub(crate) stamp: u64,
    pub(crate) first: Replica,
    pub(crate) extra: Option<Box<Extra>>,
    pub(crate) group: u32,
    pub(crate) before: u32,
    pub(crate) after: u32,
    pub(crate) tenant: u16,
    pub(crate) prefix: u8,
    /// See [`Entry::queue`] and [`Entry::hard_pin`].
    pub(crate) state: State,
}

/// List and hard pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct State(u8);

const HARD_PIN: u8 = 0x80;

impl State {
    pub(crate) fn new(queue: Queue, hard_pin: bool) -> Self {
        Self(queue as u8 | if hard_pin { HARD_PIN } else { 0 })
    }
}

impl Entry {
    pub(crate) fn queue(&self) -> Queue {
        match self.state.0 & !HARD_PIN {
            1 => Queue::Apart,
            2 => Queue::Writing,
            3 => Queue::Unread,
            4 => Queue::Leased,
            5 => Queue::Soft,
            _ => Queue::Vacant,
        }
    }

    pub(crate) fn set_queue(&mut self, queue: Queue) {
        self.state = State::new(queue, self.hard_pin());
    }

    pub(crate) fn hard_pin(&self) -> bool {
        self.state.0 & HARD_PIN != 0
    }

    /// Whether it has been written.
    pub(crate) fn is_complete(&self) -> bool {
        !matches!(self.queue(), Queue::Vacant | Queue::Writing)
    }

    /// Whether a reader may be reading it.
    pub(crate) fn is_leased(&self, now_ms: u64) -> bool {
        self.is_complete() && self.stamp > now_ms
    }

    pub(crate) fn replicas(&self) -> impl Iterator<Item = &Replica> {
        std::iter::once(&self.first).chain(self.extra.iter().flat_map(|extra| &extra.more))
    }

    pub(crate) fn replicas_mut(&mut self) -> impl Iterator<Item = &mut Replica> {
        std::iter::once(&mut self.first).chain(self.extra.iter_mut().flat_map(|extra| &mut extra.more))
    }

    /// Replaces all replicas; the list is not empty.
    pub(crate) fn set_replicas(&mut self, replicas: &[Replica]) {
        let Some((first, more)) = replicas.split_first() else { return };
        self.first = *first;
        if !more.is_empty() || self.extra.is_some() {
            self.extra_mut().more = more.to_vec();
        }
        self.tidy();
    }

    pub(crate) fn extra_mut(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }

    pub(crate) fn transfer(&self) -> Option<&Transfer> {
        self.extra.as_ref()?.transfer.as_ref()
    }

    pub(crate) fn checksum(&self) -> Option<u64> {
        self.extra.as_ref()?.checksum
    }

    pub(crate) fn soft_pin_until_ms(&self) -> Option<u64> {
        self.extra.as_ref()?.soft_pin_until_ms
    }

    /// Gives back the memory of what it no longer has.
    pub(crate) fn tidy(&mut self) {
        let is_idle = |it: &Extra| {
            it.more.is_empty()
                && it.checksum.is_none()
                && it.soft_pin_until_ms.is_none()
                && it.transfer.is_none()
        };
        if self.extra.as_deref().is_some_and(is_idle) {
            self.extra = None;
        }
    }

    /// The list for an object that has been written.
    pub(crate) fn fitting_queue(&self, now_ms: u64) -> Queue {
        if self.hard_pin() || self.transfer().is_some() {
            Queue::Apart
        } else if self.soft_pin_until_ms().is_some_and(|until| until > now_ms) {
            Queue::Soft
        } else if self.stamp > now_ms {
            Queue::Leased
        } else {
            Queue::Unread
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A million objects are worth counting bytes for.
    #[test]
    fn an_entry_is_small() {
        assert_eq!(size_of::<Entry>(), 96);
    }
}
