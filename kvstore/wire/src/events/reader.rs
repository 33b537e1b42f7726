//! MessagePack decoding of a byte slice without copies, limited to the needs of events.
//!
//! Decoding neither allocates nor recurses, so declared lengths and nesting are harmless. Skipped values are checked for completeness,
//! but skipped strings are not checked for UTF-8.

use super::EventDecodeError;

/// A value, or the head of an array or a map whose elements follow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum MsgpackValue<'a> {
    Nil,
    Bool(bool),
    /// A non-negative number in any encoding.
    Uint(u64),
    Negative(i64),
    Float(f64),
    Text(&'a [u8]),
    Binary(&'a [u8]),
    Array(u32),
    /// Map head, with the number of pairs.
    Map(u32),
    Extension,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct MsgpackReader<'a> {
    rest: &'a [u8],
}

impl<'a> MsgpackReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn value(&mut self) -> Result<MsgpackValue<'a>, EventDecodeError> {
        let [marker] = self.array::<1>()?;
        Ok(match marker {
            0x00..=0x7f => MsgpackValue::Uint(marker.into()),
            0x80..=0x8f => MsgpackValue::Map(u32::from(marker & 0x0f)),
            0x90..=0x9f => MsgpackValue::Array(u32::from(marker & 0x0f)),
            0xa0..=0xbf => MsgpackValue::Text(self.bytes(u32::from(marker & 0x1f))?),
            0xc0 => MsgpackValue::Nil,
            0xc1 => return Err(EventDecodeError::Malformed),
            0xc2 | 0xc3 => MsgpackValue::Bool(marker == 0xc3),
            0xc4..=0xc6 => MsgpackValue::Binary(self.sized(marker - 0xc4)?),
            0xc7..=0xc9 => {
                let length = self.length(marker - 0xc7)?;
                self.array::<1>()?;
                self.bytes(length)?;
                MsgpackValue::Extension
            }
            0xca => MsgpackValue::Float(f32::from_be_bytes(self.array()?).into()),
            0xcb => MsgpackValue::Float(f64::from_be_bytes(self.array()?)),
            0xcc => MsgpackValue::Uint(u8::from_be_bytes(self.array()?).into()),
            0xcd => MsgpackValue::Uint(u16::from_be_bytes(self.array()?).into()),
            0xce => MsgpackValue::Uint(u32::from_be_bytes(self.array()?).into()),
            0xcf => MsgpackValue::Uint(u64::from_be_bytes(self.array()?)),
            0xd0 => signed(i8::from_be_bytes(self.array()?).into()),
            0xd1 => signed(i16::from_be_bytes(self.array()?).into()),
            0xd2 => signed(i32::from_be_bytes(self.array()?).into()),
            0xd3 => signed(i64::from_be_bytes(self.array()?)),
            0xd4..=0xd8 => {
                self.bytes(1 + (1 << (marker - 0xd4)))?;
                MsgpackValue::Extension
            }
            0xd9..=0xdb => MsgpackValue::Text(self.sized(marker - 0xd9)?),
            0xdc | 0xdd => MsgpackValue::Array(self.length(marker - 0xdb)?),
            0xde | 0xdf => MsgpackValue::Map(self.length(marker - 0xdd)?),
            0xe0..=0xff => MsgpackValue::Negative(i8::from_be_bytes([marker]).into()),
        })
    }

    /// An unsigned number of at most 32 bits, such as a token; `None` for any other value, which may be read partly.
    #[inline]
    pub(crate) fn small_uint(&mut self) -> Result<Option<u32>, EventDecodeError> {
        let (number, rest) = match *self.rest {
            [marker @ 0..=0x7f, ref rest @ ..] => (marker.into(), rest),
            [0xcd, a, b, ref rest @ ..] => (u16::from_be_bytes([a, b]).into(), rest),
            [0xce, a, b, c, d, ref rest @ ..] => (u32::from_be_bytes([a, b, c, d]), rest),
            _ => {
                return Ok(match self.value()? {
                    MsgpackValue::Uint(number) => u32::try_from(number).ok(),
                    _ => None,
                });
            }
        };
        self.rest = rest;
        Ok(Some(number))
    }

    /// Skips a whole value with its contents, and returns its bytes.
    pub(crate) fn skip(&mut self) -> Result<&'a [u8], EventDecodeError> {
        let start = *self;
        let mut open = 1_u64;
        while open > 0 {
            open -= 1;
            let marker = *self.rest.first().ok_or(EventDecodeError::Truncated)?;
            let width = WIDTHS[usize::from(marker)];
            if width > 0 {
                self.rest = self.rest.get(usize::from(width)..).ok_or(EventDecodeError::Truncated)?;
                continue;
            }
            match self.value()? {
                MsgpackValue::Array(length) => open += u64::from(length),
                MsgpackValue::Map(pairs) => open += 2 * u64::from(pairs),
                _ => {}
            }
            // Each value takes at least one byte.
            if open > self.rest.len() as u64 {
                return Err(EventDecodeError::Truncated);
            }
        }
        Ok(self.since(&start))
    }

    /// The bytes read since this reader was copied to `start`.
    pub(crate) fn since(&self, start: &Self) -> &'a [u8] {
        start.rest.get(..start.rest.len() - self.rest.len()).unwrap_or_default()
    }

    /// The bytes not read yet.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Bytes preceded by a length of 1, 2 or 4 bytes.
    fn sized(&mut self, width: u8) -> Result<&'a [u8], EventDecodeError> {
        let length = self.length(width)?;
        self.bytes(length)
    }

    /// A length of 1 (`width` 0), 2 (1) or 4 bytes (2).
    fn length(&mut self, width: u8) -> Result<u32, EventDecodeError> {
        Ok(match width {
            0 => u8::from_be_bytes(self.array()?).into(),
            1 => u16::from_be_bytes(self.array()?).into(),
            _ => u32::from_be_bytes(self.array()?),
        })
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], EventDecodeError> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(EventDecodeError::Truncated)?;
        self.rest = rest;
        Ok(*head)
    }

    fn bytes(&mut self, length: u32) -> Result<&'a [u8], EventDecodeError> {
        let (head, rest) = self.rest.split_at_checked(length as usize).ok_or(EventDecodeError::Truncated)?;
        self.rest = rest;
        Ok(head)
    }
}

