//! The journey of one request, from top to bottom.

use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use futures_util::future::try_join_all;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response};
use moongate_discovery::Registry;
use moongate_runtime::Secret;
use moongate_telemetry::Traces;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::{BodyReader, no_memory};
use super::content::{Content, Described, read_content};
use super::cross_origin::CorsOrigin;
use super::engine_error::engine_error;
use super::fleet::FleetState;
use super::headers::{REQUEST_ID, request_id, to_client, to_engine};
use super::inference_paths::InferencePath;
use super::media_type::{MediaType, check_encoding};
use super::standing::Standing;
use crate::access::{Caller, Gate, Permit};
use crate::config::OpenPath;
use crate::dispatch::{Answer, Ask, Booked, Dispatcher, Pair, Refused, Started, fan_out};
use crate::error::{ApiError, Code};
use crate::feedback::{Decisions, Feedback, Metrics, RequestSpan};
use crate::memory::MemoryBudget;
use crate::predict::{KvIndex, Predicted, Predictor, Unknown};
use crate::prompt::Api;
use crate::relay::{Relay, RelayParts, Sample, SseGate, Summary, Usage, merge_stream, merge_whole};

/// What every request needs.
#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) dispatcher: Dispatcher,
    pub(crate) predictor: Predictor,
    pub(crate) index: Arc<KvIndex>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) traces: Traces,
    pub(crate) bodies: BodyReader,
    /// For making tokens of prompts.
    pub(crate) prompt_memory: Arc<MemoryBudget>,
    pub(crate) standing: Standing,
    pub(crate) decisions: Arc<Decisions>,
    pub(crate) fleet_state: FleetState,
    /// Where engines register, if they may.
    pub(crate) registry: Option<Registry>,
    /// What whoever asks for the workers must know; `None`: nothing.
    pub(crate) registration_token: Option<Secret>,
    pub(crate) gate: Arc<Gate>,
    /// What of a protected admin listener needs no token.
    pub(crate) admin_open: Vec<OpenPath>,
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
    pub(crate) forced_end: CancellationToken,
}

