//! Handles one request from its arrival to its response.

use std::sync::Arc;

use axum::body::Body;
use futures_util::future::try_join_all;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response};
use mooncake_wire::admin::ReturnHint;
use moongate_batch::BatchHost;
use moongate_discovery::EngineRegistry;
use moongate_runtime::SecretString;
use moongate_telemetry::Tracer;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::aliased_model::{fall_back, record_started, with_model};
use super::body::{BodyReader, no_memory};
use super::content::{ParsedContent, RequestContent, read_content};
use super::conversation::with_stored_responses;
use super::cross_origin::CorsOrigin;
use super::engine_error::engine_error;
use super::fleet::FleetStatusCache;
use super::headers::{REQUEST_ID, request_id, to_engine};
use super::inference_paths::InferencePath;
use super::media_type::{MediaType, check_encoding};
use super::options::UnauthenticatedPath;
use super::return_hint::return_hint;
use super::tenant_priority::TenantPriorityHeaders;
use super::translated::translation;
use crate::access::{API_KEY, AccessControl, AuthenticatedCaller, QuotaPermit};
use crate::decide::QueueServer;
use crate::dispatch::{DispatchError, PickSlot, PickedRoute, RequestDispatcher, RouteChoice, fan_out};
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};
use crate::feedback::{
    DecisionHistory, GatewayMetrics, HintSource, PromptHint, PromptReportQueue, RequestRecorder, RequestSpan,
    ResponseCapture,
};
use crate::fleet::UpstreamEndpoint;
use crate::kv_index::KvIndex;
use crate::legs::ResponsePayload;
use crate::memory::MemoryBudget;
use crate::model_aliases::ModelAliases;
use crate::predict::{CacheHitPredictor, PredictionError, PromptLength, PromptPrediction, RequestPrompt};
use crate::relay::{DispatchedResponse, RelayedRequest};
use crate::request_body::InferenceApi;
use crate::routed_request::RoutedRequest;
use crate::sessions::{SessionRoute, SessionRoutes};
use crate::stored_responses::{ResponseOwners, ResponseStore, response_id};

/// Shared state of all request handlers.
#[derive(Debug)]
pub(crate) struct GatewayContext {
    pub(crate) dispatcher: RequestDispatcher,
    pub(crate) predictor: CacheHitPredictor,
    pub(crate) index: Arc<KvIndex>,
    /// Queue of reports to the store's master, with a store.
    pub(crate) prompt_reports: Option<PromptReportQueue>,
    pub(crate) metrics: Arc<GatewayMetrics>,
    pub(crate) traces: Tracer,
    pub(crate) bodies: BodyReader,
    pub(crate) prompt_memory: Arc<MemoryBudget>,
    pub(crate) priority_headers: TenantPriorityHeaders,
    pub(crate) decisions: Arc<DecisionHistory>,
    pub(crate) fleet_status: FleetStatusCache,
    pub(crate) sessions: SessionRoutes,
    pub(crate) response_owners: ResponseOwners,
    /// Responses that the gateway stores itself, with `--response-store`.
    pub(crate) response_store: Option<Arc<ResponseStore>>,
    /// Decisions for other gateways, with `--queue-peer`.
    pub(crate) queue_server: Option<QueueServer>,
    /// Registry of engines, with `--registration`.
    pub(crate) registry: Option<EngineRegistry>,
    /// Token that `/workers` requires; `None`: no token.
    pub(crate) registration_token: Option<SecretString>,
    pub(crate) access: Arc<AccessControl>,
    pub(crate) model_aliases: Arc<ModelAliases>,
    /// Files and batches, with `--batch-store`.
    pub(crate) batches: Option<Arc<BatchHost>>,
    /// Paths of a protected admin listener that need no authentication.
    pub(crate) admin_open: Vec<UnauthenticatedPath>,
    /// Additional engine paths that are open to clients.
    pub(crate) inference_paths: Vec<InferencePath>,
    /// Origins whose pages may send requests.
    pub(crate) cors_origins: Vec<CorsOrigin>,
    /// Client for administrators' requests to engines.
    pub(crate) engine_client: reqwest::Client,
    /// Key that replaces the client's key in requests to engines, if the gateway authenticates clients.
    pub(crate) engine_key: Option<HeaderValue>,
    /// Cancelled when the drain starts.
    pub(crate) draining: CancellationToken,
    /// Cancelled when open streams must end.
    pub(crate) force_close: CancellationToken,
}

