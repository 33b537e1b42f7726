//! MessagePack encoding as in msgpack-c and msgspec: every number and length in its shortest form.

/// Appends MessagePack values to a buffer.
pub(crate) struct MsgpackWriter<'o> {
    out: &'o mut Vec<u8>,
}

impl<'o> MsgpackWriter<'o> {
    pub(crate) fn new(out: &'o mut Vec<u8>) -> Self {
        Self { out }
    }

    pub(crate) fn nil(&mut self) {
        self.out.push(0xc0);
    }

    pub(crate) fn uint(&mut self, number: u64) {
        match number {
            0..=0x7f => self.out.push(number as u8),
            0x80..=0xff => self.put(0xcc, [number as u8]),
            0x100..=0xffff => self.put(0xcd, (number as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.put(0xce, (number as u32).to_be_bytes()),
            _ => self.put(0xcf, number.to_be_bytes()),
        }
    }

    pub(crate) fn int(&mut self, number: i64) {
        match number {
            0.. => self.uint(number.cast_unsigned()),
            -0x20..0 => self.out.push(number as u8),
            -0x80..-0x20 => self.put(0xd0, (number as i8).to_be_bytes()),
            -0x8000..-0x80 => self.put(0xd1, (number as i16).to_be_bytes()),
            -0x8000_0000..-0x8000 => self.put(0xd2, (number as i32).to_be_bytes()),
            _ => self.put(0xd3, number.to_be_bytes()),
        }
    }

    /// Always a double: both libraries write floats with 64 bits.
    pub(crate) fn float(&mut self, number: f64) {
        self.put(0xcb, number.to_be_bytes());
    }

    pub(crate) fn binary(&mut self, bytes: &[u8]) {
        match bytes.len() {
            length @ 0..=0xff => self.put(0xc4, [length as u8]),
            length @ 0x100..=0xffff => self.put(0xc5, (length as u16).to_be_bytes()),
            length => self.put(0xc6, (length as u32).to_be_bytes()),
        }
        self.out.extend_from_slice(bytes);
    }

    pub(crate) fn text(&mut self, text: &str) {
        match text.len() {
            length @ 0..=0x1f => self.out.push(0xa0 | length as u8),
            length @ 0x20..=0xff => self.put(0xd9, [length as u8]),
            length @ 0x100..=0xffff => self.put(0xda, (length as u16).to_be_bytes()),
            length => self.put(0xdb, (length as u32).to_be_bytes()),
        }
        self.out.extend_from_slice(text.as_bytes());
    }

    pub(crate) fn array(&mut self, length: usize) {
        match length {
            0..=0x0f => self.out.push(0x90 | length as u8),
            0x10..=0xffff => self.put(0xdc, (length as u16).to_be_bytes()),
            _ => self.put(0xdd, (length as u32).to_be_bytes()),
        }
    }

    pub(crate) fn map(&mut self, pairs: usize) {
        match pairs {
            0..=0x0f => self.out.push(0x80 | pairs as u8),
            0x10..=0xffff => self.put(0xde, (pairs as u16).to_be_bytes()),
            _ => self.put(0xdf, (pairs as u32).to_be_bytes()),
        }
    }

    fn put<const N: usize>(&mut self, marker: u8, bytes: [u8; N]) {
        self.out.push(marker);
        self.out.extend_from_slice(&bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::super::reader::{MsgpackReader, MsgpackValue};
    use super::*;
    use proptest::prelude::*;

    fn written(write: impl FnOnce(&mut MsgpackWriter<'_>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut MsgpackWriter::new(&mut out));
        out
    }

    proptest! {
        #[test]
        #[cfg_attr(miri, ignore = "generating strings from a regular expression takes minutes")]
        fn written_values_are_read_back(number: i64, shift in 0_u32..64, text in ".{0,400}", float in -1e12..1e12) {
            let number = number >> shift;
            let bytes = written(|writer| writer.int(number));
            let expected = u64::try_from(number).map_or(MsgpackValue::Negative(number), MsgpackValue::Uint);
            prop_assert_eq!(MsgpackReader::new(&bytes).value(), Ok(expected));
            let bytes = written(|writer| writer.text(&text));
            prop_assert_eq!(MsgpackReader::new(&bytes).value(), Ok(MsgpackValue::Text(text.as_bytes())));
            let bytes = written(|writer| writer.binary(text.as_bytes()));
            prop_assert_eq!(MsgpackReader::new(&bytes).value(), Ok(MsgpackValue::Binary(text.as_bytes())));
            let bytes = written(|writer| writer.float(float));
            prop_assert_eq!(MsgpackReader::new(&bytes).value(), Ok(MsgpackValue::Float(float)));
        }
    }

    #[test]
    fn numbers_and_lengths_take_their_shortest_form() {
        let lengths: Vec<usize> = [0, 127, 128, 255, 256, 65_535, 65_536, u32::MAX.into(), 1 << 32]
            .map(|number| written(|writer| writer.uint(number)).len())
            .into();
        assert_eq!(lengths, [1, 1, 2, 2, 3, 3, 5, 5, 9]);
        let lengths: Vec<usize> = [-1, -32, -33, -128, -129, -32_768, -32_769, i64::from(i32::MIN), i64::MIN]
            .map(|number| written(|writer| writer.int(number)).len())
            .into();
        assert_eq!(lengths, [1, 1, 2, 2, 3, 3, 5, 5, 9]);
        let heads: Vec<usize> =
            [15, 16, 65_535, 65_536].map(|length| written(|writer| writer.array(length)).len()).into();
        assert_eq!(heads, [1, 3, 3, 5]);
        let heads: Vec<usize> =
            [15, 16, 65_535, 65_536].map(|length| written(|writer| writer.map(length)).len()).into();
        assert_eq!(heads, [1, 3, 3, 5]);
        let text = |length: usize| written(|writer| writer.text(&"x".repeat(length))).len() - length;
        assert_eq!([0, 31, 32, 255, 256, 65_535, 65_536].map(text), [1, 1, 2, 2, 3, 3, 5]);
    }
}
