//! `/queue`: decisions for other gateways, on the admin listener.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use serde_json::json;

use super::handler::GatewayContext;
use super::router;
use crate::decide::QueueServer;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};

/// Handles `GET /queue/identity`: this gateway, for the election of the one that decides.
pub(super) async fn identity(State(gateway): State<Arc<GatewayContext>>) -> Response<Body> {
    match server(&gateway) {
        Ok(server) => {
            let draining = gateway.draining.is_cancelled();
            router::json(StatusCode::OK, &json!(server.identity(draining)))
        }
        Err(error) => error.response(ErrorFormat::OpenAi),
    }
}

/// Handles `POST /queue/tickets`: a stream of requests of another gateway, answered by a stream of decisions.
pub(super) async fn tickets(State(gateway): State<Arc<GatewayContext>>, request: Request) -> Response<Body> {
    let decisions = server(&gateway).and_then(|server| {
        server.serve(request.into_body().into_data_stream()).ok_or_else(|| {
            let text = "this gateway's requests are decided by another one; query GET /queue/identity again";
            ApiError::new(ApiErrorCode::NoEngineAvailable, text)
        })
    });
    match decisions {
        Ok(decisions) => {
            let mut response = Response::new(Body::from_stream(decisions));
            let media_type = HeaderValue::from_static("application/x-ndjson");
            response.headers_mut().insert(CONTENT_TYPE, media_type);
            response
        }
        Err(error) => error.response(ErrorFormat::OpenAi),
    }
}

fn server(gateway: &GatewayContext) -> Result<&QueueServer, ApiError> {
    let disabled = || {
        let text = "this gateway shares its queue with no other; start it with --queue-peer";
        ApiError::new(ApiErrorCode::NotFound, text)
    };
    gateway.queue_server.as_ref().ok_or_else(disabled)
}
