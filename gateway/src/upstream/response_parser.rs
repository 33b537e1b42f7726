//! An engine's response from the bytes of its connection, in pieces of any size. No I/O.

use bytes::{Bytes, BytesMut};
use http::Response;
use memchr::memmem;

use super::chunked_body::ChunkedBody;
use super::response_head::{self, BodyFraming, ReceivedHead, ResponseHead};

/// Longest head of a response.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Why what an engine sent is not a response of HTTP/1; public for fuzzing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotHttp(pub(super) &'static str);

/// Parser of one response; public for fuzzing.
#[derive(Debug)]
pub struct ResponseParser {
    /// Received bytes that are part of the head, or behind it and not yet returned as the body.
    received: BytesMut,
    body: Option<ReceivedBody>,
    /// Whether the request was HEAD.
    has_no_body: bool,
}

#[derive(Debug)]
struct ReceivedBody {
    decoder: BodyDecoder,
    keeps_connection: bool,
    /// Bytes behind the end of the body.
    has_more: bool,
}

#[derive(Debug)]
enum BodyDecoder {
    Length { remaining: u64 },
    Chunked(ChunkedBody),
    Connection { ended: bool },
}

impl ResponseParser {
    /// A parser of the response to a request. `is_head` is set for a HEAD request, whose response has no body.
    #[must_use]
    pub fn new(is_head: bool) -> Self {
        Self { received: BytesMut::new(), body: None, has_no_body: is_head }
    }

    /// Takes bytes that were received before the head was complete. Returns status and headers once it is.
    ///
    /// # Errors
    /// [`NotHttp`] if it is not the head of a response.
    pub fn push_head(&mut self, input: &[u8]) -> Result<Option<Response<()>>, NotHttp> {
        // The end may have begun in the bytes before.
        let searched = self.received.len().saturating_sub(3);
        self.received.extend_from_slice(input);
        if !has_head_end(&self.received[searched..]) {
            return self.check_head_length();
        }
        loop {
            match response_head::parse(&self.received, self.has_no_body)? {
                None => return self.check_head_length(),
                Some((ReceivedHead::Interim, length)) => drop(self.received.split_to(length)),
                Some((ReceivedHead::Final(head), length)) => {
                    drop(self.received.split_to(length));
                    let ResponseHead { response, framing, keeps_connection } = head;
                    let decoder = BodyDecoder::new(framing);
                    self.body = Some(ReceivedBody { decoder, keeps_connection, has_more: false });
                    return Ok(Some(response));
                }
            }
        }
    }

    fn check_head_length(&self) -> Result<Option<Response<()>>, NotHttp> {
        // A server of another protocol need not send the end of a head. Empty lines before it are allowed.
        let expected = b"HTTP/1.";
        let start = self.received.iter().position(|byte| !matches!(byte, b'\r' | b'\n'));
        let begin = start.map_or(&[][..], |start| &self.received[start..]);
        if !begin.iter().zip(expected).all(|(byte, expected)| byte == expected) {
            return Err(NotHttp("the start of its response is not that of HTTP/1"));
        }
        if self.received.len() > MAX_HEAD_BYTES {
            return Err(NotHttp("its headers are longer than 64 KiB"));
        }
        Ok(None)
    }

    /// What has been received of the body together with the head.
    ///
    /// # Errors
    /// [`NotHttp`] if the body is malformed.
    pub fn take_buffered(&mut self) -> Result<Bytes, NotHttp> {
        if self.received.is_empty() {
            return Ok(Bytes::new());
        }
        let buffered = std::mem::take(&mut self.received);
        self.push_body(&buffered)
    }

    /// Takes bytes that were received after the head, and returns those of the body.
    ///
    /// # Errors
    /// [`NotHttp`] if the body is malformed.
    pub fn push_body(&mut self, input: &[u8]) -> Result<Bytes, NotHttp> {
        let Some(body) = &mut self.body else { return Err(NotHttp("a body has no head")) };
        let (data, read) = body.decoder.decode(input)?;
        body.has_more |= read < input.len();
        Ok(data)
    }

    /// Whether nothing has been received.
    pub(super) fn is_untouched(&self) -> bool {
        self.received.is_empty() && self.body.is_none()
    }

    /// The connection has ended. Returns whether the response is complete.
    pub fn end(&mut self) -> bool {
        if let Some(ReceivedBody { decoder: BodyDecoder::Connection { ended }, .. }) = &mut self.body {
            *ended = true;
        }
        self.is_complete()
    }

    /// Whether the body has been received to its end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.received.is_empty()
            && match &self.body {
                None => false,
                Some(body) => match &body.decoder {
                    BodyDecoder::Length { remaining } => *remaining == 0,
                    BodyDecoder::Chunked(chunked) => chunked.is_complete(),
                    BodyDecoder::Connection { ended } => *ended,
                },
            }
    }

    /// Whether the connection can be used for another request: the response is complete, and the engine neither closes the connection nor
    /// has sent more than the response.
    #[must_use]
    pub fn leaves_connection_usable(&self) -> bool {
        self.is_complete() && self.body.as_ref().is_some_and(|body| body.keeps_connection && !body.has_more)
    }
}

/// Whether the bytes contain an empty line.
fn has_head_end(bytes: &[u8]) -> bool {
    memmem::find(bytes, b"\n\r\n").is_some() || memmem::find(bytes, b"\n\n").is_some()
}

impl BodyDecoder {
    fn new(framing: BodyFraming) -> Self {
        match framing {
            BodyFraming::Length(remaining) => Self::Length { remaining },
            BodyFraming::Chunked => Self::Chunked(ChunkedBody::new()),
            BodyFraming::Connection => Self::Connection { ended: false },
        }
    }

