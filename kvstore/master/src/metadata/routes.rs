//! HTTP routes of the metadata server.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, StatusCode, Uri};

use super::store::{MetadataPutOutcome, MetadataStore};
use crate::query_string::QueryString;

/// Maximum value in bytes. A node with many devices and buffers needs some hundred kilobytes.
const MAX_VALUE: usize = 8 << 20;

type SharedMetadataStore = State<Arc<MetadataStore>>;

/// Routes of the metadata server.
pub fn metadata_router(metadata: Arc<MetadataStore>) -> Router {
    let entries = get(read).put(write).delete(remove).fallback(no_such_path);
    Router::new()
        .route("/metadata", entries)
        .route("/health", get(health).fallback(no_such_path))
        .fallback(no_such_path)
        .layer(DefaultBodyLimit::max(MAX_VALUE))
        .with_state(metadata)
}

async fn no_such_path(_: Method, _: Uri) -> Response {
    text_response(StatusCode::NOT_FOUND, "404 Not Found")
}

/// Text without a content type, as Mooncake sends it.
fn text_response(status: StatusCode, text: &'static str) -> Response {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
}

async fn health() -> Response {
    text_response(StatusCode::OK, "OK")
}

/// The key, percent-decoded: clients encode the same key differently.
fn key(query: &QueryString) -> Option<String> {
    query.decoded("key").map(Cow::into_owned)
}

fn no_key() -> Response {
    text_response(StatusCode::BAD_REQUEST, "Missing key parameter")
}

async fn read(State(metadata): SharedMetadataStore, query: QueryString) -> Response {
    let Some(key) = key(&query) else { return no_key() };
    let Some(value) = metadata.get(&key) else {
        return text_response(StatusCode::NOT_FOUND, "metadata not found");
    };
    let mut response = Response::new(Body::from(value));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

async fn write(State(metadata): SharedMetadataStore, query: QueryString, value: Bytes) -> Response {
    let Some(key) = key(&query) else { return no_key() };
    match metadata.put(&key, &value) {
        MetadataPutOutcome::Updated => commit_then_reply(metadata, "metadata updated").await,
        MetadataPutOutcome::Unchanged => text_response(StatusCode::OK, "metadata unchanged"),
        MetadataPutOutcome::Duplicate => {
            text_response(StatusCode::BAD_REQUEST, "Duplicate rpc_meta key not allowed")
        }
        MetadataPutOutcome::Full => text_response(StatusCode::INSUFFICIENT_STORAGE, "metadata full"),
    }
}

async fn remove(State(metadata): SharedMetadataStore, query: QueryString) -> Response {
    let Some(key) = key(&query) else { return no_key() };
    if metadata.delete(&key) {
        commit_then_reply(metadata, "metadata deleted").await
    } else {
        text_response(StatusCode::NOT_FOUND, "metadata not found")
    }
}

/// Replies once the change is durable.
async fn commit_then_reply(metadata: Arc<MetadataStore>, text: &'static str) -> Response {
    match tokio::task::spawn_blocking(move || metadata.commit()).await {
        Ok(Ok(())) => text_response(StatusCode::OK, text),
        Ok(Err(error)) => {
            tracing::error!(%error, "cannot save the transfer metadata");
            text_response(StatusCode::INTERNAL_SERVER_ERROR, "metadata cannot be saved")
        }
        Err(error) => {
            tracing::error!(%error, "the task that saves transfer metadata failed");
            text_response(StatusCode::INTERNAL_SERVER_ERROR, "metadata cannot be saved")
        }
    }
}