/// Handles a generation request or a passed-through path.
pub(crate) async fn handle(
    gateway: &GatewayContext,
    api: InferenceApi,
    request: Request<Body>,
) -> Response<Body> {
    let start = Instant::now();
    let id = request_id(request.headers());
    let error_format = ErrorFormat::of_path(request.uri().path());
    let span = RequestSpan::start(&gateway.traces, api, &id, (&request, start));
    let mut recorder = RequestRecorder::new(gateway.metrics.clone(), span, api, start);
    let slot = request.extensions().get::<PickSlot>().cloned();
    let served = tokio::select! {
        biased;
        served = serve(gateway, api, (id.clone(), slot.as_ref()), request, &mut recorder) => served,
        () = gateway.force_close.cancelled() => {
            let text = "the gateway is shutting down and its drain deadline has passed; retry on another gateway";
            Err(DispatchError::Error(ApiError::new(ApiErrorCode::ShuttingDown, text)))
        }
    };
    let mut response = match served {
        Ok((routed, Dispatched::Response(response))) => response.respond(relayed(gateway, &routed), recorder),
        Ok((routed, Dispatched::Picked(slot, choice))) => {
            slot.put(PickedRoute { routed, choice: *choice, recorder });
            Response::default()
        }
        Err(DispatchError::Error(error)) => {
            recorder.failed(&error);
            error.response(error_format)
        }
        Err(DispatchError::EngineRejected(status, body, retry_after)) => {
            recorder.rejected_by_engine(status);
            engine_error(error_format, status, &body, retry_after)
        }
    };
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// What a request has led to.
enum Dispatched<'a> {
    Response(DispatchedResponse),
    /// The route on which another proxy sends the request.
    Picked(&'a PickSlot, Box<RouteChoice>),
}

async fn serve<'a>(
    gateway: &GatewayContext,
    api: InferenceApi,
    (id, slot): (HeaderValue, Option<&'a PickSlot>),
    request: Request<Body>,
    recorder: &mut RequestRecorder,
) -> Result<(Box<RoutedRequest>, Dispatched<'a>), DispatchError> {
    let permit =
        match request.extensions().get::<AuthenticatedCaller>().map(|caller| gateway.access.admit(caller)) {
            None => None,
            Some(Ok(permit)) => permit,
            Some(Err(rejection)) => {
                gateway.metrics.refusals.record_rejected(rejection.reason);
                let (parts, body) = request.into_parts();
                gateway.bodies.discard(&parts.headers, body);
                return Err(DispatchError::Error(rejection.error));
            }
        };
    recorder.span().start_body_read();
    let routed = read(gateway, api, id, request).await.map_err(DispatchError::Error)?;
    // Boxed, so that the future that waits for a body is small: many may wait at once, and for long.
    Box::pin(dispatch(gateway, routed, permit, (recorder, slot))).await
}

/// Sends the request to engines until a response has started, or picks its route; if its model fails, with the fallbacks of its alias.
async fn dispatch<'a>(
    gateway: &GatewayContext,
    mut routed: Box<RoutedRequest>,
    mut permit: Option<QuotaPermit>,
    (recorder, slot): (&mut RequestRecorder, Option<&'a PickSlot>),
) -> Result<(Box<RoutedRequest>, Dispatched<'a>), DispatchError> {
    let read = Instant::now();
    recorder.span().inject(&mut routed.headers);
    loop {
        recorder.span().set_request(routed.description(), read);
        if routed.request.is_some() && routed.api != InferenceApi::Other {
            predict(gateway, &mut routed, recorder.span(), Instant::now()).await;
        }
        if let Some(permit) = permit.take() {
            permit.spend(routed.request.as_ref().map_or(0, |request| request.input_tokens));
            recorder.set_quota_permit(permit);
        }
        let dispatched = match slot {
            None => send(gateway, &routed, recorder).await.map(Dispatched::Response),
            Some(slot) => {
                let choice = pick(gateway, &routed, recorder).await;
                choice.map(|choice| Dispatched::Picked(slot, Box::new(choice)))
            }
        };
        match dispatched {
            Ok(dispatched) => {
                record_started(gateway, &routed);
                return Ok((routed, dispatched));
            }
            Err(error) if !fall_back(gateway, &mut routed, &error) => return Err(error),
            Err(_) => {}
        }
    }
}

/// Sends the request to engines of its model until a response has started.
async fn send(
    gateway: &GatewayContext,
    routed: &RoutedRequest,
    recorder: &mut RequestRecorder,
) -> Result<DispatchedResponse, DispatchError> {
    let (dispatcher, span) = (&gateway.dispatcher, &*recorder.span());
    if !fan_out::is_needed(&dispatcher.fleet.current(), routed) {
        let started = dispatcher.dispatch(routed, span).await?;
        record_route(gateway, routed, started.in_flight.prefill_endpoint(), recorder);
        let start = match &started.payload {
            ResponsePayload::Complete(body, _) => body,
            ResponsePayload::Streaming { first, .. } => first,
        };
        record_stored_response(gateway, routed, (start, started.in_flight.main_endpoint()), recorder);
        return Ok(DispatchedResponse::Single(started));
    }
    let samples = fan_out::split(routed, &gateway.bodies.memory).map_err(DispatchError::Error)?;
    let started = try_join_all(samples.iter().map(|sample| dispatcher.dispatch(sample, span))).await?;
    let response = DispatchedResponse::of_samples(relayed(gateway, routed), started).await;
    response.map_err(DispatchError::Error)
}

/// Picks the route on which another proxy sends the request.
async fn pick(
    gateway: &GatewayContext,
    routed: &RoutedRequest,
    recorder: &mut RequestRecorder,
) -> Result<RouteChoice, DispatchError> {
    let choice = gateway.dispatcher.pick(routed, &*recorder.span()).await?;
    record_route(gateway, routed, &choice.chosen.prefill.endpoint, recorder);
    Ok(choice)
}

/// Records where a request goes, for the next one of its session, and what to report to the store when it is complete.
fn record_route(
    gateway: &GatewayContext,
    routed: &RoutedRequest,
    prefill: &UpstreamEndpoint,
    recorder: &mut RequestRecorder,
) {
    record_session(gateway, routed, prefill);
    let Some(reports) = &gateway.prompt_reports else { return };
    let prediction = routed.prompt_prediction.as_ref();
    let tenant = routed.request.as_ref().and_then(|request| request.tenant);
    let stored = prediction.zip(prefill.index_slots.first());
    match stored.and_then(|(prediction, slot)| prediction.stored_prompt(slot)) {
        Some(prompt) => recorder.set_prompt_report(reports.report(prompt, expected_return(routed), tenant)),
        None if expected_return(routed).is_some() => reports.record_without_blocks(),
        None => {}
    }
}

/// The client's hint, or that of a session that has returned before: it will return again.
fn expected_return(routed: &RoutedRequest) -> Option<PromptHint> {
    let of_session = PromptHint { returns: ReturnHint::Expected, source: HintSource::Session };
    routed.return_hint.or(routed.session_route.as_ref().map(|_| of_session))
}

/// Records where a session's request went.
fn record_session(gateway: &GatewayContext, routed: &RoutedRequest, prefill: &UpstreamEndpoint) {
    let Some(request) = &routed.request else { return };
    let Some(session) = request.session else { return };
    gateway.metrics.sessions.record(routed.session_route.is_some(), routed.prompt_prediction.is_some());
    let route = SessionRoute { engine: prefill.id.clone(), prompt_tokens: request.input_tokens };
    gateway.sessions.record(session, route);
}

/// Records which engine makes a response of OpenAI's Responses API, given its start, and where the gateway is to store it.
pub(crate) fn record_stored_response(
    gateway: &GatewayContext,
    routed: &RoutedRequest,
    (start, engine): (&[u8], &UpstreamEndpoint),
    recorder: &mut RequestRecorder,
) {
    if routed.api != InferenceApi::Responses {
        return;
    }
    if let Some(id) = response_id(start) {
        gateway.response_owners.record(id, engine.id.clone());
    }
    if let (Some(store), Some(input_items)) = (&gateway.response_store, &routed.stored.input_items) {
        recorder.set_response_capture(ResponseCapture {
            store: store.clone(),
            tenant: routed.request.as_ref().and_then(|request| request.tenant),
            input_items: input_items.clone(),
        });
    }
}

/// What the response depends on.
fn relayed<'a>(gateway: &'a GatewayContext, routed: &'a RoutedRequest) -> RelayedRequest<'a> {
    RelayedRequest {
        api: routed.api,
        model: routed.model.as_ref(),
        stream: routed.routing.stream,
        force_close: &gateway.force_close,
    }
}

pub(super) async fn read(
    gateway: &GatewayContext,
    api: InferenceApi,
    id: HeaderValue,
    request: Request<Body>,
) -> Result<Box<RoutedRequest>, ApiError> {
    let (mut parts, body) = request.into_parts();
    let media_type = match check_encoding(&parts.headers).and_then(|()| MediaType::of(&parts.headers)) {
        Ok(media_type) => media_type,
        Err(error) => {
            gateway.bodies.discard(&parts.headers, body);
            return Err(error);
        }
    };
    let body = gateway.bodies.collect(&mut parts, body).await?;
    let caller = parts.extensions.get::<AuthenticatedCaller>();
    let content = read_content(gateway, api, &parts, media_type, body)?;
    let (content, stored) = with_stored_responses(gateway, api, &parts, content)?;
    let RequestContent { mut body, parsed, mut stripped, is_copy } = content;
    if is_copy {
        // The reservation of the original ended with it.
        body = gateway.bodies.memory.reserve(body.len()).map_err(|_| no_memory())?.attach(body);
    }
    let ParsedContent { request, model, fields, mut alias } = parsed;
    if let (Some(alias), Some(model)) = (&mut alias, &model) {
        body = with_model(&gateway.bodies.memory, &body, &fields, alias, model)?;
    }
    let session_route = request.as_ref().and_then(|request| gateway.sessions.get(request.session?));
    let return_hint = return_hint(&parts.headers, &fields)?;
    // Engines only need the path: the authority of an absolute-form request is the gateway's.
    let uri = parts.uri.path_and_query().map_or("/", |path| path.as_str()).parse();
    let uri = uri.map_err(|_| ApiError::new(ApiErrorCode::NotFound, "the path is invalid"))?;
    let (mut headers, headers_stripped) = to_engine(&parts.headers);
    headers.insert(REQUEST_ID, id.clone());
    stripped |= headers_stripped;
    if stripped {
        gateway.metrics.refusals.record_stripped();
        tracing::debug!(request_id = ?id, "removed members that steer KV transfer from a client's request");
    }
    if caller.is_some() {
        // The client's key is for this gateway; an engine could misuse it to impersonate the client.
        headers.remove(AUTHORIZATION);
        headers.remove(API_KEY);
        headers.extend(gateway.engine_key.clone().map(|key| (AUTHORIZATION, key)));
    }
    let headers = Arc::new(headers);
    // Boxed, because it is large and passed on several times.
    let mut routed = Box::new(RoutedRequest {
        id,
        api,
        method: parts.method,
        uri,
        headers,
        body,
        routing: fields,
        request,
        return_hint,
        session_route,
        stored,
        translated: None,
        prompt_prediction: None,
        model,
        alias,
        pick_scope: parts.extensions.get::<PickSlot>().map(|slot| slot.scope.clone()),
    });
    routed.translated = translation(gateway, &routed);
    Ok(routed)
}

/// Predicts each engine's cache hits, which also counts the prompt's tokens.
async fn predict(
    gateway: &GatewayContext,
    routed: &mut RoutedRequest,
    span: &mut RequestSpan,
    start: Instant,
) {
    span.start_prediction(start);
    let prediction = predict_hits(gateway, routed, PromptLength::Estimated).await;
    let end = Instant::now();
    let outcome = prediction.as_ref().map(|predicted| (predicted.input_tokens, predicted.tokenized_by));
    span.end_prediction(outcome.map_err(PredictionError::name), end);
    match prediction {
        Ok(predicted) => {
            if let Some(request) = &mut routed.request {
                request.input_tokens = predicted.input_tokens.max(1);
            }
            gateway.metrics.tokenize.record_prompt(predicted.tokenized_by);
            gateway.metrics.tokenize.record_media(predicted.media.exact, predicted.media.estimated);
            routed.prompt_prediction = Some(predicted);
            gateway.metrics.record_prediction(end - start);
        }
        Err(error) => {
            tracing::debug!(%error, "no cache-hit prediction for the request");
            gateway.metrics.predictions.record_unpredicted(error.name());
        }
    }
}

/// Predicted cache hits of each engine.
pub(super) async fn predict_hits(
    gateway: &GatewayContext,
    routed: &RoutedRequest,
    length: PromptLength,
) -> Result<PromptPrediction, PredictionError> {
    let request = routed.request.as_ref().ok_or(PredictionError::NotSinglePrompt)?;
    let fleet = gateway.dispatcher.fleet.current();
    let prompt =
        RequestPrompt { api: routed.api, model: request.model, fields: &routed.routing, body: &routed.body };
    gateway.predictor.predict(&fleet, prompt, length).await
}