    /// The data in `input`, and the number of bytes read: fewer than all if the body ends before.
    fn decode(&mut self, input: &[u8]) -> Result<(Bytes, usize), NotHttp> {
        match self {
            Self::Length { remaining } => {
                let length = usize::try_from(*remaining).unwrap_or(usize::MAX).min(input.len());
                *remaining -= length as u64;
                Ok((Bytes::copy_from_slice(&input[..length]), length))
            }
            Self::Chunked(chunked) => {
                let mut data = BytesMut::with_capacity(input.len());
                let read = chunked.decode(input, &mut data)?;
                Ok((data.freeze(), read))
            }
            Self::Connection { .. } => Ok((Bytes::copy_from_slice(input), input.len())),
        }
    }
}

impl std::fmt::Display for NotHttp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "did not respond with HTTP: {}", self.0)
    }
}

impl std::error::Error for NotHttp {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, PartialEq)]
    struct Parsed {
        status: u16,
        headers: Vec<(String, Vec<u8>)>,
        body: Vec<u8>,
        is_complete: bool,
        is_usable: bool,
    }

    /// Parses what arrives in these pieces until the connection ends. `None` without a complete head.
    fn parse<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Result<Option<Parsed>, NotHttp> {
        let mut parser = ResponseParser::new(false);
        let (mut head, mut body) = (None, Vec::new());
        for piece in pieces {
            if head.is_some() {
                body.extend_from_slice(&parser.push_body(piece)?);
                continue;
            }
            head = parser.push_head(piece)?;
            if head.is_some() {
                body.extend_from_slice(&parser.take_buffered()?);
            }
        }
        let is_usable = parser.leaves_connection_usable();
        let is_complete = parser.end();
        Ok(head.map(|head| {
            let headers = head.headers().iter();
            let headers = headers.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
            Parsed {
                status: head.status().as_u16(),
                headers: headers.collect(),
                body,
                is_complete,
                is_usable,
            }
        }))
    }

    fn whole(text: &str) -> Parsed {
        parse(std::iter::once(text.as_bytes())).unwrap().unwrap()
    }

    #[test]
    fn a_response_has_the_body_that_its_framing_says() {
        let body = |text: &str| {
            let parsed = whole(text);
            (String::from_utf8(parsed.body).unwrap(), parsed.is_complete, parsed.is_usable)
        };
        let length = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n";
        assert_eq!(body(&format!("{length}abc")), ("abc".to_owned(), true, true));
        assert_eq!(body(&format!("{length}abcd")), ("abc".to_owned(), true, false));
        assert_eq!(body(&format!("{length}ab")), ("ab".to_owned(), false, false));
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n";
        assert_eq!(body(&format!("{chunked}0\r\n\r\n")), ("abc".to_owned(), true, true));
        assert_eq!(body(&format!("{chunked}0\r\n\r\nx")), ("abc".to_owned(), true, false));
        assert_eq!(body(chunked), ("abc".to_owned(), false, false));
        let closed = "HTTP/1.1 200 OK\r\n\r\nabc";
        assert_eq!(body(closed), ("abc".to_owned(), true, false));
        let interim = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n";
        assert_eq!(body(&format!("{interim}{length}abc")), ("abc".to_owned(), true, true));
    }

    #[test]
    fn heads_without_end_are_refused() {
        let first = "HTTP/1.1 200 OK\r\n".as_bytes();
        let line = "x-padding: 0123456789\r\n".as_bytes();
        let pieces =
            || std::iter::once(first).chain(std::iter::repeat_n(line, MAX_HEAD_BYTES / line.len() - 1));
        assert_eq!(parse(pieces()), Ok(None));
        let longer = pieces().chain(std::iter::repeat_n(line, 3));
        assert!(parse(longer).is_err());
        assert!(parse(std::iter::once(&b"220 smtp.example"[..])).is_err(), "another protocol");
        assert_eq!(parse([&b"\r"[..], b"\nHTT", b"P/1.1 2"].into_iter()), Ok(None));
    }

    /// Responses, some of them malformed.
    fn responses() -> impl Strategy<Value = String> {
        let framing = prop_oneof![
            Just(String::new()),
            Just("transfer-encoding: chunked\r\n".to_owned()),
            (0..12_u8).prop_map(|length| format!("Content-Length: {length}\r\n")),
        ];
        let chunk = prop_oneof![
            "[a-f]{1,9}".prop_map(|data| format!("{:x}\r\n{data}\r\n", data.len())),
            "[0-9a]{1,3}\r?\n"
        ];
        let body = (
            prop::collection::vec(chunk, 0..4),
            prop_oneof![Just("0\r\n\r\n"), Just("0\r\na: b\r\n\r\nx"), Just("")],
        );
        let heads =
            prop::collection::vec(prop_oneof![Just("HTTP/1.1 100 Continue\r\n\r\n"), Just("x")], 0..2);
        (
            heads,
            prop_oneof![Just("HTTP/1.1 200 OK"), Just("HTTP/1.0 204 No"), Just("HTTP/1.1")],
            framing,
            body,
        )
            .prop_map(|(heads, status, framing, (chunks, last))| {
                let heads = heads.into_iter().filter(|head| *head != "x").collect::<String>();
                format!("{heads}{status}\r\nx-a: 1\r\n{framing}\r\n{}{last}", chunks.concat())
            })
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_parse_as_the_whole(response in responses(), size in 1..40_usize) {
            let whole = parse(std::iter::once(response.as_bytes()));
            let pieces = parse(response.as_bytes().chunks(size));
            match (whole, pieces) {
                (Ok(whole), Ok(pieces)) => prop_assert_eq!(whole, pieces),
                (whole, pieces) => prop_assert_eq!(whole.is_err(), pieces.is_err()),
            }
        }
    }
}
