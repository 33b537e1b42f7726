//! Head of an engine's HTTP/1 response: status, headers, and where the body ends (RFC 9112).

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

use super::response_parser::NotHttp;

/// Most headers of a response.
const MAX_HEADERS: usize = 128;

/// The head of a response that is not an interim one.
#[derive(Debug)]
pub(super) struct ResponseHead {
    pub(super) response: Response<()>,
    pub(super) framing: BodyFraming,
    /// Whether the engine keeps the connection open for another request.
    pub(super) keeps_connection: bool,
}

/// Where a body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyFraming {
    /// After this many bytes.
    Length(u64),
    Chunked,
    /// Where the connection ends.
    Connection,
}

/// A complete head in the received bytes.
#[derive(Debug)]
pub(super) enum ReceivedHead {
    /// `100 Continue` and the like: the response follows.
    Interim,
    Final(ResponseHead),
}

/// The head at the start of `received`, with its length in bytes; `None` if its end has not been received. `has_no_body` is set for the
/// response to a HEAD request.
pub(super) fn parse(received: &[u8], has_no_body: bool) -> Result<Option<(ReceivedHead, usize)>, NotHttp> {
    let mut headers = [const { MaybeUninit::uninit() }; MAX_HEADERS];
    let mut parsed = httparse::Response::new(&mut []);
    let status = httparse::ParserConfig::default()
        .parse_response_with_uninit_headers(&mut parsed, received, &mut headers)
        .map_err(|error| match error {
            httparse::Error::TooManyHeaders => NotHttp("more than 128 headers"),
            _ => NotHttp("the start of its response is not that of HTTP/1"),
        })?;
    let httparse::Status::Complete(length) = status else { return Ok(None) };
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or(NotHttp("its status is not one of HTTP"))?;
    if status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(NotHttp("it switched to another protocol, which was not requested"));
    }
    if status.is_informational() {
        return Ok(Some((ReceivedHead::Interim, length)));
    }
    let is_http_1_1 = parsed.version == Some(1);
    // Copied once for all values: a slice of the received bytes would keep the start of the body, too.
    let bytes = Bytes::copy_from_slice(&received[..length]);
    let mut map = HeaderMap::with_capacity(parsed.headers.len());
    for header in parsed.headers.iter() {
        let start = header.value.as_ptr() as usize - received.as_ptr() as usize;
        let value = bytes.slice(start..start + header.value.len());
        let name = HeaderName::from_bytes(header.name.as_bytes());
        let value = HeaderValue::from_maybe_shared(value);
        let (Ok(name), Ok(value)) = (name, value) else { return Err(NotHttp("a header is invalid")) };
        map.append(name, value);
    }
    let has_no_body = has_no_body || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED;
    let framing = if has_no_body { BodyFraming::Length(0) } else { framing(&map, is_http_1_1)? };
    let is_ambiguous = map.contains_key(TRANSFER_ENCODING) && map.contains_key(CONTENT_LENGTH);
    let keeps_connection = framing != BodyFraming::Connection
        && !is_ambiguous
        && if is_http_1_1 { !has_option(&map, "close") } else { has_option(&map, "keep-alive") };
    let mut response = Response::new(());
    *response.status_mut() = status;
    *response.headers_mut() = map;
    Ok(Some((ReceivedHead::Final(ResponseHead { response, framing, keeps_connection }), length)))
}

/// Whether the header `Connection` has this option.
fn has_option(headers: &HeaderMap, option: &str) -> bool {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|one| one.trim().eq_ignore_ascii_case(option))
}

