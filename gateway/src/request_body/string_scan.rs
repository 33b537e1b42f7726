//! Finds the end of a JSON string, 64 bytes at a time and with hardly a branch that depends on them: a prompt has an escape on every line,
//! and a branch for each is mispredicted half of the time.
//!
//! Which bytes are escaped follows from the runs of backslashes, as in Langdale and Lemire, "Parsing Gigabytes of JSON per Second" (2019),
//! section 3.1.1, in the variant with one subtraction.

use wide::u8x16;

/// Bytes that are classified at once: one bit each.
const BLOCK: usize = 64;
/// Bits at odd positions.
const ODD: u64 = 0xAAAA_AAAA_AAAA_AAAA;

/// What [`scan_string`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ScannedString {
    /// Offset of the byte at which the scan ended.
    pub(super) end: usize,
    /// Bytes that those before `end` stand for, without their escapes.
    pub(super) length: u64,
    pub(super) stop: ScanStop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScanStop {
    /// `end` is that of the closing quote.
    Quote,
    /// `end` is that of the byte behind a backslash that is none of `"`, `\`, `n`, `r` and `t`.
    OtherEscape,
    /// A byte that must be escaped, or the end of the text.
    Invalid,
}

/// Scans the rest of a string after its opening quote, or after an escape in it.
pub(super) fn scan_string(bytes: &[u8]) -> ScannedString {
    let (mut length, mut is_escaped) = (0, 0);
    let (blocks, rest) = bytes.as_chunks::<BLOCK>();
    // The zeros behind the end count as invalid.
    let mut last = [0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    for (number, block) in blocks.iter().chain([&last]).enumerate() {
        let classes = ByteClasses::of(block);
        let (escapes, escaped) = classes.escapes(is_escaped);
        let others = escaped & !classes.simple_escapes;
        let stops = (classes.quotes & !escaped) | classes.controls | others;
        if stops == 0 {
            length += u64::from((!escapes).count_ones());
            is_escaped = escapes >> (BLOCK - 1);
            continue;
        }
        let at = stops.trailing_zeros();
        let before = (1 << at) - 1;
        let stop = match () {
            () if others >> at & 1 == 1 => ScanStop::OtherEscape,
            () if classes.controls >> at & 1 == 1 => ScanStop::Invalid,
            () => ScanStop::Quote,
        };
        length += u64::from((before & !escapes).count_ones());
        return ScannedString { end: number * BLOCK + at as usize, length, stop };
    }
    ScannedString { end: bytes.len(), length, stop: ScanStop::Invalid }
}

/// One bit per byte of a block.
struct ByteClasses {
    quotes: u64,
    backslashes: u64,
    /// Bytes that are not allowed in a string.
    controls: u64,
    /// Bytes that may follow a backslash and stand for one byte with it; the most frequent ones.
    simple_escapes: u64,
}

impl ByteClasses {
    fn of(block: &[u8; BLOCK]) -> ByteClasses {
        let mut classes = ByteClasses { quotes: 0, backslashes: 0, controls: 0, simple_escapes: 0 };
        for (number, bytes) in block.as_chunks::<16>().0.iter().enumerate() {
            let bytes = u8x16::from(*bytes);
            let equal = |byte: u8| bytes.simd_eq(u8x16::splat(byte));
            let bits = |mask: u8x16| u64::from(mask.to_bitmask()) << (16 * number);
            let (quotes, backslashes) = (equal(b'"'), equal(b'\\'));
            classes.quotes |= bits(quotes);
            classes.backslashes |= bits(backslashes);
            classes.controls |= bits(bytes.min(u8x16::splat(0x1f)).simd_eq(bytes));
            let letters = equal(b'n') | equal(b'r') | equal(b't');
            classes.simple_escapes |= bits(quotes | backslashes | letters);
        }
        classes
    }

    /// The backslashes that begin an escape, and the bytes behind them. `is_escaped` is 1 if the first byte is behind one.
    fn escapes(&self, is_escaped: u64) -> (u64, u64) {
        if self.backslashes == 0 {
            return (0, is_escaped);
        }
        let candidates = self.backslashes & !is_escaped;
        // The subtraction runs through each sequence of backslashes, and flips every second bit of those that begin at even positions.
        let sequences = ((candidates << 1) | ODD).wrapping_sub(candidates) ^ ODD;
        (sequences & self.backslashes, sequences ^ (self.backslashes | is_escaped))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same, byte by byte.
    fn expected(bytes: &[u8]) -> ScannedString {
        let (mut end, mut length) = (0, 0);
        loop {
            let stop = match bytes.get(end) {
                None | Some(0..0x20) => ScanStop::Invalid,
                Some(b'"') => ScanStop::Quote,
                Some(b'\\') => match bytes.get(end + 1) {
                    Some(b'"' | b'\\' | b'n' | b'r' | b't') => {
                        (end, length) = (end + 2, length + 1);
                        continue;
                    }
                    None => return ScannedString { end: end + 1, length, stop: ScanStop::Invalid },
                    Some(_) => {
                        return ScannedString { end: end + 1, length, stop: ScanStop::OtherEscape };
                    }
                },
                Some(_) => {
                    (end, length) = (end + 1, length + 1);
                    continue;
                }
            };
            return ScannedString { end, length, stop };
        }
    }

    /// A control byte behind a backslash is both kinds of stop, and what is behind the end counts as zeros.
    fn scanned(bytes: &[u8]) -> ScannedString {
        let mut scanned = scan_string(bytes);
        if scanned.end == bytes.len() {
            scanned.stop = ScanStop::Invalid;
        }
        scanned
    }

    #[test]
    fn every_byte_is_found_at_every_position() {
        for at in 0..200 {
            for byte in 0..=255 {
                for prefix in ["", "\\", "\\\\", "\\\\\\"] {
                    let mut text = vec![b'a'; at];
                    text.extend_from_slice(prefix.as_bytes());
                    text.push(byte);
                    text.extend_from_slice(b"b\\\"c\"d");
                    assert_eq!(scanned(&text), expected(&text), "{at} {prefix} {byte}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn runs_of_backslashes_end_where_they_should(
            parts in prop::collection::vec(("[a-z]{0,70}", "\\\\{0,70}", "[\"nrtu/]?", 0..50_u8), 0..9),
        ) {
            let mut text = Vec::new();
            for (letters, backslashes, behind, control) in parts {
                text.extend_from_slice((letters + &backslashes + &behind).as_bytes());
                text.extend((control == 0).then_some(7));
            }
            for start in 0..text.len().min(70) {
                prop_assert_eq!(scanned(&text[start..]), expected(&text[start..]));
            }
        }
    }
}
