//! The REST API of Mooncake's store service, with the same paths, status codes and bodies.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{delete, get, post, put};
use moongate_store_client::{KvClient, KvError, PutOptions};
use serde_json::Value;

use crate::access::{ApiAccess, only_with_access};
use crate::disk::DiskWorker;
use crate::engine_segments;
use crate::rest_response::{error, failed, json, members, plain, segment_ids, success};
use crate::segment_mounter::SegmentMounter;

/// Maximum size of a request body in bytes.
const MAX_BODY: usize = 100 << 20;

/// What the REST API operates on.
#[derive(Clone)]
pub(crate) struct RestApi {
    pub(crate) client: KvClient,
    pub(crate) segments: SegmentMounter,
    /// Worker of the disk tier, if one is configured.
    pub(crate) disk_worker: Option<DiskWorker>,
}

pub(crate) fn router(api: RestApi, access: ApiAccess) -> Router {
    let engines = engine_segments::router(api.segments.clone());
    Router::new()
        .route("/api/put", put(put_object))
        .route("/api/get/{key}", get(get_object))
        .route("/api/exist/{key}", get(exist))
        .route("/api/remove/{key}", delete(remove))
        .route("/api/remove_all", delete(remove_all))
        .route("/api/mount", post(mount))
        .route("/api/unmount", post(unmount))
        .route("/api/unmount_local_disk", post(unmount_local_disk))
        .with_state(api)
        .merge(engines)
        .fallback(async || plain(StatusCode::NOT_FOUND, "404: Not Found"))
        .method_not_allowed_fallback(async |_: Method| {
            plain(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed")
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn_with_state(Arc::new(access), only_with_access))
}

async fn put_object(State(api): State<RestApi>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let key = data.get("key").and_then(Value::as_str).filter(|key| !key.is_empty());
    let (Some(key), Some(value)) = (key, data.get("value").filter(|value| !value.is_null())) else {
        return error(StatusCode::BAD_REQUEST, "Missing key or value");
    };
    let Some(value) = value.as_str() else { return failed("value is not a string") };
    match api.client.put(key, value.as_bytes(), &PutOptions::default()).await {
        Ok(_) => success(),
        Err(problem) => {
            tracing::warn!(error = %problem, "PUT /api/put");
            failed("PUT operation failed")
        }
    }
}

async fn get_object(State(api): State<RestApi>, Path(key): Path<String>) -> Response {
    match api.client.get(&key).await {
        Ok(bytes) => {
            (StatusCode::OK, [(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response()
        }
        Err(KvError::NotFound { .. }) => error(StatusCode::NOT_FOUND, "Key not found"),
        Err(problem) => {
            tracing::warn!(error = %problem, "GET /api/get");
            failed("GET operation failed")
        }
    }
}

async fn exist(State(api): State<RestApi>, Path(key): Path<String>) -> Response {
    match api.client.exist(&[&key]).await.as_deref() {
        Ok([exists, ..]) => json(StatusCode::OK, &[("exists", (*exists).into())]),
        _ => failed("Exist check failed"),
    }
}

async fn remove(State(api): State<RestApi>, Path(key): Path<String>) -> Response {
    match api.client.remove(&key, false).await {
        Ok(()) => success(),
        Err(_) => failed("Remove operation failed"),
    }
}

async fn remove_all(State(api): State<RestApi>) -> Response {
    match api.client.remove_all(false).await {
        Ok(number) => json(StatusCode::OK, &[("status", format!("success removed {number} keys").into())]),
        Err(_) => failed("RemoveAll operation failed"),
    }
}

async fn mount(State(api): State<RestApi>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let Some(size) = data.get("size").and_then(Value::as_u64).filter(|size| *size > 0) else {
        return error(StatusCode::BAD_REQUEST, "Invalid size, must be a positive integer");
    };
    match api.segments.mount_process_memory(size).await {
        Ok(id) => json(
            StatusCode::OK,
            &[
                ("status", "success".into()),
                ("segment_ids", vec![id.to_string()].into()),
                ("allocated_size", size.into()),
            ],
        ),
        Err(problem) => failed(format!("Allocate and mount failed, {problem}")),
    }
}

async fn unmount(State(api): State<RestApi>, body: Bytes) -> Response {
    let data = match members(&body) {
        Ok(data) => data,
        Err(response) => return *response,
    };
    let ids = segment_ids(&data);
    if ids.is_empty() {
        return error(StatusCode::BAD_REQUEST, "Missing segment_ids");
    }
    for id in ids {
        if let Err(problem) = api.segments.unmount_named(id).await {
            return failed(format!("Unmount and free failed, {problem}"));
        }
    }
    success()
}

/// Unmounts the disk tier from the store, if there is one. Reads in progress complete.
async fn unmount_local_disk(State(api): State<RestApi>, body: Bytes) -> Response {
    match serde_json::from_slice::<Value>(&body) {
        Ok(Value::Object(_)) => {}
        Ok(_) => return error(StatusCode::BAD_REQUEST, "Request body must be a JSON object"),
        Err(_) => return error(StatusCode::BAD_REQUEST, "Malformed JSON body"),
    }
    match &api.disk_worker {
        None => success(),
        Some(worker) => match worker.unmount().await {
            Ok(()) => success(),
            Err(problem) => failed(format!("Unmount local disk failed, {problem}")),
        },
    }
}
