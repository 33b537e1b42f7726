//! The paths.

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

use super::store::{Metadata, Put};
use crate::http::{Query, not_found};

/// Longest value, in bytes. A node with many devices and buffers needs some hundred kilobytes.
const MAX_VALUE: usize = 8 << 20;

type Shared = State<Arc<Metadata>>;

/// The metadata server's paths.
pub fn metadata_router(metadata: Arc<Metadata>) -> Router {
    let entries = get(read).put(write).delete(remove).fallback(no_such_path);
    Router::new()
        .route("/metadata", entries)
        .route("/health", get(health).fallback(no_such_path))
        .fallback(no_such_path)
        .layer(DefaultBodyLimit::max(MAX_VALUE))
        .with_state(metadata)
}

async fn no_such_path(_: Method, _: Uri) -> Response {
    not_found()
}

/// Text without a type, as Mooncake answers here.
fn say(status: StatusCode, text: &'static str) -> Response {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
}

async fn health() -> Response {
    say(StatusCode::OK, "OK")
}

/// The key, decoded: so it is the same key however a client has written it.
fn key(query: &Query) -> Option<String> {
    query.decoded("key").map(Cow::into_owned)
}

fn no_key() -> Response {
    say(StatusCode::BAD_REQUEST, "Missing key parameter")
}

async fn read(State(metadata): Shared, query: Query) -> Response {
    let Some(key) = key(&query) else { return no_key() };
    let Some(value) = metadata.get(&key) else { return say(StatusCode::NOT_FOUND, "metadata not found") };
    let mut response = Response::new(Body::from(value));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

async fn write(State(metadata): Shared, query: Query, value: Bytes) -> Response {
    let Some(key) = key(&query) else { return no_key() };
    match metadata.put(&key, &value) {
        Put::Updated => kept(metadata, "metadata updated").await,
        Put::Unchanged => say(StatusCode::OK, "metadata unchanged"),
        Put::Duplicate => say(StatusCode::BAD_REQUEST, "Duplicate rpc_meta key not allowed"),
        Put::Full => say(StatusCode::INSUFFICIENT_STORAGE, "metadata full"),
    }
}

async fn remove(State(metadata): Shared, query: Query) -> Response {
    let Some(key) = key(&query) else { return no_key() };
    if metadata.delete(&key) {
        kept(metadata, "metadata deleted").await
    } else {
        say(StatusCode::NOT_FOUND, "metadata not found")
    }
}

/// Says that it is done once it is kept.
async fn kept(metadata: Arc<Metadata>, text: &'static str) -> Response {
    match tokio::task::spawn_blocking(move || metadata.commit()).await {
        Ok(Ok(())) => say(StatusCode::OK, text),
        Ok(Err(error)) => {
            tracing::error!(%error, "metadata cannot be kept");
            say(StatusCode::INTERNAL_SERVER_ERROR, "metadata cannot be kept")
        }
        Err(error) => {
            tracing::error!(%error, "keeping metadata was broken off");
            say(StatusCode::INTERNAL_SERVER_ERROR, "metadata cannot be kept")
        }
    }
}
