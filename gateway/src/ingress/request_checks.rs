//! Checks of every request before it is routed: one `Host`, and at the public listener a path in canonical form.

use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use futures_util::future::Either;
use http::header::HOST;
use http::uri::Authority;
use http::{HeaderMap, Request, Response, Version};
use tower::Service;

use super::headers::{REQUEST_ID, request_id};
use super::request_target;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};
use crate::feedback::GatewayMetrics;

/// A router behind these checks.
#[derive(Debug, Clone)]
pub(crate) struct RequestChecks<S> {
    inner: S,
    canonical_paths: bool,
    metrics: Arc<GatewayMetrics>,
}

impl<S> RequestChecks<S> {
    /// Routes requests by their path's canonical form, which engines get too.
    pub(super) fn with_canonical_paths(inner: S, metrics: Arc<GatewayMetrics>) -> Self {
        Self { inner, canonical_paths: true, metrics }
    }

    /// Routes requests by their path as received.
    pub(super) fn new(inner: S, metrics: Arc<GatewayMetrics>) -> Self {
        Self { inner, canonical_paths: false, metrics }
    }

    fn check<B>(&self, request: &mut Request<B>) -> Result<(), ApiError> {
        let reject = |reason, text: String| {
            self.metrics.refusals.record_rejected(reason);
            ApiError::new(ApiErrorCode::InvalidRequest, text)
        };
        check_host(request.version(), request.headers())
            .map_err(|text| reject("invalid_host", text.to_owned()))?;
        if self.canonical_paths {
            let canonical = request_target::canonical(request.uri())
                .map_err(|error| reject("invalid_path", error.to_string()))?;
            if let Some(uri) = canonical {
                *request.uri_mut() = uri;
            }
        }
        Ok(())
    }
}

impl<S, B> Service<Request<B>> for RequestChecks<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<Ready<Result<Response<Body>, S::Error>>, S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        match self.check(&mut request) {
            Ok(()) => Either::Right(self.inner.call(request)),
            Err(error) => {
                let mut response = error.response(ErrorFormat::of_path(request.uri().path()));
                response.headers_mut().insert(REQUEST_ID, request_id(request.headers()));
                Either::Left(ready(Ok(response)))
            }
        }
    }
}

/// RFC 9112, section 3.2. If two proxies use different ones of two hosts, an attacker can exploit the difference.
fn check_host(version: Version, headers: &HeaderMap) -> Result<(), &'static str> {
    let mut hosts = headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (_, Some(_)) => Err("the request has more than one Host header; send exactly one"),
        (None, None) if version == Version::HTTP_11 => {
            Err("the request has no Host header, which HTTP/1.1 requires; send one")
        }
        (Some(host), None) if !host.is_empty() && !is_host(host.as_bytes()) => {
            Err("the Host header is not a host with an optional port; send one such as gateway:8000")
        }
        _ => Ok(()),
    }
}

fn is_host(value: &[u8]) -> bool {
    // Nearly every host is a simple name or address and needs no parser.
    let is_simple = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    let name = value.iter().position(|byte| *byte == b':').map_or(value, |colon| &value[..colon]);
    let port = value.get(name.len() + 1..).unwrap_or_default();
    if !name.is_empty()
        && name.iter().all(is_simple)
        && port.len() <= 5
        && port.iter().all(u8::is_ascii_digit)
    {
        return true;
    }
    Authority::try_from(value).is_ok_and(|authority| !authority.as_str().contains(['@', ',']))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn exactly_one_valid_host_is_required() {
        let check = |version, hosts: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(HOST, HeaderValue::from_static(host));
            }
            check_host(version, &headers).is_ok()
        };
        for host in ["gateway", "gateway:8000", "10.0.0.1:80", "[::1]:80", "my_host", ""] {
            assert!(check(Version::HTTP_11, &[host]), "{host}");
        }
        for host in ["a b", "a/b", "a@b", "a,b", "http://a"] {
            assert!(!check(Version::HTTP_11, &[host]), "{host}");
        }
        assert!(!check(Version::HTTP_11, &[]) && check(Version::HTTP_10, &[]) && check(Version::HTTP_2, &[]));
        for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2] {
            assert!(!check(version, &["a", "a"]), "{version:?}");
        }
    }
}
