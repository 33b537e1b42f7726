//! The admin server: state and operations of a master over HTTP, for operators, dashboards and gateways.
//!
//! Paths, members and codes are those of Mooncake's admin server; extensions are under `/api/v1/`: see `docs/master.md`. There is no
//! authentication, as in Mooncake, unless `--store_tls_cert` is set.

mod chunked_body;
mod client_ids;
mod describe_prompts;
mod drain;
mod inspect;
mod object_locations;
mod objects;
mod response;
mod segments;
mod snapshot;
mod soft_pins;
mod status;
mod tenants;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router, routing::MethodRouter};
use http::StatusCode;
use mooncake_wire::ErrorCode;
use parking_lot::Mutex;

use crate::events::KvEventPublisher;
use crate::observer::FactObserver;
use crate::quotas::QuotaFile;
use crate::recorder::FactRecorder;
use crate::server::MasterServer;
use crate::summary::MetricsSummary;

/// Maximum request body in bytes: a list of keys or segment names.
const MAX_BODY: usize = 4 << 20;

/// Everything that the admin server reports on.
#[derive(Debug)]
pub struct AdminContext {
    pub server: Arc<MasterServer>,
    /// Statistics from the observed changes.
    pub observer: Arc<FactObserver>,
    /// KV event publisher, if events are enabled.
    pub events: Option<Arc<KvEventPublisher>>,
    /// File with the tenants' quotas.
    pub quotas: Option<QuotaFile>,
    /// Generates the summary line: its rates cover the time since the last request for it over HTTP.
    pub summary: Mutex<MetricsSummary>,
}

type SharedAdminContext = State<Arc<AdminContext>>;

/// Routes of the admin server.
pub fn admin_router(admin: Arc<AdminContext>) -> Router {
    let with_404 = |route: MethodRouter<Arc<AdminContext>>| route.fallback(response::no_such_path);
    let status_routes = Router::new()
        .route("/health", with_404(get(status::health)))
        .route("/version", with_404(get(status::version)))
        .route("/role", with_404(get(status::role)))
        .route("/ha_status", with_404(get(status::ha_status)))
        .route("/leader", with_404(get(status::leader)))
        .route("/metrics", with_404(get(status::metrics)))
        .route("/metrics/summary", with_404(get(status::summary)))
        .route("/kv_events/status", with_404(get(status::kv_events)));
    let quotas = get(tenants::get).put(tenants::put).delete(tenants::delete);
    // A master's state and its admin server start together.
    let lister = object_locations::ObjectLister::new();
    let data_routes = Router::new()
        .route("/query_key", with_404(get(objects::query_key)))
        .route("/batch_query_keys", with_404(get(objects::batch_query_keys)))
        .route("/get_all_keys", with_404(get(objects::all_keys)))
        .route("/get_all_segments", with_404(get(segments::names)))
        .route("/get_segments_detail", with_404(get(segments::detail)))
        .route("/query_segment", with_404(get(segments::usage)))
        .route("/api/v1/segments/status", with_404(get(segments::status)))
        .route("/api/v1/drain_jobs", with_404(post(drain::create)))
        .route("/api/v1/drain_jobs/query", with_404(get(drain::query)))
        .route("/api/v1/drain_jobs/cancel", with_404(post(drain::cancel)))
        .route("/api/v1/tenant_quotas", with_404(quotas))
        .route("/api/v1/remove_all", with_404(post(objects::remove_all)))
        .route("/api/v1/soft_pin", with_404(post(soft_pins::pin)))
        .route("/api/v1/soft_unpin", with_404(post(soft_pins::unpin)))
        .route("/api/v1/dfs/shard_count", with_404(get(status::dfs_shard_count)))
        .route("/api/v1/describe_prompts", with_404(post(describe_prompts::post)))
        .route("/api/v1/peek", with_404(get(inspect::peek).post(inspect::peek_lines)))
        .route("/api/v1/prefixes", with_404(get(inspect::prefixes)))
        .route("/api/v1/snapshot", with_404(get(snapshot::get)))
        .route("/api/v1/object_locations", with_404(get(object_locations::get)).layer(Extension(lister)))
        .route_layer(from_fn_with_state(Arc::clone(&admin), require_serving));
    status_routes
        .merge(data_routes)
        .fallback(response::no_such_path)
        .layer(axum::extract::DefaultBodyLimit::max(MAX_BODY))
        .with_state(admin)
}

/// Rejects requests for data unless this master is the serving leader.
async fn require_serving(State(admin): SharedAdminContext, request: Request, next: Next) -> Response {
    if admin.server.leadership.load().is_serving() {
        next.run(request).await
    } else {
        response::refused(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS)
    }
}

/// Applies a change and waits until it is durable, without blocking other requests.
///
/// # Errors
/// `PERSISTENT_FAIL` if changes cannot be persisted now, or if the change was applied but may be lost.
async fn change<R: Send + 'static>(
    server: &Arc<MasterServer>,
    apply: impl FnOnce(&MasterServer, u64, &mut FactRecorder) -> R + Send + 'static,
) -> Result<R, ErrorCode> {
    if !server.journal.may_write() {
        server.counters.add_refused_writes(1);
        return Err(ErrorCode::PERSISTENT_FAIL);
    }
    let server = Arc::clone(server);
    let outcome = tokio::task::spawn_blocking(move || {
        let mut recorder = server.recorder();
        let result = apply(&server, server.clock.now_ms(), &mut recorder);
        recorder.commit().map(|()| result)
    });
    match outcome.await {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(error)) => {
            tracing::error!(%error, "cannot write the journal");
            Err(ErrorCode::PERSISTENT_FAIL)
        }
        Err(error) => {
            tracing::error!(%error, "the task of a change failed");
            Err(ErrorCode::INTERNAL_ERROR)
        }
    }
}
