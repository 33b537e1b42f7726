//! Recorded responses of Mooncake's admin server.

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{
    AdminResponse, AdminSuccess, BatchQueryKeysResponse, CreateDrainJobRequest, DrainJobChangeResponse,
    DrainJobResponse, HealthResponse, JobStatus, KvEventsStatus, QueryKeyResponse, RemoveAllResponse,
    SegmentStatusResponse, SegmentsDetail, TenantQuota, TenantQuotaRequest,
};
use mooncake_wire::types::SegmentStatus;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Every recorded request with the status and body of its response.
fn samples() -> impl Iterator<Item = (&'static str, u16, &'static str)> {
    include_str!("../vectors/admin.txt").split("### ").filter(|sample| !sample.is_empty()).map(|sample| {
        let (request, rest) = sample.split_once('\n').unwrap();
        let status = rest.split(' ').nth(1).unwrap().parse().unwrap();
        (request, status, rest.trim_end().lines().last().unwrap())
    })
}

/// The responses to requests that contain `what`. Asserts that each round-trips without loss.
fn responses<T: Serialize + Deserialize<'static>>(what: &str) -> Vec<T> {
    let of = samples().filter(|(request, _, body)| request.contains(what) && body.starts_with('{'));
    let responses: Vec<T> = of
        .map(|(request, _, body)| {
            let response: T = serde_json::from_str(body).unwrap_or_else(|error| panic!("{request}: {error}"));
            let written = serde_json::to_value(&response).unwrap();
            assert_eq!(written, serde_json::from_str::<Value>(body).unwrap(), "{request}");
            response
        })
        .collect();
    assert!(!responses.is_empty(), "no sample of {what}");
    responses
}

fn success<T>(response: AdminResponse<T>) -> Option<T> {
    match response {
        AdminResponse::Success(value) => Some(value),
        AdminResponse::Failure(_) => None,
    }
}

/// Splits responses into values and error codes.
fn divide<T>(responses: Vec<AdminResponse<T>>) -> (Vec<T>, Vec<ErrorCode>) {
    let (mut succeeded, mut failed) = (Vec::new(), Vec::new());
    for response in responses {
        match response {
            AdminResponse::Success(value) => succeeded.push(value),
            AdminResponse::Failure(failure) => failed.push(failure.error_code),
        }
    }
    (succeeded, failed)
}

#[test]
fn health_and_event_status_are_parsed() {
    let health = &responses::<HealthResponse>("/health")[0];
    assert_eq!((health.role.as_str(), health.service_ready, health.view_version), ("leader", true, None));
    assert_eq!(responses::<KvEventsStatus>("/kv_events/status"), [KvEventsStatus::default()]);
}

