//! `/v1/responses/{id}`: responses in the gateway's own store. All others are passed through to the engine that has them.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use http::{Method, Response, StatusCode};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::conversation::tenant;
use super::handler::{GatewayContext, handle};
use super::headers::{REQUEST_ID, request_id};
use super::router;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};
use crate::request_body::InferenceApi;
use crate::stored_responses::{ResponseKey, StoredResponse};

/// Returns or deletes a response.
pub(super) async fn response(
    State(gateway): State<Arc<GatewayContext>>,
    Path(id): Path<String>,
    request: Request,
) -> Response<Body> {
    answer(&gateway, &id, request, |stored, method| {
        if method == Method::DELETE {
            json!({"id": id, "object": "response", "deleted": true}).to_string()
        } else {
            String::from_utf8_lossy(&stored.response).into_owned()
        }
    })
    .await
}

/// Returns the items that led to a response.
pub(super) async fn input_items(
    State(gateway): State<Arc<GatewayContext>>,
    Path(id): Path<String>,
    request: Request,
) -> Response<Body> {
    answer(&gateway, &id, request, |stored, _| {
        let items = format!("[{}]", String::from_utf8_lossy(&stored.input_items));
        let data: Vec<&RawValue> = serde_json::from_str(&items).unwrap_or_default();
        json!({"object": "list", "data": data, "has_more": false}).to_string()
    })
    .await
}

/// Stored responses are complete, so there is nothing to cancel.
pub(super) async fn cancel(
    State(gateway): State<Arc<GatewayContext>>,
    Path(id): Path<String>,
    request: Request,
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let key = ResponseKey { tenant: tenant(&gateway, &parts), id: id.into() };
    let request = Request::from_parts(parts, body);
    if gateway.response_store.as_ref().is_some_and(|store| store.get(&key).is_some()) {
        let text = "the response is complete; only a response in the background can be cancelled";
        let mut response = ApiError::new(ApiErrorCode::InvalidRequest, text).response(ErrorFormat::OpenAi);
        response.headers_mut().insert(REQUEST_ID, request_id(request.headers()));
        return response;
    }
    handle(&gateway, InferenceApi::Other, request).await
}

async fn answer(
    gateway: &GatewayContext,
    id: &str,
    request: Request,
    body: impl FnOnce(&StoredResponse, &Method) -> String,
) -> Response<Body> {
    let (parts, request_body) = request.into_parts();
    let key = ResponseKey { tenant: tenant(gateway, &parts), id: id.into() };
    let stored = gateway.response_store.as_ref().and_then(|store| Some((store, store.get(&key)?)));
    let Some((store, stored)) = stored else {
        return handle(gateway, InferenceApi::Other, Request::from_parts(parts, request_body)).await;
    };
    if parts.method == Method::DELETE {
        store.remove(&key);
    }
    let mut response = router::json(StatusCode::OK, &Value::Null);
    *response.body_mut() = Body::from(body(&stored, &parts.method));
    response.headers_mut().insert(REQUEST_ID, request_id(&parts.headers));
    response
}
