//! Hash functions for names and labels.

use sha1::{Digest as _, Sha1};

const FNV32_OFFSET: u32 = 0x811c_9dc5;
const FNV32_PRIME: u32 = 0x0100_0193;

/// FNV-1, 32 bits: hash in the names of ControllerRevisions in Kubernetes.
pub(crate) fn fnv1(bytes: impl IntoIterator<Item = u8>) -> u32 {
    bytes.into_iter().fold(FNV32_OFFSET, |hash, byte| hash.wrapping_mul(FNV32_PRIME) ^ u32::from(byte))
}

/// FNV-1a, 32 bits: hash in the names of a group's revisions.
pub(crate) fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u32 {
    bytes.into_iter().fold(FNV32_OFFSET, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(FNV32_PRIME))
}

/// Encodes the number's decimal digits with an alphabet without vowels: Kubernetes' `SafeEncodeString`.
pub(crate) fn safe_encode(hash: u32) -> String {
    const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    hash.to_string().bytes().map(|digit| char::from(LETTERS[usize::from(digit) % LETTERS.len()])).collect()
}

/// SHA-1 as lowercase hexadecimal digits.
pub(crate) fn sha1_hex(text: &str) -> String {
    Sha1::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_match_known_values() {
        assert_eq!(fnv1a(*b"foobar"), 0xbf9c_f968);
        assert_eq!(fnv1(*b"foobar"), 0x31f0_b262);
        assert_eq!(safe_encode(1_234_567_890), "56789bcdf4");
        assert_eq!(sha1_hex("default/sl"), "ccd2d2356cb6828334e4c09d665149787c42ad67");
    }
}
