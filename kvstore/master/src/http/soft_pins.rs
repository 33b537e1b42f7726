//! Admin requests that pin and unpin objects. Since Mooncake 0.3.14.

use std::borrow::Cow;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use mooncake_wire::ErrorCode;
use mooncake_wire::types::DEFAULT_TENANT;
use serde::{Deserialize, Serialize};

use super::{SharedAdminContext, change, response};

/// Maximum number of keys of one request.
const MAX_KEYS: usize = 4096;

/// The code of keys that were pinned or unpinned.
const SUCCESS: ErrorCode = ErrorCode(0);

#[derive(Deserialize)]
struct SoftPinRequest<'a> {
    #[serde(default, borrow)]
    keys: Vec<Cow<'a, str>>,
    #[serde(default, borrow)]
    tenant_id: Cow<'a, str>,
    /// Duration of the pin in milliseconds.
    ttl_ms: Option<u64>,
}

#[derive(Serialize)]
struct SoftPinResponse<'a> {
    results: Vec<SoftPinResult<'a>>,
}

#[derive(Serialize)]
struct SoftPinResult<'a> {
    key: &'a str,
    error_code: ErrorCode,
}

pub(super) async fn pin(admin: SharedAdminContext, body: Bytes) -> Response {
    set(admin, body, true).await
}

pub(super) async fn unpin(admin: SharedAdminContext, body: Bytes) -> Response {
    set(admin, body, false).await
}

async fn set(State(admin): SharedAdminContext, body: Bytes, pins: bool) -> Response {
    let (keys, tenant, ttl_ms) = match serde_json::from_slice(&body) {
        Ok(SoftPinRequest { keys, tenant_id, ttl_ms }) => {
            let keys: Vec<String> = keys.into_iter().map(Cow::into_owned).collect();
            let tenant = if tenant_id.is_empty() { DEFAULT_TENANT.into() } else { tenant_id };
            (keys, tenant.into_owned(), ttl_ms)
        }
        Err(error) => return response::invalid(format!("Invalid JSON body: {error}")),
    };
    if keys.is_empty() || keys.len() > MAX_KEYS || ttl_ms.is_some() != pins {
        return response::invalid("Expected 1..4096 keys, a valid tenant, and ttl_ms only for soft_pin");
    }
    let changed = change(&admin.server, move |server, now_ms, recorder| {
        let set = |key: &String| server.master.set_soft_pin(now_ms, &tenant, key, ttl_ms, recorder);
        let codes: Vec<_> = keys.iter().map(set).collect();
        (keys, codes)
    });
    let (keys, codes) = match changed.await {
        Ok(changed) => changed,
        Err(code) => return response::failed(code),
    };
    let results = keys
        .iter()
        .zip(&codes)
        .map(|(key, changed)| SoftPinResult { key, error_code: changed.err().unwrap_or(SUCCESS) })
        .collect();
    response::ok(&SoftPinResponse { results })
}
