//! Asks at both listeners who sends a request, before anything of it is read.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use http::header::AUTHORIZATION;
use http::{HeaderMap, Response};
use moongate_runtime::{ClientCertificate, Secret};
use subtle::ConstantTimeEq as _;

use super::handler::Gateway;
use super::headers::{REQUEST_ID, request_id};
use crate::access::{Refusal, Scope};
use crate::config::OpenPath;
use crate::error::{ApiError, Code};

/// The public listener: puts the [`crate::access::Caller`] into the request. Probes are open.
pub(super) async fn client(
    State(gateway): State<Arc<Gateway>>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    if !matches!(request.uri().path(), "/health" | "/ready") {
        match gateway.gate.client(request.headers()) {
            Ok(Some(caller)) => drop(request.extensions_mut().insert(caller)),
            Ok(None) => {}
            Err(refusal) => return refuse(&gateway, request, &refusal),
        }
    }
    next.run(request).await
}

/// The admin listener, but for the console's own files, in which there is no data. Engines that register have a token of their own.
pub(super) async fn administrator(
    State(gateway): State<Arc<Gateway>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let certified = request.extensions().get::<ClientCertificate>().is_some();
    match admitted(&gateway, request.uri().path(), request.headers(), certified) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refuse(&gateway, request, &refusal),
    }
}

fn admitted(gateway: &Gateway, path: &str, headers: &HeaderMap, certified: bool) -> Result<(), Refusal> {
    let (open, scope) = match path {
        "/health" => (Some(OpenPath::Health), Scope::Admin),
        "/ready" => (Some(OpenPath::Ready), Scope::Admin),
        "/metrics" => (Some(OpenPath::Metrics), Scope::Metrics),
        _ => (None, Scope::Admin),
    };
    if open.is_some_and(|path| gateway.admin_open.contains(&path)) {
        return Ok(());
    }
    if path.starts_with("/engines/") && !gateway.gate.is_admin_closed() {
        return Err(unprotected());
    }
    match &gateway.registration_token {
        Some(token) if path == "/workers" || path.starts_with("/workers/") => {
            let administers = || {
                gateway.gate.is_admin_closed()
                    && gateway.gate.administrator(headers, certified, scope).is_ok()
            };
            if knows(token, headers) || administers() { Ok(()) } else { Err(unregistered()) }
        }
        _ => gateway.gate.administrator(headers, certified, scope),
    }
}

fn knows(token: &Secret, headers: &HeaderMap) -> bool {
    let given = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    given.is_some_and(|given| bool::from(given.ct_eq(token.expose().as_bytes())))
}

fn unregistered() -> Refusal {
    let text = "send `authorization: Bearer TOKEN` with the gateway's --registration-token";
    Refusal { reason: "wrong_key", error: ApiError::new(Code::Unauthorized, text) }
}

/// Engine administration is never open, even on a listener without authentication.
fn unprotected() -> Refusal {
    let text = "engines are administered with a key of the scope `admin` only; start the gateway with --admin-token, --access-file or \
                --admin-tls-client-ca";
    Refusal { reason: "wrong_scope", error: ApiError::new(Code::InsufficientPermissions, text) }
}

fn refuse(gateway: &Gateway, request: Request, refusal: &Refusal) -> Response<Body> {
    gateway.metrics.refusals.refused(refusal.reason);
    let id = request_id(request.headers());
    let (parts, body) = request.into_parts();
    gateway.bodies.discard(&parts.headers, body);
    let mut response = refusal.error.response();
    response.headers_mut().insert(REQUEST_ID, id);
    response
}
