//! The checksum of an object that the master keeps: from the writer's buffer to the reader's.
//!
//! It is CRC-64/ECMA-182, as Mooncake's own clients make it when `MOONCAKE_STORE_CHECKSUM` is set.

use crc_fast::CrcAlgorithm;

/// The checksum of an object.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Ecma182, bytes)
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
}
