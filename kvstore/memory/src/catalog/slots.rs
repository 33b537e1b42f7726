//! Records in shared memory as chains of slots. The first slot's seal contains a checksum of the whole chain and is stored last, so a
//! record is either complete or absent.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::HEADER;
use crate::checksum::Crc32c;
use crate::region::MappedRegion;

/// Bytes of a slot: its seal, the next slot of the chain, and a part of the record.
pub(super) const SLOT: u64 = 64;
/// Record bytes per slot.
pub(super) const PAYLOAD: usize = 48;
/// Maximum number of slots of a record.
pub(super) const MAX_CHAIN: usize = 24;
/// Lower half of the seal of a chain's first slot; the upper half is a checksum.
const HEAD: u64 = 0x6f62_6a68;
/// Lower half of the seal of the other slots; the upper half is the first slot's number.
const TAIL: u64 = 0x6f62_6a74;
const MARK: u64 = 0xffff_ffff;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChainRead {
    Free,
    /// A slot within a chain, or left over from a partly cleared one, with the number of the chain's first slot.
    Tail(u32),
    Record {
        chain: Vec<u32>,
        payload: Vec<u8>,
    },
    /// Corrupt: a killed process never leaves such a slot.
    Damaged,
}

#[derive(Debug)]
pub(super) struct ObjectSlots {
    pub(super) memory: MappedRegion,
    pub(super) slots: u64,
}

impl ObjectSlots {
    fn word(&self, slot: u32, word: u64) -> Option<&AtomicU64> {
        self.memory.word(HEADER + u64::from(slot) * SLOT + word * 8).ok()
    }

    fn load(&self, slot: u32, word: u64) -> Option<u64> {
        self.word(slot, word).map(|word| word.load(Ordering::Acquire))
    }

    fn store(&self, slot: u32, word: u64, value: u64) {
        if let Some(word) = self.word(slot, word) {
            word.store(value, Ordering::Release);
        }
    }

    /// The stores that write a record, in order: the first slot's seal is last.
    pub(super) fn steps(chain: &[u32], payload: &[u8]) -> Vec<(u32, u64, u64)> {
        let Some(&head) = chain.first() else { return Vec::new() };
        let mut steps = Vec::with_capacity(chain.len() * 8);
        let mut crc = Crc32c::new();
        for (index, &slot) in chain.iter().enumerate() {
            let next = chain.get(index + 1).map_or(0, |next| u64::from(*next) + 1);
            let mut part = [0; PAYLOAD];
            for (byte, from) in part.iter_mut().zip(payload.iter().skip(index * PAYLOAD)) {
                *byte = *from;
            }
            let seal = (index > 0).then_some(u64::from(head) << 32 | TAIL);
            sum(&mut crc, slot, seal, next, &part);
            steps.extend(seal.map(|seal| (slot, 0, seal)));
            steps.push((slot, 1, next));
            let (words, _) = part.as_chunks::<8>();
            steps.extend((2..).zip(words).map(|(word, bytes)| (slot, word, u64::from_le_bytes(*bytes))));
        }
        steps.push((head, 0, u64::from(crc.value()) << 32 | HEAD));
        steps
    }

    pub(super) fn publish(&self, chain: &[u32], payload: &[u8]) {
        for (slot, word, value) in Self::steps(chain, payload) {
            self.store(slot, word, value);
            // Neither the compiler nor the processor may reorder these stores.
            fence(Ordering::SeqCst);
        }
    }

    /// Frees slots, the first one first.
    pub(super) fn clear(&self, chain: &[u32]) {
        for &slot in chain {
            self.store(slot, 0, 0);
            fence(Ordering::SeqCst);
        }
    }

    pub(super) fn read(&self, head: u32) -> ChainRead {
        let Some(seal) = self.load(head, 0) else { return ChainRead::Damaged };
        match seal & MARK {
            _ if seal == 0 => ChainRead::Free,
            TAIL => ChainRead::Tail((seal >> 32) as u32),
            HEAD => self.read_chain(head, seal).unwrap_or(ChainRead::Damaged),
            _ => ChainRead::Damaged,
        }
    }

