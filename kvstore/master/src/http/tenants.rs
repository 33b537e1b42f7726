//! Admin requests for tenants' quotas.

use std::borrow::Cow;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use mooncake_wire::ErrorCode;
use mooncake_wire::admin::TenantQuotaRequest;

use super::{AdminContext, SharedAdminContext, change, response};
use crate::query_string::QueryString;

/// Maximum quota in bytes.
const MAX_QUOTA: u64 = i64::MAX as u64;

fn tenant(query: &QueryString) -> Option<String> {
    query.decoded("tenant_id").map(Cow::into_owned)
}

fn no_tenant() -> Response {
    response::invalid("Missing or invalid tenant_id")
}

/// Writes all quotas to the quota file.
fn persist(admin: &AdminContext) -> Result<(), ErrorCode> {
    let Some(file) = &admin.quotas else { return Ok(()) };
    file.write(|| admin.server.master.quotas().unwrap_or_default()).map_err(|error| {
        tracing::error!(%error, "cannot write the quota file");
        ErrorCode::PERSISTENT_FAIL
    })
}

pub(super) async fn get(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let master = &admin.server.master;
    let result = match query.decoded("tenant_id") {
        Some(tenant) => master.quota(&tenant).map(response::data),
        None => master.quotas().map(response::data),
    };
    result.unwrap_or_else(response::failed)
}

pub(super) async fn put(State(admin): SharedAdminContext, query: QueryString, body: Bytes) -> Response {
    let Some(tenant) = tenant(&query) else { return no_tenant() };
    let requested = match serde_json::from_slice(&body) {
        Ok(TenantQuotaRequest { requested_quota_bytes }) => requested_quota_bytes,
        Err(error) => return response::invalid(format!("Invalid JSON body: {error}")),
    };
    if !(1..=MAX_QUOTA).contains(&requested) {
        return response::invalid("Tenant quota must be in [1, 2^63 - 1] bytes");
    }
    let context = Arc::clone(&admin);
    let outcome = change(&admin.server, move |server, _, recorder| {
        let quota = server.master.set_quota(&tenant, requested, recorder)?;
        persist(&context).map(|()| quota)
    });
    outcome.await.flatten().map_or_else(response::failed, response::data)
}

pub(super) async fn delete(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let Some(tenant) = tenant(&query) else { return no_tenant() };
    let context = Arc::clone(&admin);
    let removed = change(&admin.server, move |server, _, recorder| {
        server.master.remove_quota(&tenant, recorder)?;
        persist(&context)
    });
    removed.await.flatten().map_or_else(response::failed, response::data)
}
