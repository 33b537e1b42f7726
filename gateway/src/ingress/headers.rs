//! Headers that are forwarded from clients to engines.

use http::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::return_hint::RETURN;
use crate::routed_request::random_uuid;

/// Header with the request id, in requests and responses.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// Longest client request id that is accepted.
const MAX_REQUEST_ID_LEN: usize = 128;

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

/// Headers that the gateway sets itself in requests to engines, or that are addressed to it. It requests uncompressed responses, because it could not check
/// compressed ones.
fn is_replaced(name: &HeaderName) -> bool {
    *name == HOST
        || *name == CONTENT_LENGTH
        || *name == EXPECT
        || *name == ACCEPT_ENCODING
        || *name == REQUEST_ID
        || *name == RETURN
}

/// Headers by which a client could choose hosts and ranks for a KV transfer: SGLang's `x-override-*` replace members of the body
/// (including the bootstrap host), both engines read `x-data-parallel-rank`, and llm-d's sidecar, which may run in front of an
/// engine, reads `x-prefiller-*`, `x-encoder-*`, `x-data-parallel-host-port` and `x-kv-cache-source-host-port`.
fn steers_transfer(name: &HeaderName) -> bool {
    const PREFIXES: [&str; 10] = [
        "x-bootstrap-",
        "x-data-parallel-",
        "x-decode",
        "x-disagg",
        "x-ec-transfer",
        "x-encoder-",
        "x-kv-",
        "x-override-",
        "x-prefill",
        "x-routed-dp-",
    ];
    let name = name.as_str();
    name.starts_with("x-") && PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The client's headers as engines get them, and whether headers that steer KV transfer were removed.
pub(crate) fn to_engine(headers: &HeaderMap) -> (HeaderMap, bool) {
    let named_by_connection = connection_tokens(headers);
    let mut out = HeaderMap::with_capacity(headers.len() + 3);
    let mut stripped = false;
    for (name, value) in headers {
        if steers_transfer(name) {
            stripped = true;
        } else if !is_hop_by_hop(name)
            && !is_replaced(name)
            && !named_by_connection.iter().any(|token| token == name.as_str())
        {
            out.append(name.clone(), value.clone());
        }
    }
    (out, stripped)
}

/// Names of headers that the `Connection` header declares hop-by-hop.
fn connection_tokens(headers: &HeaderMap) -> Vec<String> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|text| text.split(',')).map(|token| token.trim().to_ascii_lowercase()).collect()
}

/// The client's request id if it is valid, else a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|id| !id.is_empty() && id.len() <= MAX_REQUEST_ID_LEN);
    given.cloned().unwrap_or_else(|| {
        HeaderValue::try_from(random_uuid()).unwrap_or_else(|_| HeaderValue::from_static("0"))
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
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "a,b"),
            ("traceparent", "00-0-0-01"),
            ("connection", "keep-alive, X-Hop"),
            ("x-hop", "1"),
            ("te", "trailers"),
            ("content-length", "3"),
            ("host", "gateway"),
            ("x-request-id", "mine"),
            ("x-moongate-return", "soon"),
            ("x-data-parallel-rank", "1"),
            ("x-override-bootstrap-host", "evil"),
            ("x-prefiller-host-port", "evil:1"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let (out, stripped) = to_engine(&headers);
        assert!(stripped);
        let mut names: Vec<&str> = out.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        let expected =
            ["anthropic-beta", "anthropic-version", "authorization", "traceparent", "x-foo", "x-session-id"];
        assert_eq!(names, expected);
    }

    #[test]
    fn request_ids_are_kept_if_sane() {
        let mut headers = HeaderMap::new();
        assert_eq!(request_id(&headers).len(), 36);
        headers.insert(REQUEST_ID, HeaderValue::from_static("mine"));
        assert_eq!(request_id(&headers), "mine");
        headers.insert(REQUEST_ID, HeaderValue::try_from("x".repeat(500)).unwrap());
        assert_eq!(request_id(&headers).len(), 36);
    }
}
