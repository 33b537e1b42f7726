//! The query string of a URL.

use std::borrow::Cow;
use std::convert::Infallible;

use axum::extract::FromRequestParts;
use http::request::Parts;
use percent_encoding::percent_decode_str;

/// `a=1&b=2`, not decoded. Of several members with the same name the first one is used.
#[derive(Clone, Debug, Default)]
pub(crate) struct QueryString(String);

impl<S: Sync> FromRequestParts<S> for QueryString {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.uri.query().unwrap_or_default().to_owned()))
    }
}

impl QueryString {
    /// A member without percent-decoding: Mooncake does not decode some of them.
    pub(crate) fn raw(&self, name: &str) -> Option<&str> {
        let pairs = self.0.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        pairs.into_iter().find(|(candidate, _)| *candidate == name).map(|(_, value)| value)
    }

    /// A percent-decoded member. Invalid UTF-8 is replaced. An empty value is `None`.
    pub(crate) fn decoded(&self, name: &str) -> Option<Cow<'_, str>> {
        let value = self.raw(name).filter(|value| !value.is_empty())?;
        Some(percent_decode_str(value).decode_utf8_lossy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_member_of_a_name_is_used() {
        let query = QueryString("a=1&key=x%2Fy%2C2&key=z&empty=&bare".to_owned());
        assert_eq!((query.raw("key"), query.decoded("key").as_deref()), (Some("x%2Fy%2C2"), Some("x/y,2")));
        assert_eq!((query.raw("empty"), query.decoded("empty")), (Some(""), None));
        assert_eq!((query.raw("bare"), query.raw("none")), (Some(""), None));
        assert_eq!(QueryString("k=%ff%zz%2".to_owned()).decoded("k").as_deref(), Some("\u{fffd}%zz%2"));
    }
}
