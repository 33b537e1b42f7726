//! Cross-origin requests of browsers: rejected where they change state, and at the public listener allowed for the configured
//! origins (CORS).

use std::str::FromStr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HOST, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};

use super::handler::GatewayContext;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE");
/// Response headers that pages may read.
const EXPOSED: HeaderValue = HeaderValue::from_static("x-request-id, retry-after");
/// How long a browser may cache the response to a preflight, in seconds; Chromium caps it at two hours.
const MAX_AGE: HeaderValue = HeaderValue::from_static("7200");

/// An origin whose pages may send requests, or `*` for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorsOrigin(String);

/// The text is not an origin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an origin; give one as browsers send it, such as https://chat.example, or * for all")]
pub struct CorsOriginError(String);

impl FromStr for CorsOrigin {
    type Err = CorsOriginError;

    fn from_str(text: &str) -> Result<Self, CorsOriginError> {
        let is_origin = url::Url::parse(text).is_ok_and(|url| {
            matches!(url.scheme(), "http" | "https")
                && url.origin().ascii_serialization() == text
                && !text.contains('*')
        });
        if text == "*" || is_origin {
            return Ok(Self(text.to_owned()));
        }
        Err(CorsOriginError(text.to_owned()))
    }
}

impl CorsOrigin {
    fn allows(&self, origin: &HeaderValue) -> bool {
        self.0 == "*" || self.0.as_bytes() == origin.as_bytes()
    }
}

/// Public listener with configured origins: answers preflights of allowed origins, and lets their pages read responses.
pub(super) async fn apply_cors(
    State(gateway): State<Arc<GatewayContext>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let allowed = &gateway.cors_origins;
    let origin = request
        .headers()
        .get(ORIGIN)
        .filter(|origin| allowed.iter().any(|allowed_origin| allowed_origin.allows(origin)))
        .cloned();
    let is_preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &origin {
        Some(_) if is_preflight => preflight(request.headers()),
        _ => next.run(request).await,
    };
    let headers = response.headers_mut();
    // A response without the CORS headers must not be cached for an allowed origin.
    headers.append(VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    response
}

fn preflight(request_headers: &HeaderMap) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    if let Some(names) = request_headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    response
}

/// Admin listener: a page of another site can make a browser on this machine send a simple request. Only reads are allowed.
pub(super) async fn reject_cross_origin(
    State(gateway): State<Arc<GatewayContext>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let only_reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if !only_reads && is_cross_origin(request.headers()) {
        gateway.metrics.refusals.record_rejected("cross_origin");
        let text = "cross-origin request rejected; the admin listener accepts requests that change state only from its own pages and from programs";
        return ApiError::new(ApiErrorCode::InsufficientPermissions, text).response(ErrorFormat::OpenAi);
    }
    next.run(request).await
}

fn is_cross_origin(headers: &HeaderMap) -> bool {
    let site = headers.get(SEC_FETCH_SITE).map(HeaderValue::as_bytes);
    if site.is_some_and(|site| !matches!(site, b"same-origin" | b"none")) {
        return true;
    }
    let Some(origin) = headers.get(ORIGIN) else { return false };
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let origin_host = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, host)| host);
    origin_host.is_none() || origin_host != host
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_as_browsers_send_them() {
        for good in ["*", "http://localhost:3000", "https://chat.example"] {
            assert!(good.parse::<CorsOrigin>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "chat.example",
            "https://chat.example/",
            "https://chat.example:443",
            "ftp://a",
            "null",
            "https://*.example",
        ] {
            assert!(bad.parse::<CorsOrigin>().is_err(), "{bad}");
        }
        let allowed_origin: CorsOrigin = "https://chat.example".parse().unwrap();
        assert!(allowed_origin.allows(&HeaderValue::from_static("https://chat.example")));
        assert!(!allowed_origin.allows(&HeaderValue::from_static("https://chat.example.evil")));
        assert!(!allowed_origin.allows(&HeaderValue::from_static("http://chat.example")));
    }

    #[test]
    fn cross_origin_pages_are_distinguished() {
        let is_foreign = |pairs: &[(&'static str, &'static str)]| {
            let pairs = pairs
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
            is_cross_origin(&pairs.collect())
        };
        assert!(!is_foreign(&[("host", "a:9000")]));
        assert!(!is_foreign(&[
            ("host", "a:9000"),
            ("origin", "http://a:9000"),
            ("sec-fetch-site", "same-origin")
        ]));
        assert!(is_foreign(&[("host", "a:9000"), ("origin", "http://evil")]));
        assert!(is_foreign(&[("host", "a:9000"), ("origin", "null")]));
        assert!(is_foreign(&[("host", "a:9000"), ("origin", "http://a:8000")]));
        assert!(is_foreign(&[("host", "a:9000"), ("sec-fetch-site", "cross-site")]));
        assert!(is_foreign(&[("host", "a:9000"), ("sec-fetch-site", "same-site")]));
    }
}
