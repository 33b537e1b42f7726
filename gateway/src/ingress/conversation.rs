//! What a request says about earlier ones: the response that it continues or refers to, and its session.

use bytes::Bytes;
use http::request::Parts;

use super::content::{RequestContent, describe_body};
use super::handler::GatewayContext;
use crate::access::AuthenticatedCaller;
use crate::error::{ApiError, ApiErrorCode};
use crate::request_body::{BodyMember, InferenceApi, MemberEdit, SplicedBody};
use crate::routed_request::StoredResponseUse;
use crate::stored_responses::{ResponseKey, ResponseStore, continued_input};

/// Folder of the paths with the id of a response.
pub(super) const RESPONSES: &str = "/v1/responses/";

/// Adds the conversation so far to a request that continues a response in the gateway's own store; otherwise finds the engine that has the
/// response.
///
/// # Errors
///
/// [`ApiErrorCode::ResponseNotFound`] if the store does not have the response, or an error in the body.
pub(super) fn with_stored_responses(
    gateway: &GatewayContext,
    api: InferenceApi,
    parts: &Parts,
    content: RequestContent,
) -> Result<(RequestContent, StoredResponseUse), ApiError> {
    match (&gateway.response_store, api) {
        (Some(store), InferenceApi::Responses) => continued(gateway, store, parts, content),
        _ => {
            let in_path = || Some(parts.uri.path().strip_prefix(RESPONSES)?.split('/').next()?.to_owned());
            let id = match api {
                InferenceApi::Responses => {
                    content.parsed.fields.previous_response_id.as_deref().map(str::to_owned)
                }
                InferenceApi::Other => in_path(),
                _ => None,
            };
            let engine = id.and_then(|id| gateway.response_owners.get(&id));
            Ok((content, StoredResponseUse { engine, input_items: None }))
        }
    }
}

fn continued(
    gateway: &GatewayContext,
    store: &ResponseStore,
    parts: &Parts,
    mut content: RequestContent,
) -> Result<(RequestContent, StoredResponseUse), ApiError> {
    let fields = &content.parsed.fields;
    let previous = match &fields.previous_response_id {
        None => None,
        Some(id) => {
            let key = ResponseKey { tenant: tenant(gateway, parts), id: id.clone() };
            Some(store.get(&key).ok_or_else(|| {
                gateway.metrics.sessions.record_response("not_found");
                not_found(id)
            })?)
        }
    };
    // A response in the background is only complete in its engine.
    let is_stored = !fields.forbids_store && !fields.is_background;
    if previous.is_none() && !is_stored {
        return Ok((content, StoredResponseUse::default()));
    }
    let Some(items) = continued_input(&content.body, previous.as_deref()) else {
        return Ok((content, StoredResponseUse::default()));
    };
    if previous.is_some() {
        let edits = [
            MemberEdit::new(BodyMember::Input, format!("[{items}]")),
            MemberEdit::new(BodyMember::PreviousResponseId, "null"),
        ];
        let body = SplicedBody::new(&content.body, fields, &edits, Bytes::new()).to_vec();
        content.parsed = describe_body(gateway, InferenceApi::Responses, parts, &body)?;
        content.body = Bytes::from(body);
        content.is_copy = true;
    }
    let input_items = is_stored.then(|| Bytes::from(items));
    Ok((content, StoredResponseUse { engine: None, input_items }))
}

/// Hash of the tenant of a request.
pub(super) fn tenant(gateway: &GatewayContext, parts: &Parts) -> Option<u64> {
    gateway.priority_headers.tenant(&parts.headers, parts.extensions.get::<AuthenticatedCaller>())
}

/// No response with this id is stored.
pub(super) fn not_found(id: &str) -> ApiError {
    let text = format!(
        "there is no response {id:?}; responses are kept for a day, unless their request has `\"store\": false`, and as long as \
         --response-store has room"
    );
    ApiError::new(ApiErrorCode::ResponseNotFound, text).param("previous_response_id")
}
