//! The journey of one request, from top to bottom.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::future::try_join_all;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderValue, Request, Response};
use moongate_discovery::Registry;
use moongate_runtime::{Secret, Supervisor};
use moongate_scheduler as scheduler;
use moongate_telemetry::Traces;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::{BodyLimits, collect, discard, no_memory};
use super::cross_origin::CorsOrigin;
use super::engine_error::engine_error;
use super::fleet::FleetState;
use super::form_data::without_transfer_fields;
use super::headers::{REQUEST_ID, request_id, to_client, to_engine};
use super::inference_paths::{InferencePath, takes_forms};
use super::media_type::{MediaType, check_encoding};
use super::standing::Standing;
use crate::access::{Caller, Gate};
use crate::config::OpenPath;
use crate::dispatch::{Answer, Ask, Booked, Dispatcher, Pair, Refused, Started, fan_out};
use crate::error::{ApiError, Code};
use crate::feedback::{Decisions, Feedback, Metrics, RequestSpan};
use crate::fleet::{Fleet, ModelUnavailable};
use crate::memory::MemoryBudget;
use crate::predict::{KvIndex, Predicted, Predictor, Unknown};
use crate::prompt::{Api, Head, without_transfer_members};
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
    /// For the bodies of all requests.
    pub(crate) body_memory: Arc<MemoryBudget>,
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
    let samples = fan_out::split(&ask, &gateway.body_memory).map_err(Refused::Error)?;
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
    let media_type = match check_encoding(&parts.headers).and_then(|()| MediaType::of(&parts.headers)) {
        Ok(media_type) => media_type,
        Err(error) => {
            discard(&parts.headers, body, &gateway.supervisor);
            return Err(error);
        }
    };
    let (limits, budget) = (gateway.body_limits, &gateway.body_memory);
    let body = collect(&parts.headers, body, limits, budget, &gateway.supervisor).await?;
    let caller = parts.extensions.get::<Caller>();
    let Content { mut body, described, mut stripped } = read_content(gateway, api, &parts, media_type, body)?;
    if stripped {
        // A copy of what the client sent, whose own reservation has ended with it.
        body = budget.reserve(body.len()).map_err(|_| no_memory())?.attach(body);
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

/// A body as engines may have it.
struct Content {
    body: Bytes,
    described: Described,
    /// Whether something was taken out.
    stripped: bool,
}

/// What the gateway parses from a request's body.
#[derive(Default)]
struct Described {
    request: Option<scheduler::Request>,
    model: Option<Arc<str>>,
    head: Head<'static>,
}

/// Parses the body, and removes members that steer KV transfer. Engines may parse a body as JSON whatever its content type, so it is read
/// as JSON here unless it is a form, on a path that takes forms.
fn read_content(
    gateway: &Gateway,
    api: Api,
    parts: &Parts,
    media_type: MediaType,
    body: Bytes,
) -> Result<Content, ApiError> {
    let unsupported = |text: String| ApiError::new(Code::UnsupportedMediaType, text);
    if api == Api::Other {
        if body.is_empty() {
            return Ok(Content { body, described: Described::default(), stripped: false });
        }
        if media_type == MediaType::UrlEncoded {
            // A JSON text can be a form as well: an engine would find other fields in it than the gateway.
            return Err(unsupported("forms are taken as multipart/form-data only".to_owned()));
        }
        if media_type == MediaType::Form {
            if !takes_forms(parts.uri.path()) {
                return Err(unsupported(format!(
                    "{} takes JSON, not a form; send application/json",
                    parts.uri.path()
                )));
            }
            let content_type =
                parts.headers.get(CONTENT_TYPE).ok_or_else(|| unsupported("no type".to_owned()))?;
            let (body, stripped) = without_transfer_fields(content_type, body)
                .map_err(|error| ApiError::new(Code::InvalidRequest, error.to_string()))?;
            return Ok(Content { body, described: Described::default(), stripped });
        }
    }
    let described = match describe_body(gateway, api, parts, &body) {
        Err(error)
            if api == Api::Other && media_type == MediaType::Other && error.code == Code::InvalidJson =>
        {
            return Err(unsupported(format!(
                "the body is not a JSON object and has no supported Content-Type; {} takes application/json",
                parts.uri.path()
            )));
        }
        described => described?,
    };
    if !described.head.has_transfer_members {
        return Ok(Content { body, described, stripped: false });
    }
    let body = without_transfer_members(body).map_err(|_| {
        ApiError::new(Code::InvalidJson, "the body cannot be searched for members that steer KV transfer")
    })?;
    let described = describe_body(gateway, api, parts, &body)?;
    Ok(Content { body, described, stripped: true })
}

fn describe_body(gateway: &Gateway, api: Api, parts: &Parts, body: &[u8]) -> Result<Described, ApiError> {
    let fleet = gateway.dispatcher.fleet.current();
    let caller = parts.extensions.get::<Caller>();
    let head = Head::read(api, body)?;
    let named = find_model(&fleet, api, head.model.as_deref())?;
    let request = named.map(|model| gateway.standing.apply(&parts.headers, caller, describe(model, &head)));
    let model = named.and_then(|model| fleet.model_name(model).cloned());
    Ok(Described { request, model, head: head.without_model() })
}

fn find_model(fleet: &Fleet, api: Api, name: Option<&str>) -> Result<Option<scheduler::ModelIx>, ApiError> {
    match name {
        Some(name) => match fleet.model(name) {
            Ok(model) => Ok(Some(model)),
            Err(why) => Err(model_error(fleet, name, why)),
        },
        None => match fleet.only_model() {
            Some(model) => Ok(Some(model)),
            None if fleet.model_names().is_empty() => Err(no_engine("no engine is ready yet; retry soon")),
            None if api == Api::Other => Ok(None),
            None => {
                let text = format!("`model` is missing, and there is more than one; {}", served(fleet));
                Err(ApiError::new(Code::InvalidRequest, text).param("model"))
            }
        },
    }
}

/// Why a request for a model cannot be served. Only a model that no listed engine has ever served is not found.
pub(super) fn model_error(fleet: &Fleet, name: &str, why: ModelUnavailable) -> ApiError {
    let silent = fleet.waiting.len();
    match why {
        ModelUnavailable::Outage => no_engine(format!(
            "no engine that serves {name:?} can be used now; GET /ready gives each engine's reason"
        )),
        ModelUnavailable::Undetermined if fleet.model_names().is_empty() => {
            no_engine("no engine is ready yet; retry soon")
        }
        ModelUnavailable::Undetermined => no_engine(format!(
            "no engine that is ready serves {name:?}, and {silent} cannot be used, some of which have not reported yet what they \
             serve (GET /ready gives the reasons); {}",
            served(fleet)
        )),
        ModelUnavailable::Unknown => {
            let text = format!("`model` is {name:?}, which no engine serves; {}", served(fleet));
            ApiError::new(Code::ModelNotFound, text).param("model")
        }
    }
}

fn no_engine(text: impl Into<String>) -> ApiError {
    let mut error = ApiError::new(Code::NoEngineAvailable, text);
    error.retry_after = Some(Duration::from_secs(1));
    error
}

fn served(fleet: &Fleet) -> String {
    let names: Vec<&str> = fleet.model_names().iter().map(AsRef::as_ref).collect();
    if names.is_empty() {
        "no engine is ready yet".to_owned()
    } else {
        format!("served are: {}", names.join(", "))
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
