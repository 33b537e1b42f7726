//! Hashes of blocks in keys.

use std::fmt;

/// An engine's hash of a block and all blocks before it: 1 to 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKeyHash {
    /// The hash, padded with zeros.
    bytes: [u8; Self::MAX_SIZE],
    size: u8,
}

impl BlockKeyHash {
    /// Maximum size in bytes (SHA-256).
    pub const MAX_SIZE: usize = 32;

    /// A hash of these bytes; `None` if there are none or more than 32.
    pub fn new(hash: &[u8]) -> Option<Self> {
        let mut bytes = [0; Self::MAX_SIZE];
        bytes.get_mut(..hash.len())?.copy_from_slice(hash);
        Some(Self { bytes, size: u8::try_from(hash.len()).ok().filter(|size| *size > 0)? })
    }

    pub fn from_hex(digits: &str) -> Option<Self> {
        let (pairs, odd) = digits.as_bytes().as_chunks();
        if !odd.is_empty() || pairs.is_empty() {
            return None;
        }
        let mut bytes = [0; Self::MAX_SIZE];
        let targets = bytes.get_mut(..pairs.len())?;
        // Branches on digits of a hash would be mispredicted half of the time.
        let mut are_valid = true;
        for (byte, [high, low]) in targets.iter_mut().zip(pairs) {
            let ((high, is_high), (low, is_low)) = (nibble(*high), nibble(*low));
            *byte = high << 4 | low;
            are_valid &= is_high & is_low;
        }
        are_valid.then_some(Self { bytes, size: u8::try_from(pairs.len()).ok()? })
    }

    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.size)).unwrap_or_default()
    }
}

/// Value of a lower-case digit, and whether it is one.
fn nibble(digit: u8) -> (u8, bool) {
    let (decimal, letter) = (digit.wrapping_sub(b'0'), digit.wrapping_sub(b'a'));
    let value = if decimal < 10 { decimal } else { letter.wrapping_add(10) & 15 };
    (value, (decimal < 10) | (letter < 6))
}

impl From<[u8; 32]> for BlockKeyHash {
    fn from(bytes: [u8; 32]) -> Self {
        Self { bytes, size: 32 }
    }
}

/// Formats the hash as lower-case hexadecimal digits.
impl fmt::Display for BlockKeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; 2 * Self::MAX_SIZE];
        let (pairs, _) = text.as_chunks_mut();
        for (pair, byte) in pairs.iter_mut().zip(self.as_bytes()) {
            *pair = [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]];
        }
        let text = text.get(..2 * self.as_bytes().len()).unwrap_or_default();
        f.write_str(std::str::from_utf8(text).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for BlockKeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lower_case_hexadecimal_digits_are_a_hash() {
        for byte in 0..=u8::MAX {
            let text = format!("{byte:02x}");
            assert_eq!(BlockKeyHash::from_hex(&text), BlockKeyHash::new(&[byte]), "{text}");
        }
        for digit in (0..=u8::MAX).map(char::from).filter(|digit| !matches!(digit, '0'..='9' | 'a'..='f')) {
            for text in [format!("0{digit}"), format!("{digit}0"), format!("00{digit}f00")] {
                assert_eq!(BlockKeyHash::from_hex(&text), None, "{text}");
            }
        }
        assert_eq!(BlockKeyHash::from_hex(""), None);
        assert_eq!(BlockKeyHash::from_hex(&"0".repeat(66)), None);
    }
}
