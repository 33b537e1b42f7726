//! The subset of HTTP/1.1 that the load generator needs.

use std::io;

use anyhow::{Context as _, bail, ensure};
use memchr::{memchr, memmem};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Maximum size of a message head.
pub(crate) const MAX_HEAD: usize = 64 << 10;
/// Maximum size of a message body.
pub(crate) const MAX_BODY: usize = 64 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HttpFraming {
    /// Bytes of the head, including the empty line.
    pub(crate) len: usize,
    pub(crate) content_length: Option<usize>,
    pub(crate) chunked: bool,
    pub(crate) close: bool,
}

/// Parses the head at the start of `buffer`; `None` while it is incomplete.
pub(crate) fn parse_head(buffer: &[u8]) -> Option<HttpFraming> {
    let len = memmem::find(buffer, b"\r\n\r\n")? + 4;
    let mut head = HttpFraming { len, content_length: None, chunked: false, close: false };
    let mut rest = &buffer[..len - 2];
    while let Some(end) = memchr(b'\n', rest) {
        let line = &rest[..end];
        rest = &rest[end + 1..];
        let Some(colon) = memchr(b':', line) else { continue };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        match name.len() {
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                head.content_length = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
            }
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                head.chunked = value.eq_ignore_ascii_case(b"chunked");
            }
            10 if name.eq_ignore_ascii_case(b"connection") => {
                head.close = value.eq_ignore_ascii_case(b"close");
            }
            _ => {}
        }
    }
    Some(head)
}

/// Status of the response at the start of `buffer`.
pub(crate) fn status(buffer: &[u8]) -> Option<u16> {
    std::str::from_utf8(buffer.get(9..12)?).ok()?.parse().ok()
}

/// Removes chunked framing from a body that arrives in pieces.
#[derive(Debug, Default)]
pub(crate) struct ChunkedDecoder {
    state: ChunkedDecoderState,
}

#[derive(Debug, Default, Clone, Copy)]
enum ChunkedDecoderState {
    #[default]
    Size,
    /// Remaining bytes of data, including the line end after it.
    Data(usize),
    /// After the last chunk: lines up to an empty one.
    Trailer,
    End,
}

impl ChunkedDecoder {
    /// Appends the data in `input` to `out`. Returns how many bytes of `input` were consumed, and whether the body has
    /// ended.
    pub(crate) fn feed(&mut self, input: &[u8], out: &mut Vec<u8>) -> anyhow::Result<(usize, bool)> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            match self.state {
                ChunkedDecoderState::End => return Ok((used, true)),
                ChunkedDecoderState::Data(left) => {
                    let take = left.min(rest.len());
                    // The last two bytes are the line end.
                    let data = take.min(left.saturating_sub(2));
                    out.extend_from_slice(&rest[..data]);
                    used += take;
                    if take < left {
                        self.state = ChunkedDecoderState::Data(left - take);
                        return Ok((used, false));
                    }
                    self.state = ChunkedDecoderState::Size;
                }
                ChunkedDecoderState::Size => {
                    let Some(end) = memchr(b'\n', rest) else {
                        ensure!(rest.len() < 64, "the size of a chunk is not hexadecimal");
                        return Ok((used, false));
                    };
                    let size = std::str::from_utf8(rest[..end].trim_ascii())?;
                    let size = usize::from_str_radix(size, 16)
                        .with_context(|| format!("size of a chunk: {size:?}"))?;
                    ensure!(size <= MAX_BODY, "a chunk of {size} bytes");
                    used += end + 1;
                    self.state = if size == 0 {
                        ChunkedDecoderState::Trailer
                    } else {
                        ChunkedDecoderState::Data(size + 2)
                    };
                }
                ChunkedDecoderState::Trailer => {
                    let Some(end) = memchr(b'\n', rest) else {
                        ensure!(rest.len() < MAX_HEAD, "endless trailers");
                        return Ok((used, false));
                    };
                    used += end + 1;
                    if rest[..end].trim_ascii().is_empty() {
                        self.state = ChunkedDecoderState::End;
                    }
                }
            }
        }
    }
}

/// Sends one small request on a connection of its own; returns status and raw body (including framing, if chunked).
pub(crate) async fn request_once(port: u16, request: impl AsRef<[u8]>) -> anyhow::Result<(u16, Vec<u8>)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.write_all(request.as_ref()).await?;
    let mut buffer = Vec::with_capacity(4096);
    stream.take(MAX_BODY as u64).read_to_end(&mut buffer).await?;
    let head = parse_head(&buffer).ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    let Some(status) = status(&buffer) else { bail!("the response is not HTTP") };
    buffer.drain(..head.len);
    Ok((status, buffer))
}

/// Sends a JSON body and returns the JSON of a successful response.
pub(crate) async fn post_json(port: u16, path: &str, body: &[u8]) -> anyhow::Result<Value> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let (status, response) = request_once(port, [head.as_bytes(), body].concat()).await?;
    ensure!(status == 200, "{path}: {status} {}", String::from_utf8_lossy(&response));
    serde_json::from_slice(&response).with_context(|| format!("the response of {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_give_their_framing() {
        let text = b"POST / HTTP/1.1\r\nHost: a\r\ncontent-LENGTH:  12\r\nConnection: close\r\n\r\nbody";
        let head = parse_head(text).unwrap();
        let expected =
            HttpFraming { len: text.len() - 4, content_length: Some(12), chunked: false, close: true };
        assert_eq!(head, expected);
        assert_eq!(parse_head(&text[..40]), None);
        let chunked = parse_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").unwrap();
        assert!(chunked.chunked && chunked.content_length.is_none());
        assert_eq!(status(b"HTTP/1.1 503 x\r\n\r\n"), Some(503));
    }

    #[test]
    fn chunks_are_joined_wherever_the_input_is_cut() {
        let body = b"5\r\nhello\r\n1;x\r\n".as_slice();
        assert!(ChunkedDecoder::default().feed(body, &mut Vec::new()).is_err());
        let body = b"5\r\nhello\r\n7\r\n, world\r\n0\r\nx: y\r\n\r\nNEXT";
        for piece_size in 1..body.len() {
            let (mut chunked, mut out, mut pending, mut done) =
                (ChunkedDecoder::default(), Vec::new(), Vec::new(), false);
            for piece in body.chunks(piece_size) {
                pending.extend_from_slice(piece);
                if !done {
                    let (used, ended) = chunked.feed(&pending, &mut out).unwrap();
                    pending.drain(..used);
                    done = ended;
                }
            }
            assert!(done);
            assert_eq!(
                (out.as_slice(), pending.as_slice()),
                (b"hello, world".as_slice(), b"NEXT".as_slice())
            );
        }
    }
}
