//! Hashes of pages.

use std::fmt;

/// The hash by which an engine knows a page and all that comes before it: 1 to 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKeyHash {
    /// The hash, filled up with zeros.
    bytes: [u8; Self::MAX_SIZE],
    size: u8,
}

impl BlockKeyHash {
    /// Bytes of the longest hash, SHA-256.
    pub const MAX_SIZE: usize = 32;

    /// A hash of these bytes, or nothing if there are none or too many.
    pub fn new(hash: &[u8]) -> Option<Self> {
        let mut bytes = [0; Self::MAX_SIZE];
        bytes.get_mut(..hash.len())?.copy_from_slice(hash);
        Some(Self { bytes, size: u8::try_from(hash.len()).ok().filter(|size| *size > 0)? })
    }

    /// The hash that lower-case hexadecimal digits stand for.
    pub fn from_hex(digits: &str) -> Option<Self> {
        let (pairs, odd) = digits.as_bytes().as_chunks();
        if !odd.is_empty() || pairs.is_empty() {
            return None;
        }
        let mut bytes = [0; Self::MAX_SIZE];
        let places = bytes.get_mut(..pairs.len())?;
        for (place, [high, low]) in places.iter_mut().zip(pairs) {
            *place = nibble(*high)? << 4 | nibble(*low)?;
        }
        Some(Self { bytes, size: u8::try_from(pairs.len()).ok()? })
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.size)).unwrap_or_default()
    }
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

impl From<[u8; 32]> for BlockKeyHash {
    fn from(bytes: [u8; 32]) -> Self {
        Self { bytes, size: 32 }
    }
}

/// As lower-case hexadecimal digits.
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
