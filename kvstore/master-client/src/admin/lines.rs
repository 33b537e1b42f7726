//! Splits a byte stream into lines, in bounded memory.

use bytes::{Bytes, BytesMut};

/// Maximum length of a line in bytes. Engines' keys have fewer than 300.
const MAX_LINE: usize = 16 << 10;

/// Splits a byte stream at line ends.
#[derive(Debug, Default)]
pub(super) struct LineSplitter {
    /// Start of a line whose end has not arrived.
    partial: BytesMut,
    /// Whether that line is too long, so that its rest is dropped.
    too_long: bool,
    pub(super) dropped: u64,
}

impl LineSplitter {
    /// Takes the next bytes of the stream, and returns all lines that end in them, each with its line break.
    pub(super) fn push(&mut self, part: &Bytes) -> Bytes {
        let Some(last) = part.iter().rposition(|byte| *byte == b'\n') else {
            self.begin(part);
            return Bytes::new();
        };
        let (ended, rest) = part.split_at(last + 1);
        let mut lines = part.slice(..ended.len());
        if std::mem::take(&mut self.too_long) {
            self.dropped += 1;
            let first = ended.iter().position(|byte| *byte == b'\n').unwrap_or(last);
            lines = part.slice(first + 1..ended.len());
        } else if !self.partial.is_empty() {
            self.partial.extend_from_slice(ended);
            lines = self.partial.split().freeze();
        }
        self.begin(rest);
        lines
    }

    /// Ends the stream, and returns its last line if that has no line break.
    pub(super) fn finish(&mut self) -> Bytes {
        self.dropped += u64::from(std::mem::take(&mut self.too_long));
        self.partial.split().freeze()
    }

    fn begin(&mut self, part: &[u8]) {
        if self.partial.len() + part.len() > MAX_LINE {
            self.partial.clear();
            self.too_long = true;
        }
        if !self.too_long {
            self.partial.extend_from_slice(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(stream: &[u8], parts: &[usize]) -> (Vec<u8>, u64) {
        let (mut lines, mut rest, mut out) = (LineSplitter::default(), stream, Vec::new());
        for size in parts.iter().chain([&usize::MAX]) {
            let (part, more) = rest.split_at(rest.len().min(*size));
            out.extend_from_slice(&lines.push(&Bytes::copy_from_slice(part)));
            rest = more;
        }
        out.extend_from_slice(&lines.finish());
        (out, lines.dropped)
    }

    #[test]
    fn lines_over_the_limit_are_dropped() {
        let long = vec![b'x'; 2 * MAX_LINE];
        let stream = [b"a\n", &long[..], b"\nb\n", &long[..], b"\n", &long[..]].concat();
        let parts = vec![1000; 200];
        let (out, dropped) = cut(&stream, &parts);
        assert_eq!((String::from_utf8(out).unwrap(), dropped), ("a\nb\n".to_owned(), 3));
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_chunk_boundaries(stream in "[ab\n]{0,80}", parts in prop::collection::vec(0_usize..9, 0..40)) {
            let (out, dropped) = cut(stream.as_bytes(), &parts);
            prop_assert_eq!((&out[..], dropped), (stream.as_bytes(), 0));
        }
    }
}
