//! Admin requests for drain jobs, which move all objects out of segments.

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{CreateDrainJobRequest, DrainJobChangeResponse, JobStatus};
use mooncake_wire::types::Uuid;
use serde::Deserialize;

use super::{SharedAdminContext, change, response};
use crate::query_string::QueryString;

/// Body of a request for a drain job. An absent member has its default; Mooncake then rejects the job.
#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct DrainJobRequest {
    segments: Vec<String>,
    target_segments: Vec<String>,
    max_concurrency: Option<u32>,
}

fn changed(job_id: Uuid, status: JobStatus) -> Response {
    response::ok(&DrainJobChangeResponse {
        success: true,
        job_id,
        status: status.name().unwrap_or_default().to_owned(),
        error_code: ErrorCode::OK,
        error_message: String::new(),
    })
}

pub(super) async fn create(State(admin): SharedAdminContext, body: Bytes) -> Response {
    let DrainJobRequest { segments, target_segments, max_concurrency } = match serde_json::from_slice(&body) {
        Ok(parsed) => parsed,
        Err(error) => return response::invalid(format!("Invalid JSON body: {error}")),
    };
    let parsed = CreateDrainJobRequest { segments, target_segments, max_concurrency };
    let created = change(&admin.server, move |server, now_ms, recorder| {
        server.master.create_drain_job(now_ms, &parsed, recorder)
    });
    match created.await.flatten() {
        Ok(id) => changed(id, JobStatus::CREATED),
        Err(code) => response::failed(code),
    }
}

fn job_id(query: &QueryString) -> Option<Uuid> {
    query.decoded("job_id").and_then(|id| id.parse().ok())
}

fn no_job_id() -> Response {
    response::invalid("Missing or invalid job_id")
}

pub(super) async fn query(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let Some(id) = job_id(&query) else { return no_job_id() };
    match admin.server.master.drain_job(id) {
        Ok(job) => response::ok(&job),
        Err(code) => response::failed(code),
    }
}

pub(super) async fn cancel(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let Some(id) = job_id(&query) else { return no_job_id() };
    let canceled = change(&admin.server, move |server, now_ms, recorder| {
        server.master.cancel_drain_job(now_ms, id, recorder)
    });
    match canceled.await.flatten() {
        Ok(()) => changed(id, JobStatus::CANCELED),
        Err(code) => response::failed(code),
    }
}
