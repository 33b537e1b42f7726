//! CRC-32C (Castagnoli), as iSCSI and most storage systems use it.

use crc_fast::{CrcAlgorithm, Digest};

/// An incremental CRC-32C computation.
#[derive(Debug)]
pub struct Crc32c(Digest);

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

impl Crc32c {
    /// The checksum of an empty input.
    #[must_use]
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// The checksum of a whole slice.
    #[must_use]
    pub fn of(bytes: &[u8]) -> u32 {
        crc_fast::crc32_iscsi(bytes)
    }

    /// Adds the next bytes to the checksum.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes added so far.
    #[must_use]
    pub fn value(&self) -> u32 {
        // The crate returns 64 bits for every width; CRC-32C is in the lower half.
        (self.0.finalize() & u64::from(u32::MAX)) as u32
    }
}

/// The checksum of a concatenation: `first` is the checksum of its first part, `last` that of its last `len` bytes.
pub(crate) fn combine(first: u32, last: u32, len: u64) -> u32 {
    let whole = crc_fast::checksum_combine(CrcAlgorithm::Crc32Iscsi, first.into(), last.into(), len);
    (whole & u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_published_check_values() {
        // The check value of the CRC catalogue, and two of RFC 3720 B.4.
        assert_eq!(Crc32c::of(b"123456789"), 0xe306_9283);
        assert_eq!(Crc32c::of(&[0; 32]), 0x8a91_36aa);
        assert_eq!(Crc32c::of(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(Crc32c::of(b""), 0);
    }

    #[test]
    fn checksums_of_parts_are_combined() {
        let bytes: Vec<u8> = (0..5000u32).map(|index| (index * 7) as u8).collect();
        for at in [0, 1, 2500, 5000] {
            let (first, last) = bytes.split_at(at);
            let whole = combine(Crc32c::of(first), Crc32c::of(last), last.len() as u64);
            assert_eq!(whole, Crc32c::of(&bytes), "split at {at}");
        }
    }

    #[test]
    fn incremental_updates_give_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..if cfg!(miri) { 2_000_u32 } else { 100_000 })
            .map(|index| (index * 7 + index / 251) as u8)
            .collect();
        for piece in [1, 7, 64, 4096, 70_001] {
            let mut crc = Crc32c::new();
            bytes.chunks(piece).for_each(|piece| crc.update(piece));
            assert_eq!(crc.value(), Crc32c::of(&bytes), "pieces of {piece} bytes");
        }
    }
}
