//! Which headers cross the gateway.

use http::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue};

/// The request id of clients and responses.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// Longest client request id that is taken over.
const LONGEST_REQUEST_ID: usize = 128;

/// Headers that belong to one connection, not to the message (RFC 9110, section 7.6.1).
fn is_hop_by_hop(name: &HeaderName) -> bool {
    *name == CONNECTION
        || *name == KEEP_ALIVE
        || *name == PROXY_AUTHENTICATE
        || *name == PROXY_AUTHORIZATION
        || *name == TE
        || *name == TRAILER
        || *name == TRANSFER_ENCODING
        || *name == UPGRADE
}

/// Headers that the gateway sets itself on the way to an engine. `x-request-id` becomes vLLM's own id of the request, which
/// must be unique, and the data-parallel rank is part of the decision. Compressed answers could not be checked.
fn is_replaced(name: &HeaderName) -> bool {
    *name == HOST
        || *name == CONTENT_LENGTH
        || *name == EXPECT
        || *name == ACCEPT_ENCODING
        || *name == REQUEST_ID
        || name.as_str() == "x-data-parallel-rank"
}

/// The client's headers as engines get them.
pub(crate) fn to_engine(headers: &HeaderMap) -> HeaderMap {
    let named_by_connection = connection_tokens(headers);
    let mut out = HeaderMap::with_capacity(headers.len() + 3);
    for (name, value) in headers {
        if !is_hop_by_hop(name)
            && !is_replaced(name)
            && !named_by_connection.iter().any(|token| token == name.as_str())
        {
            out.append(name.clone(), value.clone());
        }
    }
    out
}

/// Header names that `Connection` declares to be of this hop only.
fn connection_tokens(headers: &HeaderMap) -> Vec<String> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|text| text.split(',')).map(|token| token.trim().to_ascii_lowercase()).collect()
}

/// An engine's response headers as clients get them. Length and framing are the server's own.
pub(crate) fn to_client(headers: &mut HeaderMap) {
    for name in
        [CONNECTION, KEEP_ALIVE, PROXY_AUTHENTICATE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, CONTENT_LENGTH]
    {
        headers.remove(name);
    }
}

/// The client's request id if it can be shown back, otherwise a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|id| !id.is_empty() && id.len() <= LONGEST_REQUEST_ID);
    given.cloned().unwrap_or_else(|| {
        let id = format!("{:032x}", fastrand::u128(..));
        HeaderValue::try_from(id).unwrap_or_else(|_| HeaderValue::from_static("0"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn custom_headers_cross_and_connection_headers_do_not() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("x-foo", "1"),
            ("x-session-id", "s"),
            ("authorization", "Bearer k"),
            ("traceparent", "00-0-0-01"),
            ("connection", "keep-alive, X-Hop"),
            ("x-hop", "1"),
            ("te", "trailers"),
            ("content-length", "3"),
            ("host", "gateway"),
            ("x-request-id", "mine"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let out = to_engine(&headers);
        let mut names: Vec<&str> = out.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "traceparent", "x-foo", "x-session-id"]);
    }

    #[test]
    fn request_ids_are_kept_if_sane() {
        let mut headers = HeaderMap::new();
        assert_eq!(request_id(&headers).len(), 32);
        headers.insert(REQUEST_ID, HeaderValue::from_static("mine"));
        assert_eq!(request_id(&headers), "mine");
        headers.insert(REQUEST_ID, HeaderValue::try_from("x".repeat(500)).unwrap());
        assert_eq!(request_id(&headers).len(), 32);
    }
}
