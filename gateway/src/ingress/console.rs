//! `/console`: a page that shows the fleet, embedded in the binary. Its source is in `gateway/console`; `docs/console.md` describes
//! it.

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderValue, Response, StatusCode};

const PAGE: &str = include_str!("../../console/dist/index.html");
const SCRIPT: &str = include_str!("../../console/dist/console.js");
const STYLE: &str = include_str!("../../console/dist/console.css");

/// The page loads only its own two files, and sends requests only to this gateway.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'",
);

/// The page's files, all below `/console`. They contain no data and need no authentication.
pub(super) fn pages() -> Router {
    Router::new()
        .route("/console", get(async || file("text/html; charset=utf-8", PAGE)))
        .route("/console/", get(redirect))
        .route("/console/console.js", get(async || file("text/javascript; charset=utf-8", SCRIPT)))
        .route("/console/console.css", get(async || file("text/css; charset=utf-8", STYLE)))
}

/// The page's own links are relative to `/console`.
async fn redirect() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::PERMANENT_REDIRECT;
    response.headers_mut().insert(LOCATION, HeaderValue::from_static("../console"));
    response
}

fn file(kind: &'static str, text: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    // After an upgrade of the gateway, browsers must load the new page.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
