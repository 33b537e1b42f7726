//! Entries in shared memory. A slot has four words; the first is its seal, so a single store creates or removes an entry.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::HEADERS;
use crate::checksum::Crc32c;
use crate::region::MappedRegion;

/// Bytes per slot (four words).
pub(super) const SLOT: u64 = 32;
/// Lower half of a seal; the upper half is a checksum. So a seal is never 0, the value of a free slot.
const MARK: u64 = 0x6d6f_6f6e;

/// A range of the region with its CRC-32C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LedgerRecord {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) crc: u32,
}

impl LedgerRecord {
    pub(super) fn lies_in(&self, size: u64) -> bool {
        self.len > 0 && self.offset.checked_add(self.len).is_some_and(|end| end <= size)
    }

    fn words(&self) -> [u64; 3] {
        [self.offset, self.len, u64::from(self.crc)]
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum LedgerSlot {
    Free,
    Valid(LedgerRecord),
    /// Corrupt: a killed process never leaves such a slot.
    Damaged,
}

#[derive(Debug)]
pub(super) struct LedgerTable {
    pub(super) memory: MappedRegion,
    slots: u64,
}

impl LedgerTable {
    /// `memory` must hold the headers and `slots` slots.
    pub(super) fn new(memory: MappedRegion, slots: u64) -> Self {
        Self { memory, slots }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.slots
    }

    /// Slots that may be non-zero.
    pub(super) fn touched(&self, memory: &File) -> impl Iterator<Item = u64> + use<> {
        touched_slots(memory, HEADERS, SLOT, self.slots)
    }

    fn word(&self, slot: u64, word: u64) -> Option<&AtomicU64> {
        self.memory.word(HEADERS + slot * SLOT + word * 8).ok()
    }

    pub(super) fn read(&self, slot: u64) -> LedgerSlot {
        let load = |word| self.word(slot, word).map(|word| word.load(Ordering::Acquire));
        let (Some(stored), Some(offset), Some(len), Some(crc)) = (load(0), load(1), load(2), load(3)) else {
            return LedgerSlot::Damaged;
        };
        if stored == 0 {
            return LedgerSlot::Free;
        }
        let Ok(crc) = u32::try_from(crc) else { return LedgerSlot::Damaged };
        let record = LedgerRecord { offset, len, crc };
        if stored == seal(slot, &record) { LedgerSlot::Valid(record) } else { LedgerSlot::Damaged }
    }

    /// Writes a record into a free slot.
    pub(super) fn publish(&self, slot: u64, record: LedgerRecord) {
        for (word, value) in steps(slot, &record) {
            if let Some(word) = self.word(slot, word) {
                word.store(value, Ordering::Release);
                // Neither the compiler nor the processor may reorder these stores.
                fence(Ordering::SeqCst);
            }
        }
    }

    pub(super) fn clear(&self, slot: u64) {
        if let Some(word) = self.word(slot, 0) {
            word.store(0, Ordering::Release);
        }
    }
}

/// Slots of `slot` bytes after `headers` bytes that may be non-zero, as reported by the file system (`SEEK_DATA`): even reading another
/// slot would allocate memory for it.
pub(crate) fn touched_slots(
    memory: &File,
    headers: u64,
    slot: u64,
    slots: u64,
) -> impl Iterator<Item = u64> + use<> {
    let end = headers + slots * slot;
    let mut parts = Vec::new();
    let mut position = headers;
    while position < end {
        let from = match seek(memory, SeekFrom::Data(position)) {
            Ok(from) => from,
            // No data after this position.
            Err(Errno::NXIO) => break,
            // The file system does not support it.
            Err(_) => position,
        };
        let hole = seek(memory, SeekFrom::Hole(from)).ok();
        let to = hole.filter(|hole| *hole > from).unwrap_or(end).min(end);
        parts.push((from - headers) / slot..to.saturating_sub(headers).div_ceil(slot).min(slots));
        position = to;
    }
    parts.into_iter().flatten()
}

/// The stores that write an entry, in order: the seal is last.
fn steps(slot: u64, record: &LedgerRecord) -> [(u64, u64); 4] {
    let [offset, len, crc] = record.words();
    [(1, offset), (2, len), (3, crc), (0, seal(slot, record))]
}

fn seal(slot: u64, record: &LedgerRecord) -> u64 {
    let mut crc = Crc32c::new();
    crc.update(&slot.to_le_bytes());
    for word in record.words() {
        crc.update(&word.to_le_bytes());
    }
    u64::from(crc.value()) << 32 | MARK
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageMode;

    fn table() -> LedgerTable {
        LedgerTable::new(MappedRegion::anonymous(HEADERS + 4 * SLOT, PageMode::Normal).unwrap(), 4)
    }

    const FIRST: LedgerRecord = LedgerRecord { offset: 4096, len: 100, crc: 7 };
    const SECOND: LedgerRecord = LedgerRecord { offset: 8192, len: u64::MAX >> 20, crc: u32::MAX };

    #[test]
    fn a_published_record_is_read_back() {
        let table = table();
        assert_eq!(table.read(3), LedgerSlot::Free);
        table.publish(3, SECOND);
        assert_eq!(table.read(3), LedgerSlot::Valid(SECOND));
        assert_eq!(table.read(2), LedgerSlot::Free);
        table.clear(3);
        assert_eq!(table.read(3), LedgerSlot::Free);
        assert_eq!(table.read(4), LedgerSlot::Damaged, "slot out of range");
    }

    #[test]
    fn an_entry_interrupted_between_any_two_stores_is_absent() {
        for before in [None, Some(FIRST)] {
            let table = table();
            if let Some(before) = before {
                table.publish(1, before);
                table.clear(1);
            }
            for (done, (word, value)) in steps(1, &SECOND).into_iter().enumerate() {
                assert_eq!(table.read(1), LedgerSlot::Free, "after {done} stores");
                table.word(1, word).unwrap().store(value, Ordering::Release);
            }
            assert_eq!(table.read(1), LedgerSlot::Valid(SECOND));
        }
    }

    #[test]
    fn any_flipped_bit_is_detected() {
        let table = table();
        let bits = || (0..64).step_by(if cfg!(miri) { 13 } else { 1 });
        for (word, bit) in (0..4).flat_map(|word| bits().map(move |bit| (word, bit))) {
            table.publish(2, FIRST);
            table.word(2, word).unwrap().fetch_xor(1 << bit, Ordering::AcqRel);
            assert_eq!(table.read(2), LedgerSlot::Damaged, "bit {bit} of word {word}");
            table.clear(2);
        }
        // A slot's bytes copied into another slot are not an entry.
        table.publish(0, FIRST);
        for word in 0..4 {
            let value = table.word(0, word).unwrap().load(Ordering::Acquire);
            table.word(1, word).unwrap().store(value, Ordering::Release);
        }
        assert_eq!(table.read(1), LedgerSlot::Damaged);
    }
}
