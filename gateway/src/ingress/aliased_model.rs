//! The model of a request: the one that its body names, or one of those that its alias stands for.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http::request::Parts;
use moongate_scheduler::ModelIndex;

use super::body::no_memory;
use super::content::{model_error, served_list};
use super::handler::GatewayContext;
use super::translated::translation;
use crate::access::AuthenticatedCaller;
use crate::dispatch::DispatchError;
use crate::error::{ApiError, ApiErrorCode};
use crate::feedback::AliasOutcome;
use crate::fleet::FleetSnapshot;
use crate::memory::MemoryBudget;
use crate::model_aliases::{AliasedModel, ChoiceKey, ListedAlias};
use crate::request_body::{BodyMember, MemberEdit, RoutingFields, SplicedBody};
use crate::routed_request::RoutedRequest;

/// The served model of a request.
#[derive(Debug, Default)]
pub(super) struct FoundModel {
    /// `None` if the request names no model and does not need one.
    pub(super) index: Option<ModelIndex>,
    /// Its alias, if the request names one.
    pub(super) alias: Option<Box<AliasedModel>>,
}

/// Finds the model that a request names, through an alias if `name` is one.
pub(super) fn find_model(
    gateway: &GatewayContext,
    fleet: &FleetSnapshot,
    parts: &Parts,
    (name, needs_model): (Option<&str>, bool),
    session: Option<u64>,
) -> Result<FoundModel, ApiError> {
    let Some(name) = name else {
        return Ok(FoundModel { index: default_model(fleet, needs_model)?, alias: None });
    };
    let tenant = parts.extensions.get::<AuthenticatedCaller>().map(|caller| &*caller.tenant);
    let key = || session.map_or_else(|| ChoiceKey::Random(fastrand::u64(..)), ChoiceKey::Session);
    let Some(candidates) = gateway.model_aliases.resolve(name, tenant, key) else {
        let index = fleet.model(name).map_err(|reason| model_error(fleet, name, reason))?;
        return Ok(FoundModel { index: Some(index), alias: None });
    };
    let mut alias = AliasedModel::new(candidates);
    let mut first_error = None;
    while let Some(model) = alias.next_model() {
        match fleet.model(&model) {
            Ok(index) => return Ok(FoundModel { index: Some(index), alias: Some(Box::new(alias)) }),
            Err(reason) => {
                gateway.metrics.model_aliases.record(&alias.name, &model, AliasOutcome::Unavailable);
                first_error.get_or_insert_with(|| model_error(fleet, &model, reason));
            }
        }
    }
    let error = first_error.unwrap_or_else(|| ApiError::new(ApiErrorCode::ModelNotFound, "no model"));
    Err(ApiError { message: format!("{name:?} is an alias: {}", error.message), ..error })
}

/// The model of a request that names none.
fn default_model(fleet: &FleetSnapshot, needs_model: bool) -> Result<Option<ModelIndex>, ApiError> {
    match fleet.only_model() {
        Some(model) => Ok(Some(model)),
        None if fleet.served_models().is_empty() => {
            let mut error =
                ApiError::new(ApiErrorCode::NoEngineAvailable, "no engine is ready yet; retry soon");
            error.retry_after = Some(Duration::from_secs(1));
            Err(error)
        }
        None if !needs_model => Ok(None),
        None => {
            let text = format!("`model` is missing, and there is more than one; {}", served_list(fleet));
            Err(ApiError::new(ApiErrorCode::InvalidRequest, text).param("model"))
        }
    }
}

/// `body` with the name of `model` in place of the alias; every other byte is unchanged. Its memory is reserved.
pub(super) fn with_model(
    memory: &Arc<MemoryBudget>,
    body: &Bytes,
    fields: &RoutingFields<'_>,
    alias: &mut AliasedModel,
    model: &str,
) -> Result<Bytes, ApiError> {
    let reservation = memory.reserve(body.len() + model.len()).map_err(|_| no_memory())?;
    let rewritten = match &mut alias.form_value {
        Some(range) => {
            let (before, after) = (body.slice(..range.start), body.slice(range.end..));
            range.end = range.start + model.len();
            [&before[..], model.as_bytes(), &after[..]].concat()
        }
        None => {
            let name = serde_json::Value::from(model).to_string();
            let edits = [MemberEdit::new(BodyMember::Model, name)];
            SplicedBody::new(body, fields, &edits, Bytes::new()).to_vec()
        }
    };
    Ok(reservation.attach(Bytes::from(rewritten)))
}

/// Counts the outcome of a request for an alias. After a failure that is not the request's own, directs it to the next fallback
/// that is served, and returns whether there is one. No byte may have reached the client.
pub(super) fn fall_back(gateway: &GatewayContext, routed: &mut RoutedRequest, error: &DispatchError) -> bool {
    let Some(mut alias) = routed.alias.take() else { return false };
    let model = routed.model.as_deref().unwrap_or_default();
    gateway.metrics.model_aliases.record(&alias.name, model, outcome(error));
    let is_redirected = is_worth_a_fallback(error) && redirect(gateway, routed, &mut alias);
    routed.alias = Some(alias);
    is_redirected
}