/// Handles a generation request or a path that is passed through.
pub(crate) async fn handle(gateway: &Gateway, api: Api, request: Request<Body>) -> Response<Body> {
    let start = Instant::now();
    let id = request_id(request.headers());
    let span = RequestSpan::start(&gateway.traces, api, &id, (&request, start));
    let mut feedback = Feedback::new(gateway.metrics.clone(), span, api, start);
    let served = tokio::select! {
        biased;
        served = serve(gateway, api, id.clone(), request, &mut feedback) => served,
        () = gateway.forced_end.cancelled() => {
            let text = "the gateway is shutting down and its time for open requests is over; ask again elsewhere";
            Err(Refused::Error(ApiError::new(Code::ShuttingDown, text)))
        }
    };
    let mut response = match served {
        Ok((ask, Served::One(started))) => respond(gateway, &ask, started, feedback),
        Ok((ask, Served::Samples(head, samples))) => {
            feedback.span().answered(head.status());
            head.map(|()| Body::new(merge_stream(ask.api, samples, feedback)))
        }
        Ok((_, Served::Merged(head, body))) => {
            feedback.span().answered(head.status());
            feedback.part_of_whole();
            feedback.completed(Usage::read(&body), None, |ending| ending.add(&Summary::read(&body)));
            head.map(|()| Body::from(body))
        }
        Err(Refused::Error(error)) => {
            feedback.failed(&error);
            error.response()
        }
        Err(Refused::ByEngine(status, body, retry_after)) => {
            feedback.rejected_by_engine(status);
            engine_error(status, &body, retry_after)
        }
    };
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

async fn serve(
    gateway: &Gateway,
    api: Api,
    id: HeaderValue,
    request: Request<Body>,
    feedback: &mut Feedback,
) -> Result<(Ask, Served), Refused> {
    let permit = match request.extensions().get::<Caller>().map(|caller| gateway.gate.admit(caller)) {
        None => None,
        Some(Ok(permit)) => permit,
        Some(Err(refusal)) => {
            gateway.metrics.refusals.refused(refusal.reason);
            let (parts, body) = request.into_parts();
            gateway.bodies.discard(&parts.headers, body);
            return Err(Refused::Error(refusal.error));
        }
    };
    feedback.span().reading();
    let ask = read(gateway, api, id, request).await.map_err(Refused::Error)?;
    // In a box, so that what waits for a body is small: that may be many at once, and for long.
    Box::pin(dispatch(gateway, ask, permit, feedback)).await
}

/// Predicts, decides, and sends the request to engines until an answer has begun.
async fn dispatch(
    gateway: &Gateway,
    mut ask: Ask,
    permit: Option<Permit>,
    feedback: &mut Feedback,
) -> Result<(Ask, Served), Refused> {
    let read = Instant::now();
    feedback.span().asked(&mut ask, read);
    if ask.request.is_some() && ask.api != Api::Other {
        predict(gateway, &mut ask, feedback.span(), read).await;
    }
    if let Some(permit) = permit {
        permit.spend(ask.request.as_ref().map_or(0, |request| request.input_tokens));
        feedback.hold(permit);
    }
    let (dispatcher, span) = (&gateway.dispatcher, &*feedback.span());
    if !fan_out::is_needed(&dispatcher.fleet.current(), &ask) {
        let started = dispatcher.dispatch(&ask, span).await?;
        return Ok((ask, Served::One(started)));
    }
    let samples = fan_out::split(&ask, &gateway.bodies.memory).map_err(Refused::Error)?;
    let started = try_join_all(samples.iter().map(|sample| dispatcher.dispatch(sample, span))).await?;
    let (head, samples) = begin_samples(gateway, &ask, started);
    if ask.head.stream {
        return Ok((ask, Served::Samples(head, samples)));
    }
    let body = merge_whole(ask.api, samples).await.map_err(Refused::Error)?;
    Ok((ask, Served::Merged(head, body)))
}

/// What engines have begun to answer.
#[expect(clippy::large_enum_variant, reason = "one per request, and taken apart at once")]
enum Served {
    One(Started),
    /// The streams of all samples of a request with `n` > 1.
    Samples(Response<()>, Vec<Sample>),
    /// The whole answers of all samples in one.
    Merged(Response<()>, Bytes),
}

pub(super) async fn read(
    gateway: &Gateway,
    api: Api,
    id: HeaderValue,
    request: Request<Body>,
) -> Result<Ask, ApiError> {
    let (mut parts, body) = request.into_parts();
    let media_type = match check_encoding(&parts.headers).and_then(|()| MediaType::of(&parts.headers)) {
        Ok(media_type) => media_type,
        Err(error) => {
            gateway.bodies.discard(&parts.headers, body);
            return Err(error);
        }
    };
    let body = gateway.bodies.collect(&mut parts, body).await?;
    let caller = parts.extensions.get::<Caller>();
    let Content { mut body, described, mut stripped } = read_content(gateway, api, &parts, media_type, body)?;
    if stripped {
        // A copy of what the client sent, whose own reservation has ended with it.
        body = gateway.bodies.memory.reserve(body.len()).map_err(|_| no_memory())?.attach(body);
    }
    let Described { request, model, head } = described;
    // Engines only need the path: the authority of an absolute-form request is ours.
    let uri = parts.uri.path_and_query().map_or("/", |path| path.as_str()).parse();
    let uri = uri.map_err(|_| ApiError::new(Code::NotFound, "the path cannot be read"))?;
    let (mut headers, without_some) = to_engine(&parts.headers);
    headers.insert(REQUEST_ID, id.clone());
    stripped |= without_some;
    if stripped {
        gateway.metrics.refusals.stripped();
        tracing::debug!(request_id = ?id, "what steers KV transfer was taken out of a client's request");
    }
    if caller.is_some() {
        // The client's key is for this gateway; an engine could use it to pose as the client.
        headers.remove(AUTHORIZATION);
        headers.extend(gateway.engine_key.clone().map(|key| (AUTHORIZATION, key)));
    }
    let headers = Arc::new(headers);
    Ok(Ask { id, api, method: parts.method, uri, headers, body, head, request, predicted: None, model })
}

/// Asks how much of the prompt each engine has in a cache, and counts its tokens on the way.
async fn predict(gateway: &Gateway, ask: &mut Ask, span: &mut RequestSpan, start: Instant) {
    span.predicting(start);
    let found = find(gateway, ask).await;
    let end = Instant::now();
    span.predicted(found.as_ref(), end);
    match found {
        Ok(predicted) => {
            if let Some(request) = &mut ask.request {
                request.input_tokens = predicted.input_tokens.max(1);
            }
            gateway.metrics.tokenize.tokenized(predicted.tokenized_by);
            ask.predicted = Some(predicted);
            gateway.metrics.predicted(end - start);
        }
        Err(unknown) => {
            tracing::debug!(%unknown, "cache hits are not predicted");
            gateway.metrics.predictions.none(unknown.name());
        }
    }
}

/// How much of the prompt each engine has in a cache.
pub(super) async fn find(gateway: &Gateway, ask: &Ask) -> Result<Predicted, Unknown> {
    let request = ask.request.as_ref().ok_or(Unknown::Batch)?;
    let fleet = gateway.dispatcher.fleet.current();
    gateway.predictor.predict(&fleet, ask.api, request.model, &ask.head, &ask.body).await
}

fn respond(gateway: &Gateway, ask: &Ask, started: Started, mut feedback: Feedback) -> Response<Body> {
    let Started { mut head, answer, booked, expected, foreseen, prefill_usage } = started;
    feedback.entered(booked.entry().clone());
    if let (Some(expected), Some(model)) = (expected, &ask.model) {
        feedback.expect(expected, model.clone());
    }
    feedback.span().answered(head.status());
    to_client(head.headers_mut());
    let body = match answer {
        Answer::Whole(body, usage) => {
            feedback.part_of_whole();
            feedback.completed(usage, prefill_usage, |ending| ending.add(&Summary::read(&body)));
            Body::from(body)
        }
        Answer::Begun { pair, first, gate } => {
            feedback.foresee(foreseen.filter(|_| gate.is_some()));
            Body::new(relay(gateway, ask, (pair, first, gate), booked, Some(feedback)))
        }
    };
    head.map(|()| body)
}

fn relay(
    gateway: &Gateway,
    ask: &Ask,
    (pair, first, gate): (Pair, Bytes, Option<SseGate>),
    booked: Booked,
    feedback: Option<Feedback>,
) -> Relay {
    let parts = RelayParts {
        gate,
        expects_done: ask.api != Api::Other,
        _booked: booked,
        feedback,
        forced_end: Box::pin(gateway.forced_end.clone().cancelled_owned()),
    };
    Relay::new(pair, first, parts)
}

/// The answers to all samples, ready to be merged, with the head of one of them.
fn begin_samples(gateway: &Gateway, ask: &Ask, started: Vec<Started>) -> (Response<()>, Vec<Sample>) {
    let mut head = Response::new(());
    let samples = started.into_iter().map(|started| {
        head = started.head;
        match started.answer {
            Answer::Whole(body, _) => Sample::Whole(body),
            Answer::Begun { pair, first, gate } => {
                Sample::Begun(relay(gateway, ask, (pair, first, gate), started.booked, None))
            }
        }
    });
    let samples = samples.collect();
    to_client(head.headers_mut());
    (head, samples)
}
