//! Authenticates requests at both listeners before their bodies are read.

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
use super::options::UnauthenticatedPath;
use crate::access::{AccessRejection, AccessScope};
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};

/// Public listener: adds the [`crate::access::AuthenticatedCaller`] to the request. Probes need no authentication.
pub(super) async fn client(
    State(gateway): State<Arc<GatewayContext>>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    if !matches!(request.uri().path(), "/health" | "/ready") {
        match gateway.access.authenticate_client(request.headers()) {
            Ok(Some(caller)) => drop(request.extensions_mut().insert(caller)),
            Ok(None) => {}
            Err(rejection) => return reject(&gateway, request, &rejection),
        }
    }
    next.run(request).await
}

/// Admin listener, except for the console's static files. Engines that register have a separate token.
pub(super) async fn administrator(
    State(gateway): State<Arc<GatewayContext>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let certified = request.extensions().get::<ClientCertificate>().is_some();
    match check_administrator(&gateway, request.uri().path(), request.headers(), certified) {
        Ok(()) => next.run(request).await,
        Err(rejection) => reject(&gateway, request, &rejection),
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
            let is_administrator = || {
                gateway.access.admin_requires_authentication()
                    && gateway.access.authenticate_administrator(headers, certified, scope).is_ok()
            };
            if matches_token(token, headers) || is_administrator() {
                Ok(())
            } else {
                Err(invalid_registration_token())
            }
        }
        _ => gateway.access.authenticate_administrator(headers, certified, scope),
    }
}

fn matches_token(token: &SecretString, headers: &HeaderMap) -> bool {
    let presented = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    presented.is_some_and(|presented| bool::from(presented.ct_eq(token.expose().as_bytes())))
}

fn invalid_registration_token() -> AccessRejection {
    let text = "send `authorization: Bearer TOKEN` with the gateway's --registration-token";
    AccessRejection { reason: "invalid_key", error: ApiError::new(ApiErrorCode::Unauthorized, text) }
}

/// Engine administration is never open, even on a listener without authentication.
fn missing_protection() -> AccessRejection {
    let text = "engine administration requires a key with the scope `admin`; start the gateway with --admin-token, --access-file or \
                --admin-tls-client-ca";
    AccessRejection {
        reason: "insufficient_scope",
        error: ApiError::new(ApiErrorCode::InsufficientPermissions, text),
    }
}

fn reject(gateway: &GatewayContext, request: Request, rejection: &AccessRejection) -> Response<Body> {
    gateway.metrics.refusals.record_rejected(rejection.reason);
    let id = request_id(request.headers());
    let (parts, body) = request.into_parts();
    gateway.bodies.discard(&parts.headers, body);
    let mut response = rejection.error.response(ErrorFormat::of_path(parts.uri.path()));
    response.headers_mut().insert(REQUEST_ID, id);
    response
}
