//! `/engines/{id}/{path}` on the admin listener: forwards administrators' requests to one engine, e.g. for adapters, caches and
//! weights.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Response};
use moongate_discovery::InstanceId;

use super::handler::GatewayContext;
use super::headers::{REQUEST_ID, request_id};
use super::media_type::check_encoding;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};
use crate::relay::to_client;

/// Forwards the request to the engine in the path, and returns its response.
pub(super) async fn forward(
    State(gateway): State<Arc<GatewayContext>>,
    Path((id, _)): Path<(String, String)>,
    request: Request,
) -> Response<Body> {
    let request_id = request_id(request.headers());
    let mut response = exchange(&gateway, &id, request, &request_id)
        .await
        .unwrap_or_else(|error| error.response(ErrorFormat::OpenAi));
    response.headers_mut().insert(REQUEST_ID, request_id);
    response
}

async fn exchange(
    gateway: &GatewayContext,
    id: &str,
    request: Request,
    request_id: &HeaderValue,
) -> Result<Response<Body>, ApiError> {
    let topology = gateway.dispatcher.topology.current();
    let engine = topology.get(&InstanceId::from(id)).ok_or_else(|| {
        ApiError::new(
            ApiErrorCode::NotFound,
            format!("no engine {id:?}; GET /workers lists them (write / in an id as %2F)"),
        )
    })?;
    let (mut parts, body) = request.into_parts();
    check_encoding(&parts.headers)?;
    let body = gateway.bodies.collect(&mut parts, body).await?;
    // The unmodified rest of the path after `/engines/` and the id. The engine's address is the first part of the URL, so that no
    // path can change the host.
    let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
    let target = target.splitn(4, '/').nth(3).unwrap_or_default();
    let url = format!("{}/{target}", engine.url.trim_end_matches('/'));
    tracing::info!(engine = %engine.id, method = %parts.method, path = parts.uri.path(), "engine administration request");
    let mut outgoing =
        gateway.engine_client.request(parts.method, url).header(REQUEST_ID, request_id).body(body);
    for name in [ACCEPT, CONTENT_TYPE] {
        outgoing = match parts.headers.get(&name) {
            Some(value) => outgoing.header(name, value),
            None => outgoing,
        };
    }
    if let Some(key) = &gateway.engine_key {
        outgoing = outgoing.header(AUTHORIZATION, key);
    }
    let engine_response = outgoing.send().await.map_err(|error| {
        let code = if error.is_timeout() { ApiErrorCode::EngineTimeout } else { ApiErrorCode::WorkerFailed };
        ApiError::new(code, format!("engine {}: {}", engine.id, error.without_url()))
    })?;
    let mut response = Response::new(Body::empty());
    *response.status_mut() = engine_response.status();
    *response.headers_mut() = engine_response.headers().clone();
    to_client(response.headers_mut());
    Ok(response.map(|_| Body::from_stream(engine_response.bytes_stream())))
}
