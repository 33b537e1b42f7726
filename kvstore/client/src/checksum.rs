//! The end-to-end checksum of an object: computed by the writer, stored by the master, verified by readers.
//!
//! It is CRC-64/ECMA-182, as Mooncake's own clients compute it when `MOONCAKE_STORE_CHECKSUM` is set.

use crc_fast::{CrcAlgorithm, Digest};

/// Computes the checksum of a whole object, which is in several ranges of memory.
pub(crate) fn checksum(ranges: &[&[u8]]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Ecma182);
    ranges.iter().for_each(|range| digest.update(range));
    digest.finalize()
}

/// An incremental checksum; does nothing if checksums are off.
#[derive(Debug)]
pub(crate) struct RunningChecksum(Option<Digest>);

impl RunningChecksum {
    pub(crate) fn new(is_enabled: bool) -> Self {
        Self(is_enabled.then(|| Digest::new(CrcAlgorithm::Crc64Ecma182)))
    }

    /// Resets the checksum before a retry.
    pub(crate) fn restart(&mut self) {
        self.0.iter_mut().for_each(Digest::reset);
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.iter_mut().for_each(|digest| digest.update(bytes));
    }

    /// The checksum of the concatenation of both inputs.
    pub(crate) fn then(mut self, next: &Self) -> Self {
        if let (Some(digest), Some(next)) = (&mut self.0, &next.0) {
            digest.combine(next);
        }
        self
    }

    pub(crate) fn value(&self) -> Option<u64> {
        self.0.as_ref().map(Digest::finalize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that a client of Mooncake 0.3.13.post1 sent to its master for these objects.
    #[test]
    fn checksums_equal_those_of_mooncake() {
        assert_eq!(checksum(&[&[b'a'; 9]]), 16_459_303_117_433_716_883);
        let repeated: Vec<u8> = b"abc".iter().copied().cycle().take(4096).collect();
        assert_eq!(checksum(&[&repeated[..1000], &[], &repeated[1000..]]), 4_197_812_223_107_030_088);
    }

    #[test]
    fn checksums_of_parts_combine_to_that_of_the_whole() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|index| (index % 251) as u8).collect();
        let part = |from: usize, to: usize| {
            let mut sum = RunningChecksum::new(true);
            sum.add(b"discarded by restart");
            sum.restart();
            bytes[from..to].chunks(999).for_each(|piece| sum.add(piece));
            sum
        };
        let whole = [part(1, 40_000), part(40_000, 40_000), part(40_000, 100_000)];
        let whole = whole.iter().fold(part(0, 1), RunningChecksum::then);
        assert_eq!(whole.value(), Some(checksum(&[&bytes])));
        assert_eq!(RunningChecksum::new(false).then(&part(0, 1)).value(), None);
    }
}
