//! The hash of one block.

use std::fmt;

/// One full block of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashedBlock {
    /// The full block hash.
    pub digest: BlockDigest,
    /// The 64 bits of the hash in the engine's KV events. Signed numbers keep their bit pattern.
    pub event_hash: u64,
}

/// A block hash in the engine's own form. `Display` gives the text used in object keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockDigest {
    /// SHA-256 as 32 bytes: SGLang and vLLM. Displays as 64 hex digits.
    Sha256([u8; 32]),
    /// LMCache's `sha256_cbor`: the first 8 bytes as a big-endian number. Displays in hex, without leading zeros.
    Unsigned(u64),
    /// LMCache's `builtin`: a Python hash. Displays in hex with a minus sign, as Python's `{:x}` does.
    Signed(i64),
}

impl fmt::Display for BlockDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sha256(bytes) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
            Self::Unsigned(number) => write!(f, "{number:x}"),
            Self::Signed(number) if *number < 0 => write!(f, "-{:x}", number.unsigned_abs()),
            Self::Signed(number) => write!(f, "{number:x}"),
        }
    }
}

/// The first 8 bytes of a digest as a big-endian number.
pub(crate) fn first_u64(digest: &[u8; 32]) -> u64 {
    digest[..8].iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// The last 8 bytes of a digest as a big-endian number.
pub(crate) fn last_u64(digest: &[u8; 32]) -> u64 {
    digest[24..].iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_formatted_as_in_object_keys() {
        assert_eq!(BlockDigest::Unsigned(0x0ab).to_string(), "ab");
        assert_eq!(BlockDigest::Signed(-0x5754_ed40_775a_7be6).to_string(), "-5754ed40775a7be6");
        assert_eq!(BlockDigest::Signed(i64::MIN).to_string(), "-8000000000000000");
        assert_eq!(BlockDigest::Signed(0x37).to_string(), "37");
        let mut bytes = [0; 32];
        (bytes[0], bytes[31]) = (0x0a, 0xf1);
        assert_eq!(BlockDigest::Sha256(bytes).to_string(), format!("0a{}f1", "0".repeat(60)));
        assert_eq!((first_u64(&bytes), last_u64(&bytes)), (0x0a << 56, 0xf1));
    }
}