    fn read_chain(&self, head: u32, seal: u64) -> Option<ChainRead> {
        let (mut chain, mut payload) = (Vec::with_capacity(2), Vec::with_capacity(2 * PAYLOAD));
        let (mut slot, mut crc) = (head, Crc32c::new());
        loop {
            let tail_seal = if chain.is_empty() { None } else { Some(self.load(slot, 0)?) };
            if tail_seal.is_some_and(|seal| seal != u64::from(head) << 32 | TAIL) {
                return None;
            }
            let next = self.load(slot, 1)?;
            let mut part = [0; PAYLOAD];
            for (word, bytes) in (2..).zip(part.as_chunks_mut::<8>().0) {
                *bytes = self.load(slot, word)?.to_le_bytes();
            }
            sum(&mut crc, slot, tail_seal, next, &part);
            chain.push(slot);
            payload.extend(part);
            let Some(following) = next.checked_sub(1) else { break };
            slot = u32::try_from(following).ok().filter(|_| following < self.slots)?;
            if chain.len() == MAX_CHAIN {
                return None;
            }
        }
        (u64::from(crc.value()) << 32 | HEAD == seal).then_some(ChainRead::Record { chain, payload })
    }
}

fn sum(crc: &mut Crc32c, slot: u32, seal: Option<u64>, next: u64, part: &[u8; PAYLOAD]) {
    crc.update(&slot.to_le_bytes());
    crc.update(&seal.unwrap_or(0).to_le_bytes());
    crc.update(&next.to_le_bytes());
    crc.update(part);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageMode;

    fn slots() -> ObjectSlots {
        ObjectSlots {
            memory: MappedRegion::anonymous(HEADER + 8 * SLOT, PageMode::Normal).unwrap(),
            slots: 8,
        }
    }

    fn payload(length: usize) -> Vec<u8> {
        let mut payload: Vec<u8> = (1..).take(length).collect();
        payload.resize(length.next_multiple_of(PAYLOAD), 0);
        payload
    }

    #[test]
    fn a_record_interrupted_between_any_two_stores_is_absent() {
        let (slots, payload) = (slots(), payload(100));
        let chain = [5, 1, 3];
        let steps = ObjectSlots::steps(&chain, &payload);
        for done in 0..steps.len() {
            chain.iter().for_each(|slot| slots.store(*slot, 0, 0));
            for (slot, word, value) in &steps[..done] {
                slots.store(*slot, *word, *value);
            }
            assert_eq!(slots.read(5), ChainRead::Free, "after {done} stores");
        }
        slots.publish(&chain, &payload);
        assert_eq!(slots.read(5), ChainRead::Record { chain: chain.to_vec(), payload });
        assert_eq!((slots.read(1), slots.read(0)), (ChainRead::Tail(5), ChainRead::Free));
        slots.store(5, 0, 0);
        assert_eq!((slots.read(5), slots.read(3)), (ChainRead::Free, ChainRead::Tail(5)));
    }

    #[test]
    fn any_flipped_bit_is_detected() {
        let (slots, payload) = (slots(), payload(60));
        let chain = [2, 6];
        slots.publish(&chain, &payload);
        let bits = || (0..512).step_by(if cfg!(miri) { 37 } else { 1 });
        for (slot, word, bit) in
            chain.iter().flat_map(|slot| bits().map(move |bit| (*slot, bit / 64, bit % 64)))
        {
            slots.word(slot, word).unwrap().fetch_xor(1 << bit, Ordering::AcqRel);
            assert_eq!(slots.read(2), ChainRead::Damaged, "bit {bit} of word {word} of slot {slot}");
            slots.word(slot, word).unwrap().fetch_xor(1 << bit, Ordering::AcqRel);
        }
        assert!(matches!(slots.read(2), ChainRead::Record { .. }));
    }

    #[test]
    fn a_cyclic_chain_is_damaged() {
        let slots = slots();
        slots.publish(&[0, 1], &payload(60));
        slots.store(1, 1, 2);
        assert_eq!(slots.read(0), ChainRead::Damaged);
    }
}
