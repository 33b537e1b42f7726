//! Asks at both listeners who sends a request, before anything of it is read.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use http::header::AUTHORIZATION;
use http::{HeaderMap, Response};
use moongate_runtime::{ClientCertificate, SecretString};
use subtle::ConstantTimeEq as _;

use super::handler::GatewayContext;
use super::headers::{REQUEST_ID, request_id};
use crate::access::{AccessRejection, AccessScope};
use crate::config::UnauthenticatedPath;
use crate::error::{ApiError, ApiErrorCode};

/// The public listener: puts the [`crate::access::AuthenticatedCaller`] into the request. Probes are open.
pub(super) async fn client(
    State(gateway): State<Arc<GatewayContext>>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    if !matches!(request.uri().path(), "/health" | "/ready") {
        match gateway.access.authenticate_client(request.headers()) {
            Ok(Some(caller)) => drop(request.extensions_mut().insert(caller)),
            Ok(None) => {}
            Err(refusal) => return refuse(&gateway, request, &refusal),
        }
    }
    next.run(request).await
}

/// The admin listener, but for the console's own files, in which there is no data. Engines that register have a token of their own.
pub(super) async fn administrator(
    State(gateway): State<Arc<GatewayContext>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let certified = request.extensions().get::<ClientCertificate>().is_some();
    match check_administrator(&gateway, request.uri().path(), request.headers(), certified) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refuse(&gateway, request, &refusal),
    }
}

fn check_administrator(
    gateway: &GatewayContext,
    path: &str,
    headers: &HeaderMap,
    certified: bool,
) -> Result<(), AccessRejection> {
    let (open, scope) = match path {
        "/health" => (Some(UnauthenticatedPath::Health), AccessScope::Admin),
        "/ready" => (Some(UnauthenticatedPath::Ready), AccessScope::Admin),
        "/metrics" => (Some(UnauthenticatedPath::Metrics), AccessScope::Metrics),
        _ => (None, AccessScope::Admin),
    };
    if open.is_some_and(|path| gateway.admin_open.contains(&path)) {
        return Ok(());
    }
    if path.starts_with("/engines/") && !gateway.access.admin_requires_authentication() {
        return Err(missing_protection());
    }
    match &gateway.registration_token {
        Some(token) if path == "/workers" || path.starts_with("/workers/") => {
            let administers = || {
                gateway.access.admin_requires_authentication()
                    && gateway.access.authenticate_administrator(headers, certified, scope).is_ok()
            };
            if matches_token(token, headers) || administers() {
                Ok(())
            } else {
                Err(invalid_registration_token())
            }
        }
        _ => gateway.access.authenticate_administrator(headers, certified, scope),
    }
}

fn matches_token(token: &SecretString, headers: &HeaderMap) -> bool {
    let given = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    given.is_some_and(|given| bool::from(given.ct_eq(token.expose().as_bytes())))
}

fn invalid_registration_token() -> AccessRejection {
    let text = "send `authorization: Bearer TOKEN` with the gateway's --registration-token";
    AccessRejection { reason: "wrong_key", error: ApiError::new(ApiErrorCode::Unauthorized, text) }
}

/// Engine administration is never open, even on a listener without authentication.
fn missing_protection() -> AccessRejection {
    let text = "engines are administered with a key of the scope `admin` only; start the gateway with --admin-token, --access-file or \
                --admin-tls-client-ca";
    AccessRejection {
        reason: "wrong_scope",
        error: ApiError::new(ApiErrorCode::InsufficientPermissions, text),
    }
}

fn refuse(gateway: &GatewayContext, request: Request, refusal: &AccessRejection) -> Response<Body> {
    gateway.metrics.refusals.record_rejected(refusal.reason);
    let id = request_id(request.headers());
    let (parts, body) = request.into_parts();
    gateway.bodies.discard(&parts.headers, body);
    let mut response = refusal.error.response();
    response.headers_mut().insert(REQUEST_ID, id);
    response
}
