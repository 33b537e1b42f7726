//! The segment's identity, updated atomically: two copies, of which the newest valid one counts.

use std::io;

use super::LedgerError;
use crate::checksum::Crc32c;
use crate::region::{MappedRegion, OutOfRangeError};

/// Maximum length of a segment name in bytes.
pub const MAX_NAME: usize = 1024;
const COPY: usize = 2048;
const MAGIC: &[u8; 8] = b"moonseg\0";
const VERSION: u32 = 1;
/// Offsets of the name, of whether peers write directly, and of the checksum.
const NAME: usize = 88;
const DIRECT_WRITES: usize = NAME + MAX_NAME;
const SEAL: usize = COPY - 4;

/// Identity of a segment at the master and its clients.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SegmentIdentity {
    /// Segment id of the master, as two words.
    pub segment: [u64; 2],
    /// Id of the client that mounted the segment.
    pub client: [u64; 2],
    /// Name of the segment at the master.
    pub name: String,
    /// Advertised address of the first byte.
    pub base: u64,
    /// Length of the segment in bytes.
    pub size: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LedgerHeader {
    /// Incremented with each change: the highest is the newest.
    pub(super) generation: u64,
    /// Boot id of the machine when it was written.
    pub(super) boot: u128,
    /// Whether peers write to the memory directly. Releases that lack this field wrote 0.
    pub(super) direct_writes: bool,
    pub(super) identity: SegmentIdentity,
}

impl LedgerHeader {
    /// Reads the newest valid copy.
    pub(super) fn read(memory: &MappedRegion) -> Result<Option<Self>, OutOfRangeError> {
        let mut newest: Option<Self> = None;
        for copy in 0..2 {
            let mut bytes = [0; COPY];
            memory.read_at(copy * COPY as u64, &mut bytes)?;
            let header = Self::decode(&bytes);
            if header.is_none() && bytes.iter().any(|&byte| byte != 0) {
                tracing::warn!("copy {copy} of a segment header is corrupt, or from another release");
            }
            newest = newest.into_iter().chain(header).max_by_key(|header| header.generation);
        }
        Ok(newest)
    }

    /// Overwrites the older copy.
    pub(super) fn write(&self, memory: &MappedRegion) -> Result<(), LedgerError> {
        let bytes = self.encode()?;
        memory.write_at((self.generation % 2) * COPY as u64, &bytes)?;
        Ok(())
    }

    pub(super) fn erase(memory: &MappedRegion) -> Result<(), OutOfRangeError> {
        memory.write_at(0, &[0; 2 * COPY])
    }

    fn encode(&self) -> Result<[u8; COPY], LedgerError> {
        let SegmentIdentity { segment, client, name, base, size } = &self.identity;
        if name.len() > MAX_NAME {
            return Err(LedgerError::Name(name.len()));
        }
        let mut bytes = Vec::with_capacity(COPY);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((name.len() as u32).to_le_bytes());
        for word in [self.generation, *size, *base, segment[0], segment[1], client[0], client[1]] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.boot.to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.resize(DIRECT_WRITES, 0);
        bytes.push(self.direct_writes.into());
        bytes.resize(SEAL, 0);
        bytes.extend(Crc32c::of(&bytes).to_le_bytes());
        <[u8; COPY]>::try_from(bytes).map_err(|_| LedgerError::Io(io::ErrorKind::InvalidData.into()))
    }

    fn decode(bytes: &[u8; COPY]) -> Option<Self> {
        let (body, seal) = bytes.split_at_checked(SEAL)?;
        if Crc32c::of(body).to_le_bytes() != seal || body.get(..8)? != MAGIC {
            return None;
        }
        let number = |offset: usize| Some(u32::from_le_bytes(body.get(offset..offset + 4)?.try_into().ok()?));
        let word = |offset: usize| Some(u64::from_le_bytes(body.get(offset..offset + 8)?.try_into().ok()?));
        if number(8)? != VERSION {
            return None;
        }
        let name = body.get(NAME..)?.get(..usize::try_from(number(12)?).ok()?)?;
        Some(Self {
            generation: word(16)?,
            boot: u128::from_le_bytes(body.get(72..NAME)?.try_into().ok()?),
            direct_writes: *body.get(DIRECT_WRITES)? != 0,
            identity: SegmentIdentity {
                size: word(24)?,
                base: word(32)?,
                segment: [word(40)?, word(48)?],
                client: [word(56)?, word(64)?],
                name: String::from_utf8(name.to_vec()).ok()?,
            },
        })
    }
}

/// Boot id of the machine; 0 if unavailable.
pub(super) fn boot() -> u128 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageMode;

    fn header(generation: u64) -> LedgerHeader {
        let identity = SegmentIdentity {
            segment: [1, 2],
            client: [3, u64::MAX],
            name: "10.0.0.7:12345".to_owned(),
            base: 0x1234_5000,
            size: 1 << 30,
        };
        LedgerHeader { generation, boot: boot(), direct_writes: generation % 2 == 1, identity }
    }

    #[test]
    fn the_newest_valid_copy_counts() {
        let memory = MappedRegion::anonymous(4096, PageMode::Normal).unwrap();
        assert_eq!(LedgerHeader::read(&memory).unwrap(), None);
        for generation in 1..5 {
            header(generation).write(&memory).unwrap();
            assert_eq!(LedgerHeader::read(&memory).unwrap(), Some(header(generation)));
        }
        // An interrupted change leaves the previous one in effect.
        let next = header(5).encode().unwrap();
        for written in [1, 20, 100, 2047] {
            memory.write_at(COPY as u64, &next[..written]).unwrap();
            assert_eq!(LedgerHeader::read(&memory).unwrap(), Some(header(4)), "{written} bytes of the next");
        }
        LedgerHeader::erase(&memory).unwrap();
        assert_eq!(LedgerHeader::read(&memory).unwrap(), None);
    }

    #[test]
    fn any_flipped_bit_is_detected() {
        let good = header(1).encode().unwrap();
        assert_eq!(LedgerHeader::decode(&good), Some(header(1)));
        for bit in (0..COPY * 8).step_by(if cfg!(miri) { 997 } else { 1 }) {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(LedgerHeader::decode(&bad), None, "bit {bit}");
        }
    }

    #[test]
    fn long_names_are_rejected() {
        let long = |len| LedgerHeader {
            identity: SegmentIdentity { name: "n".repeat(len), ..SegmentIdentity::default() },
            ..header(1)
        };
        assert_eq!(LedgerHeader::decode(&long(MAX_NAME).encode().unwrap()), Some(long(MAX_NAME)));
        assert!(long(MAX_NAME + 1).encode().is_err());
    }

    #[test]
    fn the_boot_id_is_available_and_stable() {
        assert_ne!(boot(), 0);
        assert_eq!(boot(), boot());
    }
}
