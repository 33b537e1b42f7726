//! The journey of one request, from top to bottom.

use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use futures_util::future::try_join_all;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Request, Response};
use moongate_discovery::Registry;
use moongate_runtime::{Secret, Supervisor};
use moongate_scheduler as scheduler;
use moongate_telemetry::Traces;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::{BodyLimits, collect, discard};
use super::engine_error::engine_error;
use super::fleet::FleetState;
use super::headers::{REQUEST_ID, request_id, to_client, to_engine};
use super::standing::Standing;
use crate::access::{Caller, Gate};
use crate::config::OpenPath;
use crate::dispatch::{Answer, Ask, Booked, Dispatcher, Pair, Refused, Started, fan_out};
use crate::error::{ApiError, Code};
use crate::feedback::{Decisions, Feedback, Metrics, RequestSpan};
use crate::fleet::Fleet;
use crate::predict::{KvIndex, Predicted, Predictor, Unknown};
use crate::prompt::{Api, Head};
use crate::relay::{Relay, RelayParts, Sample, SseGate, Summary, Usage, merge_stream, merge_whole};

/// Bytes of text per token, for prompts that are not tokenised here: near the average of English in common
/// vocabularies. Only ratios between engines matter for load, not the exact count.
const BYTES_PER_TOKEN: u64 = 4;
/// Answer length assumed where the client sets no limit, for the load book.
const DEFAULT_OUTPUT_TOKENS: u32 = 512;

/// What every request needs.
#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) dispatcher: Dispatcher,
    pub(crate) predictor: Predictor,
    pub(crate) index: Arc<KvIndex>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) traces: Traces,
    pub(crate) body_limits: BodyLimits,
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
    /// What engines are shown in the place of a client's key that was for the gateway.
    pub(crate) engine_key: Option<HeaderValue>,
    /// For what outlives a request's answer.
    pub(crate) supervisor: Supervisor,
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
            feedback.piece();
            feedback.completed(Usage::read(&body), None, |ending| ending.add(&Summary::read(&body)));
            head.map(|()| Body::from(body))
        }
        Err(Refused::Error(error)) => {
            feedback.failed(&error);
            error.response()
        }
        Err(Refused::ByEngine(status, body)) => {
            feedback.rejected_by_engine(status);
            engine_error(status, &body)
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
            discard(&parts.headers, body, &gateway.supervisor);
            return Err(Refused::Error(refusal.error));
        }
    };
    feedback.span().reading();
    let mut ask = read(gateway, api, id, request).await.map_err(Refused::Error)?;
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
    let samples = fan_out::split(&ask).map_err(Refused::Error)?;
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
    let (parts, body) = request.into_parts();
    let body = collect(&parts.headers, body, gateway.body_limits, &gateway.supervisor).await?;
    let fleet = gateway.dispatcher.fleet.current();
    let caller = parts.extensions.get::<Caller>();
    let (request, model, head) = if api == Api::Other && !is_json(&parts.headers) {
        (None, None, Head::default())
    } else {
        let head = Head::read(api, &body)?;
        let named = find_model(&fleet, api, head.model.as_deref())?;
        let request =
            named.map(|model| gateway.standing.apply(&parts.headers, caller, describe(model, &head)));
        let model = named.and_then(|model| fleet.model_name(model).cloned());
        (request, model, head.without_model())
    };
    // Engines only need the path: the authority of an absolute-form request is ours.
    let uri = parts.uri.path_and_query().map_or("/", |path| path.as_str()).parse();
    let uri = uri.map_err(|_| ApiError::new(Code::NotFound, "the path cannot be read"))?;
    let mut headers = to_engine(&parts.headers);
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

fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    content_type.is_some_and(|text| text.trim_start().to_ascii_lowercase().starts_with("application/json"))
}

fn find_model(fleet: &Fleet, api: Api, name: Option<&str>) -> Result<Option<scheduler::ModelIx>, ApiError> {
    let known = || {
        let names: Vec<&str> = fleet.model_names().iter().map(AsRef::as_ref).collect();
        if names.is_empty() {
            "no engine is ready yet".to_owned()
        } else {
            format!("served are: {}", names.join(", "))
        }
    };
    if fleet.model_names().is_empty() && api != Api::Other {
        let mut error = ApiError::new(Code::NoEngineAvailable, "no engine is ready yet; ask again soon");
        error.retry_after = Some(std::time::Duration::from_secs(1));
        return Err(error);
    }
    match name {
        Some(name) => match fleet.model(name) {
            Some(model) => Ok(Some(model)),
            None => {
                let text = format!("`model` is {name:?}, which no engine serves; {}", known());
                Err(ApiError::new(Code::ModelNotFound, text).param("model"))
            }
        },
        None => match fleet.only_model() {
            Some(model) => Ok(Some(model)),
            None if api == Api::Other => Ok(None),
            None => {
                let text = format!("`model` is missing, and there is more than one; {}", known());
                Err(ApiError::new(Code::InvalidRequest, text).param("model"))
            }
        },
    }
}

fn describe(model: scheduler::ModelIx, head: &Head<'_>) -> scheduler::Request {
    let tokens = head.prompt_ids + head.prompt_bytes / BYTES_PER_TOKEN;
    scheduler::Request {
        model,
        input_tokens: u32::try_from(tokens.max(1)).unwrap_or(u32::MAX),
        output_tokens: head.max_output_tokens.unwrap_or(DEFAULT_OUTPUT_TOKENS),
        sequences: head.sequences(),
        priority: 0,
        session: None,
        tenant: None,
        ttft_target: None,
    }
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
            feedback.piece();
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
