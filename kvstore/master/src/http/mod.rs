//! The admin server: what operators, dashboards and gateways ask a master over HTTP.
//!
//! Paths, members and codes are those of Mooncake's own admin server, and what it lacks is under `/api/v1/`: see
//! `docs/master.md`. There is no authentication, as there is none in Mooncake, unless `--store_tls_cert` is set.

mod chunked_body;
mod client_ids;
mod drain;
mod inspect;
mod objects;
mod query;
mod response;
mod segments;
mod snapshot;
mod status;
mod tenants;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Router, routing::MethodRouter};
use http::StatusCode;
use mooncake_wire::ErrorCode;
use parking_lot::Mutex;

use crate::events::KvEventPublisher;
use crate::journal::FactRecorder;
use crate::observer::FactObserver;
use crate::quotas::QuotaFile;
use crate::server::MasterServer;
use crate::summary::MetricsSummary;

pub(crate) use query::QueryString;
pub(crate) use response::not_found;

/// Longest request body that the admin server reads, in bytes: a list of segment names.
const MAX_BODY: usize = 4 << 20;

/// What the admin server shows.
#[derive(Debug)]
pub struct AdminContext {
    /// The master.
    pub server: Arc<MasterServer>,
    /// What was seen of its facts.
    pub observer: Arc<FactObserver>,
    /// Its KV events, if it publishes any.
    pub events: Option<Arc<KvEventPublisher>>,
    /// Where tenants' quotas are kept, if they are.
    pub quotas: Option<QuotaFile>,
    /// Makes the line of figures: its rates are those since it was last asked for over HTTP.
    pub summary: Mutex<MetricsSummary>,
}

type SharedAdminContext = State<Arc<AdminContext>>;

/// The admin server's paths.
pub fn admin_router(admin: Arc<AdminContext>) -> Router {
    let only = |route: MethodRouter<Arc<AdminContext>>| route.fallback(response::no_such_path);
    let always = Router::new()
        .route("/health", only(get(status::health)))
        .route("/role", only(get(status::role)))
        .route("/ha_status", only(get(status::ha_status)))
        .route("/leader", only(get(status::leader)))
        .route("/metrics", only(get(status::metrics)))
        .route("/metrics/summary", only(get(status::summary)))
        .route("/kv_events/status", only(get(status::kv_events)));
    let quotas = get(tenants::get).put(tenants::put).delete(tenants::delete);
    let data = Router::new()
        .route("/query_key", only(get(objects::query_key)))
        .route("/batch_query_keys", only(get(objects::batch_query_keys)))
        .route("/get_all_keys", only(get(objects::all_keys)))
        .route("/get_all_segments", only(get(segments::names)))
        .route("/get_segments_detail", only(get(segments::detail)))
        .route("/query_segment", only(get(segments::usage)))
        .route("/api/v1/segments/status", only(get(segments::status)))
        .route("/api/v1/drain_jobs", only(post(drain::create)))
        .route("/api/v1/drain_jobs/query", only(get(drain::query)))
        .route("/api/v1/drain_jobs/cancel", only(post(drain::cancel)))
        .route("/api/v1/tenant_quotas", only(quotas))
        .route("/api/v1/remove_all", only(post(objects::remove_all)))
        .route("/api/v1/peek", only(get(inspect::peek).post(inspect::peek_lines)))
        .route("/api/v1/prefixes", only(get(inspect::prefixes)))
        .route("/api/v1/snapshot", only(get(snapshot::get)))
        .route_layer(from_fn_with_state(Arc::clone(&admin), require_serving));
    always
        .merge(data)
        .fallback(response::no_such_path)
        .layer(axum::extract::DefaultBodyLimit::max(MAX_BODY))
        .with_state(admin)
}

/// Only a master that decides may say how things are.
async fn require_serving(State(admin): SharedAdminContext, request: Request, next: Next) -> Response {
    if admin.server.leadership.load().is_serving() {
        next.run(request).await
    } else {
        response::refused(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS)
    }
}

/// Changes the state and waits until the change is kept. Neither holds up other requests.
///
/// # Errors
/// `PERSISTENT_FAIL` if changes cannot be kept now, or if it was made, but may not survive.
async fn change<R: Send + 'static>(
    server: &Arc<MasterServer>,
    work: impl FnOnce(&MasterServer, u64, &mut FactRecorder) -> R + Send + 'static,
) -> Result<R, ErrorCode> {
    if !server.journal.may_write() {
        server.counters.add_refused_writes(1);
        return Err(ErrorCode::PERSISTENT_FAIL);
    }
    let server = Arc::clone(server);
    let changed = tokio::task::spawn_blocking(move || {
        let mut recorder = server.recorder();
        let result = work(&server, server.clock.now_ms(), &mut recorder);
        recorder.commit().map(|()| result)
    });
    match changed.await {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(error)) => {
            tracing::error!(%error, "the journal cannot be written");
            Err(ErrorCode::PERSISTENT_FAIL)
        }
        Err(error) => {
            tracing::error!(%error, "a change was broken off");
            Err(ErrorCode::INTERNAL_ERROR)
        }
    }
}
