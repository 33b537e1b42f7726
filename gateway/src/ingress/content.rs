//! Parses a request's body: its model, its estimated load, and members that engines must not get.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use moongate_scheduler as scheduler;

use super::aliased_model::{FoundModel, find_model};
use super::form_data::FormContent;
use super::handler::GatewayContext;
use super::inference_paths::{needs_model, takes_forms};
use super::media_type::MediaType;
use super::tenant_priority::RequestPriority;
use crate::access::AuthenticatedCaller;
use crate::error::{ApiError, ApiErrorCode};
use crate::fleet::{FleetSnapshot, ModelUnavailable};
use crate::model_aliases::AliasedModel;
use crate::request_body::{InferenceApi, RoutingFields, without_transfer_members};
use crate::sessions::session;

/// Bytes of text per token, for prompts that are not tokenized here: about the average of English in common vocabularies. Only
/// ratios between engines matter for load, not the exact count.
const BYTES_PER_TOKEN: u64 = 4;

/// A body without members that steer KV transfer.
pub(super) struct RequestContent {
    pub(super) body: Bytes,
    pub(super) parsed: ParsedContent,
    /// Whether anything was removed from the body.
    pub(super) stripped: bool,
    /// Whether the body is not the one that was received.
    pub(super) is_copy: bool,
}

/// Fields that the gateway parses from a request's body.
#[derive(Default)]
pub(super) struct ParsedContent {
    pub(super) request: Option<scheduler::RequestProfile>,
    pub(super) model: Option<Arc<str>>,
    pub(super) fields: RoutingFields<'static>,
    /// The alias by which the body names the model.
    pub(super) alias: Option<Box<AliasedModel>>,
}

/// Parses the body, and removes members that steer KV transfer. Engines may parse a body as JSON whatever its content type, so it
/// is parsed as JSON here unless it is a form, on a path that accepts forms.
pub(super) fn read_content(
    gateway: &GatewayContext,
    api: InferenceApi,
    parts: &Parts,
    media_type: MediaType,
    body: Bytes,
) -> Result<RequestContent, ApiError> {
    let unsupported = |text: String| ApiError::new(ApiErrorCode::UnsupportedMediaType, text);
    if api == InferenceApi::Other {
        if body.is_empty() {
            return Ok(RequestContent {
                body,
                parsed: ParsedContent::default(),
                stripped: false,
                is_copy: false,
            });
        }
        if media_type == MediaType::UrlEncoded {
            // A JSON text can be a valid form as well: an engine would find other fields in it than the gateway.
            return Err(unsupported("forms must be sent as multipart/form-data".to_owned()));
        }
        if media_type == MediaType::Form {
            if !takes_forms(parts.uri.path()) {
                return Err(unsupported(format!(
                    "{} accepts JSON, not a form; send application/json",
                    parts.uri.path()
                )));
            }
            let content_type = parts
                .headers
                .get(CONTENT_TYPE)
                .ok_or_else(|| unsupported("the request has no Content-Type".to_owned()))?;
            let form = FormContent::read(content_type, body).map_err(|error| ApiError {
                param: error.field().map(str::to_owned),
                ..ApiError::new(ApiErrorCode::InvalidRequest, error.to_string())
            })?;
            let parsed = describe_form(gateway, parts, &form)?;
            return Ok(RequestContent {
                body: form.body,
                parsed,
                stripped: form.stripped,
                is_copy: form.stripped,
            });
        }
    }
    let parsed = match describe_body(gateway, api, parts, &body) {
        Err(error)
            if api == InferenceApi::Other
                && media_type == MediaType::Other
                && error.code == ApiErrorCode::InvalidJson =>
        {
            return Err(unsupported(format!(
                "the body is not a JSON object and has no supported Content-Type; {} accepts application/json",
                parts.uri.path()
            )));
        }
        parsed => parsed?,
    };
    if !parsed.fields.has_transfer_members {
        return Ok(RequestContent { body, parsed, stripped: false, is_copy: false });
    }
    let body = without_transfer_members(body).map_err(|_| {
        ApiError::new(
            ApiErrorCode::InvalidJson,
            "the body cannot be searched for members that steer KV transfer",
        )
    })?;
    let parsed = describe_body(gateway, api, parts, &body)?;
    Ok(RequestContent { body, parsed, stripped: true, is_copy: true })
}