/// RFC 9112, section 6.3.
fn framing(headers: &HeaderMap, is_http_1_1: bool) -> Result<BodyFraming, NotHttp> {
    if let Some(codings) = headers.get_all(TRANSFER_ENCODING).iter().next_back() {
        if !is_http_1_1 {
            return Err(NotHttp("a response of HTTP/1.0 has a transfer encoding"));
        }
        let last = codings.to_str().ok().and_then(|codings| codings.rsplit(',').next());
        let is_chunked = last.is_some_and(|last| last.trim().eq_ignore_ascii_case("chunked"));
        return Ok(if is_chunked { BodyFraming::Chunked } else { BodyFraming::Connection });
    }
    let mut length = None;
    for value in headers.get_all(CONTENT_LENGTH) {
        for one in value.to_str().unwrap_or_default().split(',') {
            let one = one.trim();
            // A sign is not allowed.
            let parsed = one.bytes().all(|byte| byte.is_ascii_digit()).then(|| one.parse::<u64>().ok());
            let parsed = parsed.flatten().ok_or(NotHttp("its content length is not a number"))?;
            if length.replace(parsed).is_some_and(|before| before != parsed) {
                return Err(NotHttp("it has two different content lengths"));
            }
        }
    }
    Ok(length.map_or(BodyFraming::Connection, BodyFraming::Length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Result<ResponseHead, &'static str> {
        match parse(text.as_bytes(), false) {
            Ok(Some((ReceivedHead::Final(head), length))) => {
                assert_eq!(length, text.len());
                Ok(head)
            }
            Ok(other) => panic!("{other:?}"),
            Err(NotHttp(what)) => Err(what),
        }
    }

    #[test]
    fn the_end_of_the_body_follows_from_the_head() {
        for (headers, framing, keeps) in [
            ("", BodyFraming::Connection, false),
            ("Content-Length: 5\r\n", BodyFraming::Length(5), true),
            ("Content-Length: 5, 5\r\nContent-Length: 5\r\n", BodyFraming::Length(5), true),
            ("Content-Length: 5\r\nConnection: x, Close\r\n", BodyFraming::Length(5), false),
            ("Transfer-Encoding: chunked\r\n", BodyFraming::Chunked, true),
            ("Transfer-Encoding: gzip, Chunked\r\n", BodyFraming::Chunked, true),
            ("Transfer-Encoding: gzip\r\n", BodyFraming::Connection, false),
            ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", BodyFraming::Chunked, false),
        ] {
            let head = head(&format!("HTTP/1.1 200 OK\r\n{headers}\r\n")).unwrap();
            assert_eq!((head.framing, head.keeps_connection), (framing, keeps), "{headers}");
        }
        let old = |headers: &str| head(&format!("HTTP/1.0 200 OK\r\nContent-Length: 0\r\n{headers}\r\n"));
        assert!(!old("").unwrap().keeps_connection);
        assert!(old("Connection: keep-alive\r\n").unwrap().keeps_connection);
        for (status, has_no_body) in [("200", true), ("204", false), ("304", false)] {
            let text = format!("HTTP/1.1 {status} -\r\nContent-Length: 9\r\n\r\n");
            let Ok(Some((ReceivedHead::Final(head), _))) = parse(text.as_bytes(), has_no_body) else {
                panic!("{text}")
            };
            assert_eq!(head.framing, BodyFraming::Length(0), "{status}");
        }
    }

    #[test]
    fn invalid_heads_are_refused() {
        for text in [
            "SSH-2.0-OpenSSH\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
            "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            "HTTP/1.1 101 Switching\r\n\r\n",
            "HTTP/1.1 099 Odd\r\n\r\n",
            "HTTP/1.1 200 OK\r\nbad header: 1\r\n\r\n",
            &format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: 1\r\n".repeat(MAX_HEADERS + 1)),
        ] {
            assert!(head(text).is_err(), "{text}");
        }
    }

    #[test]
    fn heads_are_awaited_to_their_end() {
        let text = "HTTP/1.1 200 OK\r\nx-request-id: a\r\nX-Other: \u{e9}\r\n\r\n";
        for end in 0..text.len() {
            assert!(matches!(parse(&text.as_bytes()[..end], false), Ok(None)), "{end}");
        }
        let head = head(text).unwrap();
        assert_eq!(head.response.headers()["x-request-id"], "a");
        assert_eq!(head.response.headers()["x-other"].as_bytes(), "\u{e9}".as_bytes());
        let interim = parse(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", false);
        assert!(matches!(interim, Ok(Some((ReceivedHead::Interim, 25)))));
    }
}
