//! The journey of one request, from top to bottom.

use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use futures_util::future::try_join_all;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response};
use moongate_discovery::EngineRegistry;
use moongate_runtime::SecretString;
use moongate_telemetry::Tracer;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::{BodyReader, no_memory};
use super::content::{ParsedContent, RequestContent, read_content};
use super::cross_origin::CorsOrigin;
use super::engine_error::engine_error;
use super::fleet::FleetStatusCache;
use super::headers::{REQUEST_ID, request_id, to_client, to_engine};
use super::inference_paths::InferencePath;
use super::media_type::{MediaType, check_encoding};
use super::tenant_priority::TenantPriorityHeaders;
use crate::access::{AccessControl, AuthenticatedCaller, QuotaPermit};
use crate::config::UnauthenticatedPath;
use crate::dispatch::{
    DispatchError, InFlightGuard, LegPair, RequestDispatcher, ResponsePayload, ResponseStart, RoutedRequest,
    fan_out,
};
use crate::error::{ApiError, ApiErrorCode};
use crate::feedback::{DecisionHistory, GatewayMetrics, RequestRecorder, RequestSpan};
use crate::memory::MemoryBudget;
use crate::predict::{CacheHitPredictor, KvIndex, PredictionError, PromptPrediction};
use crate::relay::{
    RelayContext, ResponseRelay, ResponseSummary, SampleResponse, SseFramer, TokenUsage, merge_complete,
    merge_stream,
};
use crate::request_body::InferenceApi;

/// What every request needs.
#[derive(Debug)]
pub(crate) struct GatewayContext {
    pub(crate) dispatcher: RequestDispatcher,
    pub(crate) predictor: CacheHitPredictor,
    pub(crate) index: Arc<KvIndex>,
    pub(crate) metrics: Arc<GatewayMetrics>,
    pub(crate) traces: Tracer,
    pub(crate) bodies: BodyReader,
    /// For making tokens of prompts.
    pub(crate) prompt_memory: Arc<MemoryBudget>,
    pub(crate) priority_headers: TenantPriorityHeaders,
    pub(crate) decisions: Arc<DecisionHistory>,
    pub(crate) fleet_status: FleetStatusCache,
    /// Where engines register, if they may.
    pub(crate) registry: Option<EngineRegistry>,
    /// What whoever asks for the workers must know; `None`: nothing.
    pub(crate) registration_token: Option<SecretString>,
    pub(crate) access: Arc<AccessControl>,
    /// What of a protected admin listener needs no token.
    pub(crate) admin_open: Vec<UnauthenticatedPath>,
    /// Engines' paths that clients reach beside the usual ones.
    pub(crate) inference_paths: Vec<InferencePath>,
    /// Origins whose pages may send requests.
    pub(crate) cors_origins: Vec<CorsOrigin>,
    /// For administrators' requests to engines.
    pub(crate) engine_client: reqwest::Client,
    /// What engines are shown in the place of a client's key that was for the gateway.
    pub(crate) engine_key: Option<HeaderValue>,
    /// Cancelled when no new work is wanted.
    pub(crate) draining: CancellationToken,
    /// Cancelled when open streams must end.
    pub(crate) force_close: CancellationToken,
}

