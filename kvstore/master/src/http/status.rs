//! Admin requests for the status of the master.

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{HealthResponse, KvEventsStatus};
use serde::Serialize;

use super::{AdminContext, SharedAdminContext, response};
use crate::call::PROTOCOL_VERSION;
use crate::journal::DataDirStatus;
use crate::metrics;
use crate::recovery::RecoveryOutcome;

pub(super) async fn health(State(admin): SharedAdminContext) -> Response {
    let leadership = admin.server.leadership.load();
    let storage = admin.server.journal.storage();
    let is_failing = storage.as_ref().is_some_and(|storage| storage.failure.is_some());
    // The HTTP status stays 200: a restart by a probe would lose the changes that are not written yet.
    response::ok(&HealthResponse {
        status: if is_failing { "degraded" } else { "ok" }.to_owned(),
        problems: storage.map(|storage| problems(&storage)).unwrap_or_default(),
        role: leadership.role.name().to_owned(),
        ha_state: leadership.state.name().to_owned(),
        service_ready: leadership.is_serving(),
        leader_address: leadership.leader_address.clone(),
        view_version: leadership.view_version,
        shard: admin.server.shard.map(|shard| shard.to_string()),
    })
}

/// Problems of the state's files, as messages.
fn problems(storage: &DataDirStatus) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(failure) = &storage.failure {
        let free = storage.free_bytes.map_or_else(String::new, |bytes| format!(" ({bytes} bytes free)"));
        problems.push(format!(
            "cannot write the log; changes are rejected until it is writable: {failure}{free}"
        ));
    }
    if storage.recovery.damage().is_some() || storage.recovery == RecoveryOutcome::MachineDied {
        problems.push(format!("started {}", storage.recovery));
    }
    problems
}

pub(super) async fn role(State(admin): SharedAdminContext) -> Response {
    response::plain_text(admin.server.leadership.load().role.name())
}

pub(super) async fn ha_status(State(admin): SharedAdminContext) -> Response {
    response::plain_text(admin.server.leadership.load().state.name())
}

#[derive(Serialize)]
struct VersionResponse {
    /// Version of the protocol: the reply to `ServiceReady`.
    version: &'static str,
    display_version: &'static str,
}

pub(super) async fn version() -> Response {
    let display_version = concat!("moongate ", env!("CARGO_PKG_VERSION"));
    response::ok(&VersionResponse { version: PROTOCOL_VERSION, display_version })
}

/// The response of a master without a distributed file system.
pub(super) async fn dfs_shard_count() -> Response {
    response::failed(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE)
}

#[derive(Serialize)]
struct LeaderResponse<'a> {
    present: bool,
    leader_address: Option<&'a str>,
    view_version: Option<i64>,
}

pub(super) async fn leader(State(admin): SharedAdminContext) -> Response {
    let leadership = admin.server.leadership.load();
    let leader_address = leadership.leader_address.as_deref();
    let present = leader_address.is_some();
    response::ok(&LeaderResponse { present, leader_address, view_version: leadership.view_version })
}

pub(super) async fn metrics(State(admin): SharedAdminContext) -> Response {
    let text = metrics::text(&admin.server, &admin.observer, admin.events.as_ref());
    response::text(StatusCode::OK, text)
}

pub(super) async fn summary(State(admin): SharedAdminContext) -> Response {
    response::text(StatusCode::OK, summary_line(&admin))
}

/// The summary line of the log, followed by Mooncake's HA summary.
fn summary_line(admin: &AdminContext) -> String {
    let line = admin.summary.lock().text();
    format!(
        "{line}, ha={{HA Metrics Summary: last_seq=0, applied_seq=0, lag=0, pending=0, mutation_queue=0, batch_commits=0, \
         sync_commits=0, skipped=0, checksum_fail=0, etcd_fail=0, watch_disconn=0, state=0}}\n"
    )
}

pub(super) async fn kv_events(State(admin): SharedAdminContext) -> Response {
    response::ok(&admin.events.as_ref().map_or_else(KvEventsStatus::default, |events| events.status()))
}