/// Counts the response to a request for an alias.
pub(super) fn record_started(gateway: &GatewayContext, routed: &RoutedRequest) {
    if let (Some(alias), Some(model)) = (&routed.alias, &routed.model) {
        gateway.metrics.model_aliases.record(&alias.name, model, AliasOutcome::Started);
    }
}

fn outcome(error: &DispatchError) -> AliasOutcome {
    match error {
        DispatchError::EngineRejected(..) => AliasOutcome::Rejected,
        DispatchError::Error(error) if error.code == ApiErrorCode::NoEngineAvailable => {
            AliasOutcome::Unavailable
        }
        DispatchError::Error(_) => AliasOutcome::Failed,
    }
}

/// Whether another model may serve the request: engines were unavailable, failed or too slow. Rejections, quotas and this gateway's
/// own limits would be the same for it.
fn is_worth_a_fallback(error: &DispatchError) -> bool {
    let DispatchError::Error(error) = error else { return false };
    match error.code.status() {
        StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => true,
        StatusCode::SERVICE_UNAVAILABLE => {
            !matches!(error.code, ApiErrorCode::GatewayOverloaded | ApiErrorCode::ShuttingDown)
        }
        _ => false,
    }
}

/// Directs a request to the next model of its alias that is served.
fn redirect(gateway: &GatewayContext, routed: &mut RoutedRequest, alias: &mut AliasedModel) -> bool {
    let fleet = gateway.dispatcher.fleet.current();
    while let Some(model) = alias.next_model() {
        let (Ok(index), Some(request)) = (fleet.model(&model), &mut routed.request) else {
            gateway.metrics.model_aliases.record(&alias.name, &model, AliasOutcome::Unavailable);
            continue;
        };
        let memory = &gateway.bodies.memory;
        let Ok(body) = with_model(memory, &routed.body, &routed.routing, alias, &model) else { return false };
        tracing::info!(alias = %alias.name, %model, request_id = ?routed.id, "the model failed; falling back to the alias's next one");
        request.model = index;
        routed.body = body;
        routed.model = Some(model);
        routed.prompt_prediction = None;
        routed.translated = translation(gateway, routed);
        return true;
    }
    false
}

/// The aliases for `tenant` that lead to a served model, each with the first such model.
pub(super) fn served_aliases(
    gateway: &GatewayContext,
    fleet: &FleetSnapshot,
    tenant: Option<&str>,
) -> Vec<(Arc<str>, Arc<str>)> {
    let served = |ListedAlias { name, models }: ListedAlias| {
        let model = models.into_iter().find(|model| fleet.model(model).is_ok())?;
        Some((name, model))
    };
    gateway.model_aliases.list(tenant).into_iter().filter_map(served).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_aliases::AliasCandidates;
    use crate::request_body::InferenceApi;

    fn aliased(form_value: Option<std::ops::Range<usize>>) -> AliasedModel {
        let candidates = AliasCandidates { alias: "chat".into(), models: vec!["m".into()] };
        let mut alias = AliasedModel::new(candidates);
        alias.form_value = form_value;
        alias
    }

    #[test]
    fn only_the_models_name_changes() {
        let memory = MemoryBudget::new("--body-memory", 1 << 20);
        let body = Bytes::from_static(br#"{ "x":1.50 , "model" : "chat" ,"messages":[{"model":"chat"}]}"#);
        let fields = RoutingFields::read(InferenceApi::Chat, &body).unwrap();
        let once = with_model(&memory, &body, &fields, &mut aliased(None), "a\"b").unwrap();
        assert_eq!(once, r#"{ "x":1.50 , "model" : "a\"b" ,"messages":[{"model":"chat"}]}"#);
        let twice = with_model(&memory, &once, &fields, &mut aliased(None), "c").unwrap();
        assert_eq!(twice, r#"{ "x":1.50 , "model" : "c" ,"messages":[{"model":"chat"}]}"#);
    }

    #[test]
    fn the_field_of_a_form_can_change_repeatedly() {
        let memory = MemoryBudget::new("--body-memory", 1 << 20);
        let mut alias = aliased(Some(2..6));
        let fields = RoutingFields::default();
        let body = Bytes::from_static(b"a=chat\r\n");
        let once = with_model(&memory, &body, &fields, &mut alias, "longer name").unwrap();
        assert_eq!(once, "a=longer name\r\n");
        assert_eq!(with_model(&memory, &once, &fields, &mut alias, "m").unwrap(), "a=m\r\n");
    }

    #[test]
    fn only_failures_of_engines_lead_to_a_fallback() {
        let falls_back = |code| is_worth_a_fallback(&DispatchError::Error(ApiError::new(code, "")));
        use ApiErrorCode as Code;
        for code in
            [Code::NoEngineAvailable, Code::EngineUnavailable, Code::EngineTimeout, Code::WorkerFailed]
        {
            assert!(falls_back(code), "{code:?}");
        }
        for code in [
            Code::GatewayOverloaded,
            Code::ShuttingDown,
            Code::RateLimited,
            Code::Overloaded,
            Code::UnsupportedByFleet,
            Code::InvalidRequest,
        ] {
            assert!(!falls_back(code), "{code:?}");
        }
        let rejected = DispatchError::EngineRejected(StatusCode::BAD_REQUEST, Bytes::new(), None);
        assert!(!is_worth_a_fallback(&rejected));
    }
}
