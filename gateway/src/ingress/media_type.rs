//! Media type and encoding of a body, and which of them are rejected.

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};

use crate::error::{ApiError, ApiErrorCode};

/// How a body is parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MediaType {
    /// `application/json`, or a type with the suffix `+json`.
    Json,
    Form,
    UrlEncoded,
    /// Missing or another type. Engines may parse it as JSON nevertheless.
    Other,
}

impl MediaType {
    /// Reads the type from the headers.
    ///
    /// # Errors
    ///
    /// More than one `Content-Type`: the engine could use the other one.
    pub(super) fn of(headers: &HeaderMap) -> Result<Self, ApiError> {
        let mut values = headers.get_all(CONTENT_TYPE).iter();
        let (first, second) = (values.next(), values.next());
        if second.is_some() {
            return Err(ApiError::new(
                ApiErrorCode::InvalidRequest,
                "the request has more than one Content-Type; send one",
            ));
        }
        let text = first.and_then(|value| value.to_str().ok()).unwrap_or_default();
        let essence = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        Ok(match essence.as_str() {
            "application/json" => Self::Json,
            "multipart/form-data" => Self::Form,
            "application/x-www-form-urlencoded" => Self::UrlEncoded,
            other if other.starts_with("application/") && other.ends_with("+json") => Self::Json,
            _ => Self::Other,
        })
    }
}

/// Rejects compressed bodies: neither the engines nor the gateway decompress them.
pub(super) fn check_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let coded = headers.get_all(CONTENT_ENCODING).iter().find(|value| {
        let text = value.to_str().unwrap_or("?");
        !text.split(',').all(|coding| matches!(coding.trim().to_ascii_lowercase().as_str(), "" | "identity"))
    });
    match coded {
        None => Ok(()),
        Some(coding) => {
            let text = format!(
                "the body is compressed (Content-Encoding: {}), which is not supported; send it as it is",
                String::from_utf8_lossy(coding.as_bytes()).escape_debug()
            );
            Err(ApiError::new(ApiErrorCode::UnsupportedMediaType, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn types_are_distinguished() {
        for (text, expected) in [
            ("application/json", MediaType::Json),
            ("Application/JSON ; charset=utf-8", MediaType::Json),
            ("application/vnd.api+json", MediaType::Json),
            ("application/jsonp", MediaType::Other),
            ("text/json", MediaType::Other),
            ("multipart/form-data; boundary=x", MediaType::Form),
            ("multipart/mixed", MediaType::Other),
            ("application/x-www-form-urlencoded", MediaType::UrlEncoded),
        ] {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(text))]);
            assert_eq!(MediaType::of(&headers).unwrap(), expected, "{text}");
        }
        assert_eq!(MediaType::of(&HeaderMap::new()).unwrap(), MediaType::Other);
        let mut two = HeaderMap::new();
        two.append(CONTENT_TYPE, HeaderValue::from_static("multipart/form-data"));
        two.append(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        assert_eq!(MediaType::of(&two).unwrap_err().code, ApiErrorCode::InvalidRequest);
    }

    #[test]
    fn compressed_bodies_are_named() {
        for (text, good) in
            [("identity", true), ("", true), ("gzip", false), ("identity, br", false), ("GZIP", false)]
        {
            let headers = HeaderMap::from_iter([(CONTENT_ENCODING, HeaderValue::from_static(text))]);
            assert_eq!(check_encoding(&headers).is_ok(), good, "{text}");
        }
    }
}
