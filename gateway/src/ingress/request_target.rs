//! The path and query of a request, in the canonical form by which the gateway routes and which engines get.
//!
//! Engines' servers decode a path before they look up its handler (uvicorn: `/v1/%63hat%2fcompletions` is `/v1/chat/completions`).
//! If the gateway matched the raw bytes instead, the two could interpret one request differently.

use std::borrow::Cow;

use http::Uri;
use http::uri::{Parts, PathAndQuery};

use crate::request_body::is_transfer_member;

/// Why a request target is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum RequestTargetError {
    #[error("the path has an incomplete percent-escape; write % itself as %25")]
    Escape,
    #[error("the path has invalid characters (control characters, or bytes that are not UTF-8)")]
    NotText,
    #[error("the request has no path")]
    NoPath,
}

/// `uri` with its path in canonical form, and without query parameters that steer KV transfer. `None` if it is canonical already.
pub(super) fn canonical(uri: &Uri) -> Result<Option<Uri>, RequestTargetError> {
    let Some(target) = uri.path_and_query().filter(|target| target.path().starts_with('/')) else {
        return Err(RequestTargetError::NoPath);
    };
    let path = canonical_path(target.path())?;
    let query = target.query().map(without_transfer_parameters);
    let is_same = matches!(path, Cow::Borrowed(_)) && !matches!(query, Some(Cow::Owned(_)));
    if is_same {
        return Ok(None);
    }
    let text = match query.as_deref() {
        None | Some("") => path.into_owned(),
        Some(query) => format!("{path}?{query}"),
    };
    let mut parts = Parts::default();
    parts.path_and_query = Some(PathAndQuery::try_from(text).map_err(|_| RequestTargetError::NotText)?);
    Uri::from_parts(parts).map(Some).map_err(|_| RequestTargetError::NotText)
}

/// Percent-decodes once, removes empty and dot segments and a trailing slash, and escapes characters that a path cannot contain.
/// Borrowed if nothing changes.
pub(super) fn canonical_path(raw: &str) -> Result<Cow<'_, str>, RequestTargetError> {
    if is_canonical(raw) {
        return Ok(Cow::Borrowed(raw));
    }
    let decoded = decode(raw)?;
    let mut segments: Vec<&str> = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    let mut path = String::with_capacity(decoded.len() + 1);
    for segment in segments {
        path.push('/');
        for byte in segment.bytes() {
            if is_plain(byte) {
                path.push(char::from(byte));
            } else {
                const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
                path.push('%');
                path.push(char::from(DIGITS[usize::from(byte >> 4)]));
                path.push(char::from(DIGITS[usize::from(byte & 15)]));
            }
        }
    }
    if path.is_empty() {
        path.push('/');
    }
    Ok(Cow::Owned(path))
}

fn is_canonical(raw: &str) -> bool {
    raw == "/"
        || (raw.bytes().all(|byte| byte == b'/' || is_plain(byte))
            && raw.split('/').skip(1).all(|segment| !matches!(segment, "" | "." | "..")))
}

/// Characters that need no escape in a path segment (RFC 3986, `pchar` without the escapes).
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@".contains(&byte)
}

fn decode(raw: &str) -> Result<String, RequestTargetError> {
    let mut bytes = Vec::with_capacity(raw.len());
    let mut rest = raw.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let (Some(high), Some(low)) = (digit(), digit()) else { return Err(RequestTargetError::Escape) };
        bytes.push(high << 4 | low);
    }
    let text = String::from_utf8(bytes).map_err(|_| RequestTargetError::NotText)?;
    if text.chars().any(char::is_control) { Err(RequestTargetError::NotText) } else { Ok(text) }
}

/// A precaution: no engine reads such parameters from a query today. Borrowed if there are none.
fn without_transfer_parameters(query: &str) -> Cow<'_, str> {
    let is_kept = |pair: &&str| !pair.split(';').any(|pair| is_transfer_member(&name(pair)));
    if query.split('&').all(|pair| is_kept(&pair)) {
        return Cow::Borrowed(query);
    }
    Cow::Owned(query.split('&').filter(is_kept).collect::<Vec<_>>().join("&"))
}

/// The decoded name in `name=value`.
fn name(pair: &str) -> Cow<'_, str> {
    let name = pair.split_once('=').map_or(pair, |(name, _)| name).trim();
    if !name.contains('%') {
        return Cow::Borrowed(name);
    }
    // A name that cannot be decoded matches no member.
    Cow::Owned(decode(name).map(|name| name.trim().to_owned()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rewritten(target: &str) -> String {
        let uri: Uri = target.parse().unwrap();
        canonical(&uri).unwrap().map_or_else(|| target.to_owned(), |uri| uri.to_string())
    }

    #[test]
    fn every_path_has_one_canonical_form() {
        for (raw, expected) in [
            ("/v1/chat/completions", "/v1/chat/completions"),
            ("/v1/chat%2fcompletions", "/v1/chat/completions"),
            ("/v1/%63hat/completions", "/v1/chat/completions"),
            ("//v1///chat/completions/", "/v1/chat/completions"),
            ("/v1/../flush_cache", "/flush_cache"),
            ("/v1/%2e%2E/flush_cache", "/flush_cache"),
            ("/../../v1/./models/.", "/v1/models"),
            ("/v1/chat%252fcompletions", "/v1/chat%252fcompletions"),
            ("/v1/models/a%20b", "/v1/models/a%20b"),
            ("/v1/models/%E6%97%A5", "/v1/models/%E6%97%A5"),
            ("/v1/models/a%3Fb", "/v1/models/a%3Fb"),
            ("/v1/chat/completions%3Fx", "/v1/chat/completions%3Fx"),
            ("/V1/Chat", "/V1/Chat"),
            ("/", "/"),
            ("/%2f", "/"),
            ("/a?b=%2e./../c", "/a?b=%2e./../c"),
            ("/a%2eb?x=1", "/a.b?x=1"),
            ("http://host/v1//models", "/v1/models"),
            ("/a?routed_dp_rank=1", "/a"),
            ("/a?x=1&kv%5ftransfer_params=%7B%7D&y", "/a?x=1&y"),
            ("/a?x=1;bootstrap_host=b&y", "/a?y"),
        ] {
            assert_eq!(rewritten(raw), expected, "{raw}");
        }
        for (raw, error) in [
            ("/v1/%", RequestTargetError::Escape),
            ("/v1/%4", RequestTargetError::Escape),
            ("/v1/%zz", RequestTargetError::Escape),
            ("/v1/%00", RequestTargetError::NotText),
            ("/v1/chat%0d%0a", RequestTargetError::NotText),
            ("/v1/%ff", RequestTargetError::NotText),
            ("*", RequestTargetError::NoPath),
            ("host:80", RequestTargetError::NoPath),
        ] {
            assert_eq!(canonical(&raw.parse().unwrap()), Err(error), "{raw}");
        }
    }

    proptest! {
        /// Engines decode exactly the path that the gateway has matched.
        #[test]
        fn the_canonical_form_is_stable(raw in "(/|[a.]|%2[eEfF5]|%6[13]|%C3%A9|é){0,12}") {
            let path = format!("/{raw}");
            let Ok(once) = canonical_path(&path) else { return Ok(()) };
            prop_assert_eq!(canonical_path(&once).unwrap(), once.clone());
            let decoded = decode(&once).unwrap();
            prop_assert!(!decoded.contains("//"), "{}", decoded);
            prop_assert!(decoded.split('/').all(|segment| segment != "." && segment != ".."), "{}", decoded);
        }
    }
}
