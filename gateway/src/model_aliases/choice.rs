//! The weighted choice among an alias's models.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName};
use serde::Deserialize;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};

/// Header by which clients name a conversation.
const SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");

/// What the choice of a model depends on, besides the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChoiceKey {
    /// A conversation or user: all its requests get the same model, from every gateway with the same file.
    Sticky(Vec<u8>),
    /// Entropy of one request.
    Random(u64),
}

/// Members of a body that name a conversation or user. Anthropic's API has the user in `metadata`.
#[derive(Deserialize)]
struct StickyMembers<'a> {
    #[serde(borrow)]
    prompt_cache_key: Option<&'a RawValue>,
    #[serde(borrow)]
    user: Option<&'a RawValue>,
    #[serde(borrow)]
    metadata: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct UserMetadata<'a> {
    #[serde(borrow)]
    user_id: Option<Cow<'a, str>>,
}

impl ChoiceKey {
    /// The first of the body's `prompt_cache_key`, the header `x-session-id`, and the body's `user` and `metadata.user_id`; if the
    /// request has none of them, or they are no texts, `entropy`. `body` is JSON, or empty.
    pub(crate) fn of_request(headers: &HeaderMap, body: &[u8], entropy: u64) -> Self {
        let members = serde_json::from_slice::<StickyMembers<'_>>(body).ok();
        let prompt_cache_key = members.as_ref().and_then(|members| text(members.prompt_cache_key?));
        if let Some(key) = prompt_cache_key {
            return Self::Sticky(key.into_owned().into_bytes());
        }
        if let Some(id) = headers.get(SESSION_ID).filter(|id| !id.is_empty()) {
            return Self::Sticky(id.as_bytes().to_vec());
        }
        let user = members.as_ref().and_then(|members| text(members.user?));
        let user = user.or_else(|| {
            let metadata: UserMetadata<'_> = serde_json::from_str(members.as_ref()?.metadata?.get()).ok()?;
            metadata.user_id.filter(|id| !id.is_empty())
        });
        user.map_or(Self::Random(entropy), |user| Self::Sticky(user.into_owned().into_bytes()))
    }

    /// A number in `0..total` for the choice among the models of `alias`. Different aliases divide the same users differently.
    /// `total` is at least 1.
    pub(super) fn point(&self, alias: &str, total: u64) -> u64 {
        let mut hash = Sha256::new();
        match self {
            Self::Sticky(key) => hash.update(key),
            Self::Random(entropy) => hash.update(entropy.to_le_bytes()),
        }
        // No key contains the separator and the alias of another choice.
        hash.update([0]);
        hash.update(alias.as_bytes());
        let digest: [u8; 32] = hash.finalize().into();
        let bits = digest.iter().take(8).fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte));
        bits % total.max(1)
    }
}

/// A JSON value that is a text with at least one character.
fn text(value: &RawValue) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
    let Text(text) = serde_json::from_str(value.get()).ok()?;
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_most_specific_name_of_a_conversation_is_used() {
        let sticky = |text: &str| ChoiceKey::Sticky(text.as_bytes().to_vec());
        for (session, body, expected) in [
            (None, r#"{"user":"u","prompt_cache_key":"k","metadata":{"user_id":"m"}}"#, sticky("k")),
            (Some("s"), r#"{"user":"u","prompt_cache_key":"k"}"#, sticky("k")),
            (Some("s"), r#"{"user":"u"}"#, sticky("s")),
            (None, r#"{"user":"\u0075","metadata":{"user_id":"m"}}"#, sticky("u")),
            (None, r#"{"metadata":{"user_id":"m","x":1}}"#, sticky("m")),
            (Some(""), r#"{"user":"","metadata":{"user_id":""}}"#, ChoiceKey::Random(7)),
            (None, r#"{"user":7,"prompt_cache_key":null,"metadata":"x"}"#, ChoiceKey::Random(7)),
            (Some("s"), "", sticky("s")),
            (None, "{}", ChoiceKey::Random(7)),
        ] {
            let session = session.map(|id| (SESSION_ID, HeaderValue::from_static(id)));
            let headers = HeaderMap::from_iter(session);
            assert_eq!(ChoiceKey::of_request(&headers, body.as_bytes(), 7), expected, "{body}");
        }
    }

    #[test]
    fn points_follow_the_key_and_the_alias() {
        let points = |alias: &str, keys: std::ops::Range<u64>| -> Vec<u64> {
            keys.map(|key| ChoiceKey::Sticky(key.to_string().into_bytes()).point(alias, 10)).collect()
        };
        assert_eq!(points("a", 0..100), points("a", 0..100));
        assert_ne!(points("a", 0..100), points("b", 0..100));
        let below = points("a", 0..10_000).iter().filter(|point| **point == 0).count();
        assert!((800..1200).contains(&below), "{below} of 10000 with a weight of a tenth");
        assert_eq!(ChoiceKey::Random(3).point("a", 1), 0);
    }
}
