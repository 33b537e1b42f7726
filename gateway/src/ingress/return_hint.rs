//! Clients' hints whether the prefix of a prompt will be used again.

use http::{HeaderMap, HeaderName};
use mooncake_wire::admin::ReturnHint;

use crate::error::{ApiError, ApiErrorCode};
use crate::feedback::{HintSource, PromptHint};
use crate::request_body::RoutingFields;

/// Header with the hint: `never`, `soon`, or a number of seconds.
pub(super) const RETURN: HeaderName = HeaderName::from_static("x-moongate-return");

/// The client's hint, if it sends one: the header, which clients send only for this purpose, or members of the body by which they
/// ask other services to keep a prompt.
///
/// # Errors
/// [`ApiErrorCode::InvalidRequest`] for any other value of the header.
pub(super) fn return_hint(
    headers: &HeaderMap,
    fields: &RoutingFields<'_>,
) -> Result<Option<PromptHint>, ApiError> {
    if let Some(returns) = header_hint(headers)? {
        return Ok(Some(PromptHint { returns, source: HintSource::Header }));
    }
    let in_body = PromptHint { returns: ReturnHint::Expected, source: HintSource::Body };
    Ok(fields.wants_prompt_cached.then_some(in_body))
}

fn header_hint(headers: &HeaderMap) -> Result<Option<ReturnHint>, ApiError> {
    let Some(value) = headers.get(RETURN) else { return Ok(None) };
    match value.as_bytes() {
        b"never" => Ok(Some(ReturnHint::Never)),
        b"soon" => Ok(Some(ReturnHint::Expected)),
        seconds if is_decimal(seconds) => Ok(Some(ReturnHint::Expected)),
        other => {
            let other = String::from_utf8_lossy(other);
            let text = format!("`{RETURN}` must be `never`, `soon` or a number of seconds, not {other:?}");
            Err(ApiError::new(ApiErrorCode::InvalidRequest, text).param(RETURN.as_str()))
        }
    }
}

fn is_decimal(text: &[u8]) -> bool {
    let digits = text.iter().filter(|byte| byte.is_ascii_digit()).count();
    digits > 0 && text.iter().all(|byte| byte.is_ascii_digit() || *byte == b'.') && text.len() - digits <= 1
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;
    use crate::error::ErrorFormat;

    fn hint(value: &'static [u8]) -> Result<Option<ReturnHint>, ApiError> {
        header_hint(&HeaderMap::from_iter([(RETURN, HeaderValue::from_bytes(value).unwrap())]))
    }

    #[test]
    fn hints_are_words_or_seconds() {
        assert_eq!(header_hint(&HeaderMap::new()).unwrap(), None);
        assert_eq!(hint(b"never").unwrap(), Some(ReturnHint::Never));
        for value in ["soon", "0", "300", "2.5"] {
            assert_eq!(hint(value.as_bytes()).unwrap(), Some(ReturnHint::Expected), "{value}");
        }
        for value in [&b""[..], b"maybe", b"-1", b"1.2.3", b".", b"\xff", b"Never", b"1e3"] {
            let error = hint(value).unwrap_err();
            assert!(
                error.json(ErrorFormat::OpenAi).contains("`never`, `soon` or a number of seconds"),
                "{}",
                error.json(ErrorFormat::OpenAi)
            );
        }
    }

    #[test]
    fn the_header_counts_more_than_the_body() {
        let never = HeaderMap::from_iter([(RETURN, HeaderValue::from_static("never"))]);
        let fields = |wants_prompt_cached| {
            let mut fields = RoutingFields::default();
            fields.wants_prompt_cached = wants_prompt_cached;
            fields
        };
        let in_header = PromptHint { returns: ReturnHint::Never, source: HintSource::Header };
        let in_body = PromptHint { returns: ReturnHint::Expected, source: HintSource::Body };
        assert_eq!(return_hint(&never, &fields(true)).unwrap(), Some(in_header));
        assert_eq!(return_hint(&HeaderMap::new(), &fields(true)).unwrap(), Some(in_body));
        assert_eq!(return_hint(&HeaderMap::new(), &fields(false)).unwrap(), None);
    }
}