#[test]
fn key_queries_are_parsed() {
    let (found, failed) = divide(responses::<QueryKeyResponse<'_>>("/query_key"));
    assert_eq!(found.iter().map(|found| found.data.len()).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(found[0].data[0].size, 4096);
    assert!(failed.len() >= 3 && failed.iter().all(|code| *code == ErrorCode::OBJECT_NOT_FOUND));

    let responses = responses::<BatchQueryKeysResponse<'_>>("/batch_query_keys");
    let BatchQueryKeysResponse::Found { data, .. } = &responses[0] else { panic!("{responses:?}") };
    assert_eq!(data.keys().collect::<Vec<_>>(), ["hk1", "hk2", "nope"]);
    assert!(data["hk1"].ok && !data["nope"].ok);
    let endpoints = data["hk2"].values.iter().flatten().map(|buffer| &buffer.endpoint).collect::<Vec<_>>();
    assert_eq!(endpoints, ["127.0.0.1:13102", "127.0.0.1:13681"]);
    assert_eq!(
        data["nope"].error.as_deref().and_then(ErrorCode::from_name),
        Some(ErrorCode::OBJECT_NOT_FOUND)
    );
    assert!(matches!(&responses[1], BatchQueryKeysResponse::InvalidQuery { success: false, .. }));
}

#[test]
fn segment_queries_are_parsed() {
    let detail = &responses::<SegmentsDetail>("/get_segments_detail")[0];
    assert_eq!(detail.total_segments, 2);
    assert_eq!(detail.segments[0].segment_id.to_string(), "1606199659600931571-5960594924283721601");
    assert!((detail.segments[0].allocator_usage_percent - 0.3102).abs() < 0.001);
    let (states, failed) =
        divide(responses::<AdminResponse<SegmentStatusResponse>>("/api/v1/segments/status"));
    assert_eq!(
        states.iter().map(|state| state.status).collect::<Vec<_>>(),
        [SegmentStatus::OK, SegmentStatus::DRAINING]
    );
    assert_eq!(failed, [ErrorCode::SEGMENT_NOT_FOUND, ErrorCode::INVALID_PARAMS]);
}

#[test]
fn drain_job_responses_are_parsed() {
    let (jobs, failed) = divide(responses::<AdminResponse<DrainJobResponse>>("/api/v1/drain_jobs/query"));
    assert_eq!(jobs.iter().map(|job| job.status).collect::<Vec<_>>(), [JobStatus::RUNNING]);
    assert_eq!(failed, [ErrorCode::JOB_NOT_FOUND, ErrorCode::INVALID_PARAMS]);
    let (created, failed) = divide(responses::<AdminResponse<DrainJobChangeResponse>>(
        "POST http://master:9003/api/v1/drain_jobs -",
    ));
    assert_eq!(created.iter().map(|job| job.status.as_str()).collect::<Vec<_>>(), ["CREATED"]);
    assert_eq!(failed, [ErrorCode::INVALID_PARAMS, ErrorCode::SEGMENT_NOT_FOUND]);
    let cancelled = responses::<AdminResponse<DrainJobChangeResponse>>("/api/v1/drain_jobs/cancel").remove(0);
    assert_eq!(success(cancelled).unwrap().status, "CANCELED");
    let body = CreateDrainJobRequest { segments: vec!["a".to_owned()], ..CreateDrainJobRequest::default() };
    assert_eq!(serde_json::to_string(&body).unwrap(), r#"{"segments":["a"],"target_segments":[]}"#);
}

#[test]
fn tenant_quota_responses_are_parsed() {
    let mut lists = 0;
    let mut single = 0;
    let quotas = samples().filter(|(request, _, _)| request.contains("/tenant_quotas"));
    for (request, status, body) in quotas {
        let succeeded = status == 200;
        if request.contains("DELETE") {
            assert_eq!(
                success(serde_json::from_str::<AdminResponse<AdminSuccess<()>>>(body).unwrap()).is_some(),
                succeeded,
                "{request}"
            );
        } else if request.contains("tenant_id") {
            let quota =
                success(serde_json::from_str::<AdminResponse<AdminSuccess<TenantQuota>>>(body).unwrap());
            assert_eq!(quota.is_some(), succeeded, "{request}");
            single += quota.map_or(0, |quota| quota.data.requested_quota_bytes / 1_048_576);
        } else {
            let list =
                success(serde_json::from_str::<AdminResponse<AdminSuccess<Vec<TenantQuota>>>>(body).unwrap());
            assert_eq!(list.is_some(), succeeded, "{request}");
            lists += list.map_or(0, |list| list.data.len());
        }
    }
    assert_eq!((lists, single), (1, 2));
    let body = serde_json::to_string(&TenantQuotaRequest { requested_quota_bytes: 5 }).unwrap();
    assert_eq!(body, r#"{"requested_quota_bytes":5}"#);
}

#[test]
fn remove_all_responses_are_parsed() {
    let removed = responses::<RemoveAllResponse>("/api/v1/remove_all");
    assert_eq!(removed.iter().map(|removed| removed.removed_count).collect::<Vec<_>>(), [1, 2]);
}
