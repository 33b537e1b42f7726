//! Requests in an API that some engines of the fleet lack.

use std::sync::Arc;

use bytes::Bytes;
use http::Uri;
use moongate_translate::{Untranslatable, messages_to_chat};

use super::body::no_memory;
use super::handler::GatewayContext;
use crate::error::{ApiError, ApiErrorCode};
use crate::request_body::{InferenceApi, RoutingFields};
use crate::routed_request::{RoutedRequest, needs_translation};

/// The request as a chat, or why it cannot be one; `None` if no engine that serves its model needs it so.
pub(super) fn translation(
    gateway: &GatewayContext,
    routed: &RoutedRequest,
) -> Option<Result<Arc<RoutedRequest>, ApiError>> {
    if routed.pick_scope.is_some() {
        return None;
    }
    let model = routed.request.as_ref()?.model;
    let fleet = gateway.dispatcher.fleet.current();
    let is_needed = fleet.members_eligible(model).any(|member| needs_translation(routed.api, member));
    is_needed.then(|| as_chat(gateway, routed).map(Arc::new))
}

fn as_chat(gateway: &GatewayContext, routed: &RoutedRequest) -> Result<RoutedRequest, ApiError> {
    let body = messages_to_chat(&routed.body).map_err(|error| invalid(&error))?;
    let reservation = gateway.bodies.memory.reserve(body.len()).map_err(|_| no_memory())?;
    let body = reservation.attach(Bytes::from(body));
    let routing = RoutingFields::read(InferenceApi::Chat, &body)?.without_model();
    Ok(RoutedRequest {
        id: routed.id.clone(),
        api: InferenceApi::Chat,
        method: routed.method.clone(),
        uri: Uri::from_static("/v1/chat/completions"),
        headers: routed.headers.clone(),
        body,
        routing,
        request: routed.request.clone(),
        return_hint: None,
        session_route: None,
        stored: routed.stored.clone(),
        translated: None,
        prompt_prediction: None,
        model: routed.model.clone(),
        alias: None,
        pick_scope: None,
    })
}

fn invalid(error: &Untranslatable) -> ApiError {
    let api_error = ApiError::new(ApiErrorCode::InvalidRequest, error.to_string());
    match error {
        Untranslatable::Json { member, .. }
        | Untranslatable::Missing { member }
        | Untranslatable::Repeated { member }
        | Untranslatable::Invalid { member, .. }
        | Untranslatable::Unsupported { member, .. } => api_error.param(member),
    }
}