/// Parses a body without members that steer KV transfer.
pub(super) fn describe_body(
    gateway: &GatewayContext,
    api: InferenceApi,
    parts: &Parts,
    body: &[u8],
) -> Result<ParsedContent, ApiError> {
    let fleet = gateway.dispatcher.fleet.current();
    let caller = parts.extensions.get::<AuthenticatedCaller>();
    let fields = RoutingFields::read(api, body)?;
    let needs_model = api != InferenceApi::Other || needs_model(parts.uri.path());
    let tenant = gateway.priority_headers.tenant(&parts.headers, caller);
    let session = session(&parts.headers, &fields, tenant);
    let found = find_model(gateway, &fleet, parts, (fields.model.as_deref(), needs_model), session)?;
    let FoundModel { index: model_index, alias } = found;
    let model = model_index.and_then(|model| fleet.model_name(model).cloned());
    let media_tokens = fields
        .media
        .as_ref()
        .map_or(0, |media| gateway.predictor.media_tokens(model.as_deref().unwrap_or_default(), media));
    let request = model_index.map(|model| {
        let request =
            gateway.priority_headers.apply(&parts.headers, caller, describe(model, &fields, media_tokens));
        let priority = parts.extensions.get::<RequestPriority>().map_or(request.priority, |given| given.0);
        scheduler::RequestProfile { session, priority, ..request }
    });
    Ok(ParsedContent { request, model, fields: fields.without_model(), alias })
}

fn describe_form(
    gateway: &GatewayContext,
    parts: &Parts,
    form: &FormContent,
) -> Result<ParsedContent, ApiError> {
    let fleet = gateway.dispatcher.fleet.current();
    let requested = (form.model_name(), needs_model(parts.uri.path()));
    let FoundModel { index: model_index, mut alias } = find_model(gateway, &fleet, parts, requested, None)?;
    if let Some(alias) = &mut alias {
        alias.form_value.clone_from(&form.model);
    }
    let caller = parts.extensions.get::<AuthenticatedCaller>();
    let fields = RoutingFields::default();
    let request = model_index
        .map(|model| gateway.priority_headers.apply(&parts.headers, caller, describe(model, &fields, 0)));
    let model = model_index.and_then(|model| fleet.model_name(model).cloned());
    Ok(ParsedContent { request, model, fields, alias })
}

/// Why a request for a model cannot be served. A model is "not found" only if no listed engine has ever served it.
pub(super) fn model_error(fleet: &FleetSnapshot, name: &str, reason: ModelUnavailable) -> ApiError {
    let unusable = fleet.unusable.len();
    match reason {
        ModelUnavailable::Outage => no_engine(format!(
            "no engine that serves {name:?} is usable now; GET /ready gives each engine's reason"
        )),
        ModelUnavailable::Undetermined if fleet.served_models().is_empty() => {
            no_engine("no engine is ready yet; retry soon")
        }
        ModelUnavailable::Undetermined => no_engine(format!(
            "no ready engine serves {name:?}, and {unusable} engines are not usable, some of which have not reported their models \
             yet (GET /ready gives the reasons); {}",
            served_list(fleet)
        )),
        ModelUnavailable::NotFound => {
            let text = format!("`model` is {name:?}, which no engine serves; {}", served_list(fleet));
            ApiError::new(ApiErrorCode::ModelNotFound, text).param("model")
        }
    }
}

fn no_engine(text: impl Into<String>) -> ApiError {
    let mut error = ApiError::new(ApiErrorCode::NoEngineAvailable, text);
    error.retry_after = Some(Duration::from_secs(1));
    error
}

pub(super) fn served_list(fleet: &FleetSnapshot) -> String {
    let names: Vec<&str> = fleet.served_models().iter().map(AsRef::as_ref).collect();
    if names.is_empty() {
        "no engine is ready yet".to_owned()
    } else {
        format!("served models: {}", names.join(", "))
    }
}

fn describe(
    model: scheduler::ModelIndex,
    fields: &RoutingFields<'_>,
    media_tokens: u64,
) -> scheduler::RequestProfile {
    let tokens = fields.prompt_ids + fields.prompt_bytes / BYTES_PER_TOKEN + media_tokens;
    scheduler::RequestProfile {
        model,
        input_tokens: u32::try_from(tokens.max(1)).unwrap_or(u32::MAX),
        max_output_tokens: fields.max_output_tokens,
        sequences: fields.sequences(),
        priority: 0,
        session: None,
        tenant: None,
        ttft_target: None,
    }
}
