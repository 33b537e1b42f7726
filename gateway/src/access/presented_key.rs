//! The key that a client presents: `Authorization: Bearer KEY`, as OpenAI's SDKs send it, or `x-api-key: KEY`, as Anthropic's do.

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};

/// Header in which Anthropic's SDKs send the key.
pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

const BEARER: &[u8] = b"bearer ";

/// Why the headers name no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum PresentedKeyError {
    #[error("no API key was sent; send it as `authorization: Bearer KEY` or `x-api-key: KEY`")]
    Missing,
    /// Engines and proxies may read another one of them than the gateway.
    #[error(
        "`authorization` and `x-api-key` were sent with different keys; send one of them, or the same key in both"
    )]
    Conflicting,
}

/// The one key of all `Authorization` and `x-api-key` headers. An `Authorization` of another scheme counts as a different key.
pub(super) fn presented_key(headers: &HeaderMap) -> Result<&[u8], PresentedKeyError> {
    let tokens = headers.get_all(AUTHORIZATION).iter().map(bearer_token);
    let keys = headers.get_all(API_KEY).iter().map(|value| value.as_bytes().trim_ascii());
    let mut presented = tokens.chain(keys);
    let first = presented.next().ok_or(PresentedKeyError::Missing)?;
    if presented.any(|other| other != first) {
        return Err(PresentedKeyError::Conflicting);
    }
    if first.is_empty() { Err(PresentedKeyError::Missing) } else { Ok(first) }
}

/// Empty if it is not a bearer token.
fn bearer_token(value: &HeaderValue) -> &[u8] {
    match value.as_bytes().split_at_checked(BEARER.len()) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(BEARER) => token.trim_ascii(),
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_may_be_in_either_header_or_equal_in_both() {
        use PresentedKeyError::{Conflicting, Missing};
        const AUTH: &str = "authorization";
        const KEY: &str = "x-api-key";
        for (headers, expected) in [
            (&[] as &[(&'static str, &'static str)], Err(Missing)),
            (&[(AUTH, "Bearer k1")], Ok("k1")),
            (&[(AUTH, "bearer  k1 ")], Ok("k1")),
            (&[(KEY, "k1")], Ok("k1")),
            (&[(AUTH, "Bearer k1"), (KEY, "k1")], Ok("k1")),
            (&[(AUTH, "Bearer k1"), (KEY, "k2")], Err(Conflicting)),
            (&[(AUTH, "Basic azE="), (KEY, "k1")], Err(Conflicting)),
            (&[(KEY, "k1"), (KEY, "k2")], Err(Conflicting)),
            (&[(AUTH, "Bearer k1"), (AUTH, "Bearer k2")], Err(Conflicting)),
            (&[(AUTH, "Basic azE=")], Err(Missing)),
            (&[(AUTH, "Bearer ")], Err(Missing)),
            (&[(KEY, "")], Err(Missing)),
        ] {
            let pairs = headers
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
            let mut map = HeaderMap::new();
            for (name, value) in pairs {
                map.append(name, value);
            }
            assert_eq!(presented_key(&map), expected.map(str::as_bytes), "{headers:?}");
        }
    }
}
