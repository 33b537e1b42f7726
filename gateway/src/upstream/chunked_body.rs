//! Removes the framing of a chunked body (RFC 9112, section 7.1).

use bytes::BytesMut;

use super::response_parser::NotHttp;

/// Most bytes of the extensions of all chunks, and of trailers: engines send neither.
const MAX_IGNORED_BYTES: usize = 16 << 10;

/// State between two reads.
#[derive(Debug)]
pub(super) struct ChunkedBody {
    state: ChunkState,
    ignored: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChunkState {
    /// In the size of a chunk, of which `digits` have been read.
    Size {
        size: u64,
        digits: u8,
    },
    /// Between the size and the end of its line.
    Extension {
        size: u64,
    },
    /// Before the line feed behind the size.
    SizeLineFeed {
        size: u64,
    },
    /// In the data of a chunk.
    Data {
        remaining: u64,
    },
    /// Before the two bytes behind the data.
    DataReturn,
    DataLineFeed,
    /// At the start of a line behind the last chunk.
    TrailerStart,
    Trailer,
    TrailerLineFeed,
    /// Before the line feed of the empty line that ends the body.
    LastLineFeed,
    End,
}

impl ChunkedBody {
    pub(super) fn new() -> Self {
        Self { state: ChunkState::Size { size: 0, digits: 0 }, ignored: 0 }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.state == ChunkState::End
    }

    /// Appends the data in `input` to `data`. Returns the number of bytes read: fewer than all if the body ends before.
    pub(super) fn decode(&mut self, input: &[u8], data: &mut BytesMut) -> Result<usize, NotHttp> {
        let mut position = 0;
        while let Some(&byte) = input.get(position)
            && self.state != ChunkState::End
        {
            if let ChunkState::Data { remaining } = self.state {
                let available = &input[position..];
                let length = usize::try_from(remaining).unwrap_or(usize::MAX).min(available.len());
                data.extend_from_slice(&available[..length]);
                position += length;
                let remaining = remaining - length as u64;
                self.state =
                    if remaining == 0 { ChunkState::DataReturn } else { ChunkState::Data { remaining } };
                continue;
            }
            self.state = self.after(byte)?;
            position += 1;
        }
        Ok(position)
    }

    /// The state after a byte of the framing.
    fn after(&mut self, byte: u8) -> Result<ChunkState, NotHttp> {
        Ok(match (self.state, byte) {
            (ChunkState::Size { size, digits }, byte) if byte.is_ascii_hexdigit() => {
                if digits == 16 {
                    return Err(NotHttp("the size of a chunk is too large"));
                }
                let digit = (byte as char).to_digit(16).unwrap_or_default();
                ChunkState::Size { size: size << 4 | u64::from(digit), digits: digits + 1 }
            }
            (ChunkState::Size { digits: 0, .. }, _) => {
                return Err(NotHttp("the size of a chunk is missing"));
            }
            (ChunkState::Size { size, .. } | ChunkState::Extension { size }, b'\r') => {
                ChunkState::SizeLineFeed { size }
            }
            (ChunkState::Size { size, .. }, b';' | b' ' | b'\t') => ChunkState::Extension { size },
            (ChunkState::Extension { size }, byte) if byte != b'\n' => {
                self.ignore()?;
                ChunkState::Extension { size }
            }
            (ChunkState::SizeLineFeed { size: 0 }, b'\n') => ChunkState::TrailerStart,
            (ChunkState::SizeLineFeed { size }, b'\n') => ChunkState::Data { remaining: size },
            (ChunkState::DataReturn, b'\r') => ChunkState::DataLineFeed,
            (ChunkState::DataLineFeed, b'\n') => ChunkState::Size { size: 0, digits: 0 },
            (ChunkState::TrailerStart, b'\r') => ChunkState::LastLineFeed,
            (ChunkState::LastLineFeed, b'\n') => ChunkState::End,
            (ChunkState::Trailer, b'\r') => ChunkState::TrailerLineFeed,
            (ChunkState::TrailerLineFeed, b'\n') => ChunkState::TrailerStart,
            (ChunkState::TrailerStart | ChunkState::Trailer, byte) if byte != b'\n' => {
                self.ignore()?;
                ChunkState::Trailer
            }
            _ => return Err(NotHttp("a chunk of its body is malformed")),
        })
    }

    fn ignore(&mut self) -> Result<(), NotHttp> {
        self.ignored += 1;
        if self.ignored > MAX_IGNORED_BYTES {
            return Err(NotHttp("the extensions or trailers of its body are longer than 16 KiB"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data, and the number of bytes up to the end of the body; `None` if it is not complete.
    fn decoded(input: &[u8]) -> Result<(Vec<u8>, Option<usize>), NotHttp> {
        let (mut body, mut data) = (ChunkedBody::new(), BytesMut::new());
        let read = body.decode(input, &mut data)?;
        assert!(read == input.len() || body.is_complete());
        Ok((data.to_vec(), body.is_complete().then_some(read)))
    }

    #[test]
    fn data_is_taken_out_of_its_chunks() {
        let input = b"4;a=\"b\"\r\nWiki\r\n00A \r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\nHTTP";
        let expected = (b"Wiki0123456789".to_vec(), Some(input.len() - 4));
        assert_eq!(decoded(input), Ok(expected));
        for end in 0..input.len() - 4 {
            assert_eq!(decoded(&input[..end]).unwrap().1, None, "{end}");
        }
    }

    #[test]
    fn malformed_chunks_are_refused() {
        for input in [
            "x\r\n",
            "\r\n",
            "-1\r\n",
            "5\n12345\r\n",
            "5\rx",
            "5;a\nb\r\n12345\r\n",
            "5\r\n123456\r\n",
            "5\r\n12345\n0\r\n\r\n",
            "0\r\n\rx",
            "0\r\na\n\r\n",
            "12345678901234567\r\n",
        ] {
            assert!(decoded(input.as_bytes()).is_err(), "{input:?}");
        }
        let long = |part: &str| format!("1{part}{}", "x".repeat(MAX_IGNORED_BYTES + 1));
        assert!(decoded(long(";").as_bytes()).is_err());
        assert!(decoded(format!("0\r\n{}", "x".repeat(MAX_IGNORED_BYTES + 1)).as_bytes()).is_err());
        assert_eq!(decoded(b"ffffffffffffffff\r\n12").unwrap().0, b"12");
    }
}
