//! How a request names its session.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use http::HeaderMap;

use crate::request_body::{RoutingFields, session_hash};

/// Headers by which agents and other gateways name a session, the narrowest first.
const HEADERS: [&str; 6] = [
    "x-session-id",
    "session_id",
    "session-id",
    "x-claude-code-session-id",
    "conversation_id",
    "x-conversation-id",
];
/// Longest value that counts; longer ones are no ids.
const MAX_LEN: usize = 512;

/// The session of a request: by a header, or else by its body. Sessions of two tenants are never the same.
pub(crate) fn session(headers: &HeaderMap, fields: &RoutingFields<'_>, tenant: Option<u64>) -> Option<u64> {
    let in_header = HEADERS.into_iter().find_map(|name| {
        let value = headers.get(name)?.to_str().ok()?.trim();
        (!value.is_empty() && value.len() <= MAX_LEN).then(|| session_hash(value))
    });
    let name = in_header.or(fields.session)?;
    let mut hasher = DefaultHasher::new();
    (tenant, name).hash(&mut hasher);
    Some(hasher.finish())
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;
    use crate::request_body::InferenceApi;

    #[test]
    fn headers_count_more_than_members() {
        let body = br#"{"messages":[{}],"prompt_cache_key":"k"}"#;
        let fields = RoutingFields::read(InferenceApi::Chat, body).unwrap();
        let with = |name: &'static str, value: &'static str| {
            let headers =
                HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static(value))]);
            session(&headers, &fields, None).unwrap()
        };
        let in_body = session(&HeaderMap::new(), &fields, None).unwrap();
        assert_ne!(with("x-session-id", "s"), in_body);
        assert_eq!(with("x-session-id", "s"), with("session_id", "s"));
        assert_eq!(with("x-session-id", "k"), in_body, "one name, one session");
        assert_eq!(with("x-session-id", " "), in_body);
        assert_eq!(with("x-other", "s"), in_body);
        assert_ne!(session(&HeaderMap::new(), &fields, Some(1)).unwrap(), in_body, "another tenant");
        let none = RoutingFields::read(InferenceApi::Chat, br#"{"messages":[{}]}"#).unwrap();
        assert_eq!(session(&HeaderMap::new(), &none, Some(1)), None);
    }
}
