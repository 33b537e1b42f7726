//! The checksum of an object that the master keeps: from the writer's buffer to the reader's.
//!
//! It is CRC-64/ECMA-182, as Mooncake's own clients make it when `MOONCAKE_STORE_CHECKSUM` is set.

use crc_fast::{CrcAlgorithm, Digest};

/// The checksum of an object.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Ecma182, bytes)
}

/// The checksum of bytes that come one after another, if it is wanted.
#[derive(Debug)]
pub(crate) struct RunningChecksum(Option<Digest>);

impl RunningChecksum {
    pub(crate) fn new(is_wanted: bool) -> Self {
        Self(is_wanted.then(|| Digest::new(CrcAlgorithm::Crc64Ecma182)))
    }

    /// Forgets what came until now.
    pub(crate) fn restart(&mut self) {
        self.0.iter_mut().for_each(Digest::reset);
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.iter_mut().for_each(|digest| digest.update(bytes));
    }

    /// What came here, and then there.
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

    /// What Mooncake 0.3.13.post1 told its master for these objects.
    #[test]
    fn checksums_are_those_of_mooncake() {
        assert_eq!(checksum(&[b'a'; 9]), 16_459_303_117_433_716_883);
        let repeated: Vec<u8> = b"abc".iter().copied().cycle().take(4096).collect();
        assert_eq!(checksum(&repeated), 4_197_812_223_107_030_088);
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
        let part = |from: usize, to: usize| {
            let mut sum = RunningChecksum::new(true);
            sum.add(b"what is forgotten");
            sum.restart();
            bytes[from..to].chunks(999).for_each(|piece| sum.add(piece));
            sum
        };
        let whole = [part(1, 40_000), part(40_000, 40_000), part(40_000, 100_000)];
        let whole = whole.iter().fold(part(0, 1), RunningChecksum::then);
        assert_eq!(whole.value(), Some(checksum(&bytes)));
        assert_eq!(RunningChecksum::new(false).then(&part(0, 1)).value(), None);
    }
}