/// Handles a generation request or a path that is passed through.
pub(crate) async fn handle(
    gateway: &GatewayContext,
    api: InferenceApi,
    request: Request<Body>,
) -> Response<Body> {
    let start = Instant::now();
    let id = request_id(request.headers());
    let span = RequestSpan::start(&gateway.traces, api, &id, (&request, start));
    let mut feedback = RequestRecorder::new(gateway.metrics.clone(), span, api, start);
    let served = tokio::select! {
        biased;
        served = serve(gateway, api, id.clone(), request, &mut feedback) => served,
        () = gateway.force_close.cancelled() => {
            let text = "the gateway is shutting down and its time for open requests is over; ask again elsewhere";
            Err(DispatchError::Error(ApiError::new(ApiErrorCode::ShuttingDown, text)))
        }
    };
    let mut response = match served {
        Ok((ask, DispatchedResponse::Single(started))) => respond(gateway, &ask, started, feedback),
        Ok((ask, DispatchedResponse::Samples(head, samples))) => {
            feedback.span().set_status(head.status());
            head.map(|()| Body::new(merge_stream(ask.api, samples, feedback)))
        }
        Ok((_, DispatchedResponse::Merged(head, body))) => {
            feedback.span().set_status(head.status());
            feedback.set_sample_of_batch();
            feedback
                .completed(TokenUsage::read(&body), None, |ending| ending.add(&ResponseSummary::read(&body)));
            head.map(|()| Body::from(body))
        }
        Err(DispatchError::Error(error)) => {
            feedback.failed(&error);
            error.response()
        }
        Err(DispatchError::EngineRejected(status, body, retry_after)) => {
            feedback.rejected_by_engine(status);
            engine_error(status, &body, retry_after)
        }
    };
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

async fn serve(
    gateway: &GatewayContext,
    api: InferenceApi,
    id: HeaderValue,
    request: Request<Body>,
    feedback: &mut RequestRecorder,
) -> Result<(RoutedRequest, DispatchedResponse), DispatchError> {
    let permit =
        match request.extensions().get::<AuthenticatedCaller>().map(|caller| gateway.access.admit(caller)) {
            None => None,
            Some(Ok(permit)) => permit,
            Some(Err(refusal)) => {
                gateway.metrics.refusals.record_rejected(refusal.reason);
                let (parts, body) = request.into_parts();
                gateway.bodies.discard(&parts.headers, body);
                return Err(DispatchError::Error(refusal.error));
            }
        };
    feedback.span().start_body_read();
    let ask = read(gateway, api, id, request).await.map_err(DispatchError::Error)?;
    // In a box, so that what waits for a body is small: that may be many at once, and for long.
    Box::pin(dispatch(gateway, ask, permit, feedback)).await
}

/// Predicts, decides, and sends the request to engines until an answer has begun.
async fn dispatch(
    gateway: &GatewayContext,
    mut ask: RoutedRequest,
    permit: Option<QuotaPermit>,
    feedback: &mut RequestRecorder,
) -> Result<(RoutedRequest, DispatchedResponse), DispatchError> {
    let read = Instant::now();
    feedback.span().set_request(&mut ask, read);
    if ask.request.is_some() && ask.api != InferenceApi::Other {
        predict(gateway, &mut ask, feedback.span(), read).await;
    }
    if let Some(permit) = permit {
        permit.spend(ask.request.as_ref().map_or(0, |request| request.input_tokens));
        feedback.set_quota_permit(permit);
    }
    let (dispatcher, span) = (&gateway.dispatcher, &*feedback.span());
    if !fan_out::is_needed(&dispatcher.fleet.current(), &ask) {
        let started = dispatcher.dispatch(&ask, span).await?;
        return Ok((ask, DispatchedResponse::Single(started)));
    }
    let samples = fan_out::split(&ask, &gateway.bodies.memory).map_err(DispatchError::Error)?;
    let started = try_join_all(samples.iter().map(|sample| dispatcher.dispatch(sample, span))).await?;
    let (head, samples) = start_samples(gateway, &ask, started);
    if ask.routing.stream {
        return Ok((ask, DispatchedResponse::Samples(head, samples)));
    }
    let body = merge_complete(ask.api, samples).await.map_err(DispatchError::Error)?;
    Ok((ask, DispatchedResponse::Merged(head, body)))
}

/// What engines have begun to answer.
#[expect(clippy::large_enum_variant, reason = "one per request, and taken apart at once")]
enum DispatchedResponse {
    Single(ResponseStart),
    /// The streams of all samples of a request with `n` > 1.
    Samples(Response<()>, Vec<SampleResponse>),
    /// The whole answers of all samples in one.
    Merged(Response<()>, Bytes),
}

pub(super) async fn read(
    gateway: &GatewayContext,
    api: InferenceApi,
    id: HeaderValue,
    request: Request<Body>,
) -> Result<RoutedRequest, ApiError> {
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
    let RequestContent { mut body, parsed: described, mut stripped } =
        read_content(gateway, api, &parts, media_type, body)?;
    if stripped {
        // A copy of what the client sent, whose own reservation has ended with it.
        body = gateway.bodies.memory.reserve(body.len()).map_err(|_| no_memory())?.attach(body);
    }
    let ParsedContent { request, model, head } = described;
    // Engines only need the path: the authority of an absolute-form request is ours.
    let uri = parts.uri.path_and_query().map_or("/", |path| path.as_str()).parse();
    let uri = uri.map_err(|_| ApiError::new(ApiErrorCode::NotFound, "the path cannot be read"))?;
    let (mut headers, without_some) = to_engine(&parts.headers);
    headers.insert(REQUEST_ID, id.clone());
    stripped |= without_some;
    if stripped {
        gateway.metrics.refusals.record_stripped();
        tracing::debug!(request_id = ?id, "what steers KV transfer was taken out of a client's request");
    }
    if caller.is_some() {
        // The client's key is for this gateway; an engine could use it to pose as the client.
        headers.remove(AUTHORIZATION);
        headers.extend(gateway.engine_key.clone().map(|key| (AUTHORIZATION, key)));
    }
    let headers = Arc::new(headers);
    Ok(RoutedRequest {
        id,
        api,
        method: parts.method,
        uri,
        headers,
        body,
        routing: head,
        request,
        prompt_prediction: None,
        model,
    })
}

/// Asks how much of the prompt each engine has in a cache, and counts its tokens on the way.
async fn predict(gateway: &GatewayContext, ask: &mut RoutedRequest, span: &mut RequestSpan, start: Instant) {
    span.start_prediction(start);
    let found = predict_hits(gateway, ask).await;
    let end = Instant::now();
    span.end_prediction(found.as_ref(), end);
    match found {
        Ok(predicted) => {
            if let Some(request) = &mut ask.request {
                request.input_tokens = predicted.input_tokens.max(1);
            }
            gateway.metrics.tokenize.record_prompt(predicted.tokenized_by);
            ask.prompt_prediction = Some(predicted);
            gateway.metrics.record_prediction(end - start);
        }
        Err(unknown) => {
            tracing::debug!(%unknown, "cache hits are not predicted");
            gateway.metrics.predictions.record_unpredicted(unknown.name());
        }
    }
}

/// How much of the prompt each engine has in a cache.
pub(super) async fn predict_hits(
    gateway: &GatewayContext,
    ask: &RoutedRequest,
) -> Result<PromptPrediction, PredictionError> {
    let request = ask.request.as_ref().ok_or(PredictionError::NotSinglePrompt)?;
    let fleet = gateway.dispatcher.fleet.current();
    gateway.predictor.predict(&fleet, ask.api, request.model, &ask.routing, &ask.body).await
}

fn respond(
    gateway: &GatewayContext,
    ask: &RoutedRequest,
    started: ResponseStart,
    mut feedback: RequestRecorder,
) -> Response<Body> {
    let ResponseStart {
        mut head,
        payload: answer,
        in_flight: booked,
        expected_hits: expected,
        ttft_prediction: foreseen,
        prefill_usage,
    } = started;
    feedback.set_prefill(booked.prefill_endpoint().clone());
    if let (Some(expected), Some(model)) = (expected, &ask.model) {
        feedback.set_expected_hits(expected, model.clone());
    }
    feedback.span().set_status(head.status());
    to_client(head.headers_mut());
    let body = match answer {
        ResponsePayload::Complete(body, usage) => {
            feedback.set_sample_of_batch();
            feedback.completed(usage, prefill_usage, |ending| ending.add(&ResponseSummary::read(&body)));
            Body::from(body)
        }
        ResponsePayload::Streaming { pair, first, gate } => {
            feedback.set_ttft_prediction(foreseen.filter(|_| gate.is_some()));
            Body::new(relay(gateway, ask, (pair, first, gate), booked, Some(feedback)))
        }
    };
    head.map(|()| body)
}

fn relay(
    gateway: &GatewayContext,
    ask: &RoutedRequest,
    (pair, first, gate): (LegPair, Bytes, Option<SseFramer>),
    booked: InFlightGuard,
    feedback: Option<RequestRecorder>,
) -> ResponseRelay {
    let parts = RelayContext {
        framer: gate,
        expects_done: ask.api != InferenceApi::Other,
        _in_flight: booked,
        recorder: feedback,
        force_close: Box::pin(gateway.force_close.clone().cancelled_owned()),
    };
    ResponseRelay::new(pair, first, parts)
}

/// The answers to all samples, ready to be merged, with the head of one of them.
fn start_samples(
    gateway: &GatewayContext,
    ask: &RoutedRequest,
    started: Vec<ResponseStart>,
) -> (Response<()>, Vec<SampleResponse>) {
    let mut head = Response::new(());
    let samples = started.into_iter().map(|started| {
        head = started.head;
        match started.payload {
            ResponsePayload::Complete(body, _) => SampleResponse::Complete(body),
            ResponsePayload::Streaming { pair, first, gate } => {
                SampleResponse::Streaming(relay(gateway, ask, (pair, first, gate), started.in_flight, None))
            }
        }
    });
    let samples = samples.collect();
    to_client(head.headers_mut());
    (head, samples)
}