/// Size of a value by its marker; 0 if it depends on more than the marker.
const WIDTHS: [u8; 256] = {
    let mut widths = [0; 256];
    let mut marker = 0;
    while marker < 256 {
        widths[marker] = match marker {
            0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => 1,
            0xa0..=0xbf => 1 + (marker & 0x1f) as u8,
            0xcc | 0xd0 => 2,
            0xcd | 0xd1 => 3,
            0xca | 0xce | 0xd2 => 5,
            0xcb | 0xcf | 0xd3 => 9,
            _ => 0,
        };
        marker += 1;
    }
    widths
};

fn signed<'a>(number: i64) -> MsgpackValue<'a> {
    u64::try_from(number).map_or(MsgpackValue::Negative(number), MsgpackValue::Uint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(bytes: &[u8]) -> Result<MsgpackValue<'_>, EventDecodeError> {
        let mut reader = MsgpackReader::new(bytes);
        let value = reader.value()?;
        assert!(reader.rest().is_empty(), "{bytes:x?}");
        Ok(value)
    }

    /// Examples of each family of the specification.
    #[test]
    fn every_encoding_is_read() {
        for (bytes, value) in [
            (&[0x7f][..], MsgpackValue::Uint(127)),
            (&[0xff], MsgpackValue::Negative(-1)),
            (&[0xe0], MsgpackValue::Negative(-32)),
            (&[0xc0], MsgpackValue::Nil),
            (&[0xc3], MsgpackValue::Bool(true)),
            (&[0xcc, 0xff], MsgpackValue::Uint(255)),
            (&[0xcd, 1, 0], MsgpackValue::Uint(256)),
            (&[0xce, 0, 1, 0, 0], MsgpackValue::Uint(65536)),
            (&[0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], MsgpackValue::Uint(u64::MAX)),
            (&[0xd0, 0x80], MsgpackValue::Negative(-128)),
            (&[0xd0, 0x7f], MsgpackValue::Uint(127)),
            (&[0xd1, 0xff, 0], MsgpackValue::Negative(-256)),
            (&[0xd2, 0xff, 0xff, 0, 0], MsgpackValue::Negative(-65536)),
            (&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0], MsgpackValue::Negative(i64::MIN)),
            (&[0xca, 0x3f, 0x80, 0, 0], MsgpackValue::Float(1.0)),
            (&[0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0], MsgpackValue::Float(1.0)),
            (b"\xa2hi", MsgpackValue::Text(b"hi")),
            (b"\xd9\x02hi", MsgpackValue::Text(b"hi")),
            (b"\xda\0\x02hi", MsgpackValue::Text(b"hi")),
            (b"\xdb\0\0\0\x02hi", MsgpackValue::Text(b"hi")),
            (b"\xc4\x02hi", MsgpackValue::Binary(b"hi")),
            (b"\xc5\0\x02hi", MsgpackValue::Binary(b"hi")),
            (b"\xc6\0\0\0\x02hi", MsgpackValue::Binary(b"hi")),
            (&[0x93], MsgpackValue::Array(3)),
            (&[0xdc, 1, 0], MsgpackValue::Array(256)),
            (&[0xdd, 0, 1, 0, 0], MsgpackValue::Array(65536)),
            (&[0x83], MsgpackValue::Map(3)),
            (&[0xde, 1, 0], MsgpackValue::Map(256)),
            (&[0xdf, 0, 1, 0, 0], MsgpackValue::Map(65536)),
            (&[0xd4, 5, 1], MsgpackValue::Extension),
            (&[0xd8, 5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], MsgpackValue::Extension),
            (&[0xc7, 2, 5, 1, 2], MsgpackValue::Extension),
            (&[0xc8, 0, 1, 5, 1], MsgpackValue::Extension),
            (&[0xc9, 0, 0, 0, 1, 5, 1], MsgpackValue::Extension),
        ] {
            assert_eq!(one(bytes), Ok(value), "{bytes:x?}");
            let token =
                if let MsgpackValue::Uint(number) = value { u32::try_from(number).ok() } else { None };
            assert_eq!(MsgpackReader::new(bytes).small_uint(), Ok(token), "{bytes:x?}");
            if !matches!(value, MsgpackValue::Array(_) | MsgpackValue::Map(_)) {
                assert_eq!(MsgpackReader::new(bytes).skip(), Ok(bytes));
            }
            for end in 0..bytes.len() {
                assert_eq!(one(&bytes[..end]), Err(EventDecodeError::Truncated), "{bytes:x?} up to {end}");
                assert_eq!(MsgpackReader::new(&bytes[..end]).skip(), Err(EventDecodeError::Truncated));
            }
        }
        assert_eq!(one(&[0xc1]), Err(EventDecodeError::Malformed));
    }

    #[test]
    fn skipping_neither_recurses_nor_trusts_lengths() {
        let depth = if cfg!(miri) { 1_000 } else { 1_000_000 };
        let mut deep = vec![0x91; depth];
        assert_eq!(MsgpackReader::new(&deep).skip(), Err(EventDecodeError::Truncated));
        deep.push(0xc0);
        assert_eq!(MsgpackReader::new(&deep).skip().map(<[u8]>::len), Ok(depth + 1));
        let maps = [0xdf, 0xff, 0xff, 0xff, 0xff].repeat(1000);
        assert_eq!(MsgpackReader::new(&maps).skip(), Err(EventDecodeError::Truncated));
        let mut two = MsgpackReader::new(&[0x92, 1, 0x81, 0xa0, 2, 3]);
        assert_eq!(two.skip(), Ok(&[0x92, 1, 0x81, 0xa0, 2][..]));
        assert_eq!(two.value(), Ok(MsgpackValue::Uint(3)));
    }
}
