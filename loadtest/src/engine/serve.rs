//! Handling of one HTTP request: record, inject a fault if set, generate, respond.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream;
use http::request::Parts;
use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::faults::{EngineFault, EngineFaultPlan, FaultScope, KvEventFault};
use super::generation::{ChoiceGeneration, GenerationError, GenerationJob, SimKvTransfer};
use super::namespace::PromptNamespace;
use super::render::{ChoiceOutput, ResponseRenderer};
use super::request::{GenerationEndpoint, GenerationRequest};
use super::response::{self, BodyAborted, SimRejection, SimResponse};
use super::server::{ConnectionFault, ConnectionFaultKind, read_body};
use super::stats::{AbortKind, MAX_RECORDED_REQUESTS, RecordedRequest, unix_ms, unix_s};
use super::stream::stream_response;
use super::{
    AbortableRequest, SimEngineState, SimProtocol, SimRole, adapters, api_messages, api_responses,
    api_sglang, api_vllm, media, scoring,
};

/// Maximum request body in bytes, about 64 million.
const MAX_BODY_BYTES: usize = 64 * 1024 * 1024;

/// Handles a request at the main port.
pub(crate) async fn handle(
    engine: &Arc<SimEngineState>,
    connection_fault: &ConnectionFault,
    request: Request<Incoming>,
) -> SimResponse {
    let (parts, body) = request.into_parts();
    let Some(body) = read_body(body, MAX_BODY_BYTES).await else {
        return response::text(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large or incomplete");
    };
    let path = parts.uri.path();
    if let Some(response) = simulator_route(engine, &parts, &body) {
        return response;
    }
    if let Some(canned) = &engine.canned
        && let Some(response) = canned.respond(&parts.method, path, &body)
    {
        return response;
    }
    let api = match (path, engine.options.protocol) {
        _ if parts.method != Method::POST => None,
        ("/v1/chat/completions", _) => Some(GenerationEndpoint::Chat),
        ("/v1/completions", _) => Some(GenerationEndpoint::Completion),
        ("/v1/messages", _) => Some(GenerationEndpoint::Messages),
        (api_responses::PATH, _) => Some(GenerationEndpoint::Responses),
        ("/generate", SimProtocol::Sglang) => Some(GenerationEndpoint::Generate),
        _ => None,
    };
    if api.is_some() || path == "/abort_request" {
        engine.stats.record(recorded(&parts, &body));
    }
    let scope = match path {
        _ if api.is_some() => FaultScope::Generation,
        "/tokenize" | "/v1/tokenize" | "/v1/messages/count_tokens" => FaultScope::Tokenization,
        _ if path.ends_with("/render") => FaultScope::Tokenization,
        _ => FaultScope::Other,
    };
    if scope == FaultScope::Tokenization {
        engine.stats.update(|stats| stats.tokenize_requests += 1);
    }
    let fault = engine.faults.next_fault(scope);
    match api {
        Some(api) => {
            let call = GenerationCall { api, parts: &parts, body: &body };
            generate(engine, connection_fault, call, fault).await
        }
        None => {
            if let Some(response) =
                fault_response(engine.options.protocol, connection_fault, fault, false).await
            {
                return response;
            }
            if let Some(response) = shared_route(engine, &parts, &body) {
                return response;
            }
            if let Some(response) = adapters::dispatch(engine, &parts, &body).await {
                return response;
            }
            match engine.options.protocol {
                SimProtocol::Sglang => api_sglang::dispatch(engine, &parts, &body),
                SimProtocol::Vllm => api_vllm::dispatch(engine, &parts, &body),
            }
        }
    }
}

fn recorded(parts: &Parts, body: &Bytes) -> RecordedRequest {
    let headers = parts.headers.iter().map(|(name, value)| {
        (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
    });
    RecordedRequest {
        method: parts.method.to_string(),
        target: parts.uri.to_string(),
        headers: headers.collect(),
        body: body.clone(),
    }
}

/// The simulator's own endpoints. Faults do not affect them, except a closed port.
fn simulator_route(engine: &Arc<SimEngineState>, parts: &Parts, body: &Bytes) -> Option<SimResponse> {
    match (&parts.method, parts.uri.path()) {
        (&Method::GET, "/_sim/stats") => {
            Some(response::json_ok(&serde_json::to_value(engine.stats.snapshot()).unwrap_or_default()))
        }
        (&Method::GET, "/_sim/requests") => {
            let last: Vec<Value> = engine
                .stats
                .recent_requests(MAX_RECORDED_REQUESTS)
                .iter()
                .map(|recorded| {
                    json!({"method": recorded.method, "target": recorded.target, "headers": recorded.headers,
                           "body": String::from_utf8_lossy(&recorded.body)})
                })
                .collect();
            Some(response::json_ok(&Value::Array(last)))
        }
        (&Method::POST, "/_sim/fault") => Some(match serde_json::from_slice::<EngineFaultPlan>(body) {
            Ok(plan) => {
                engine.set_fault(plan);
                response::json_ok(&json!({"ok": true}))
            }
            Err(error) => response::text(
                StatusCode::BAD_REQUEST,
                format!(
                    "not a fault: {error}; try {{\"fault\":\"hang\"}} or {{\"fault\":\"disconnect_mid_stream\",\"tokens\":3}}\n"
                ),
            ),
        }),
        (&Method::POST, "/_sim/kv_events") => Some(match serde_json::from_slice::<KvEventFault>(body) {
            Ok(KvEventFault::DropEvery(every)) => {
                engine.drop_kv_events(every);
                response::json_ok(&json!({"ok": true}))
            }
            Ok(KvEventFault::Restart(restart)) => {
                if restart {
                    engine.restart_caches();
                }
                response::json_ok(&json!({"ok": true}))
            }
            Err(error) => response::text(
                StatusCode::BAD_REQUEST,
                format!("not an event fault: {error}; try {{\"drop_every\":3}} or {{\"restart\":true}}\n"),
            ),
        }),
        _ => None,
    }
}

/// Endpoints of both engines that do not generate.
fn shared_route(engine: &SimEngineState, parts: &Parts, body: &Bytes) -> Option<SimResponse> {
    if let Some(response) = api_responses::dispatch(engine, parts) {
        return Some(response);
    }
    if parts.method != Method::POST {
        return None;
    }
    let path = parts.uri.path();
    if path == "/v1/messages/count_tokens" {
        return Some(api_messages::count_tokens(engine, body));
    }
    scoring::dispatch(engine, path, body).or_else(|| media::dispatch(engine, parts, body))
}

/// The response under a fault that requires no generation, if such a fault is set.
async fn fault_response(
    protocol: SimProtocol,
    connection_fault: &ConnectionFault,
    fault: EngineFault,
    streaming: bool,
) -> Option<SimResponse> {
    match fault {
        // With a closed port, only connections that are being closed get here.
        EngineFault::Hang | EngineFault::Refuse => std::future::pending().await,
        EngineFault::CloseBeforeFirstByte => Some(connection_fault.trigger(ConnectionFaultKind::Close).await),
        EngineFault::Garbage => Some(connection_fault.trigger(ConnectionFaultKind::Garbage).await),
        EngineFault::Status500 => Some(internal_error(protocol, "Internal server error")),
        EngineFault::NotFound => Some(response::not_found(protocol)),
        EngineFault::SseError if !streaming => Some(internal_error(protocol, "simulated failure")),
        EngineFault::SseError => {
            let events =
                [response::event(&response::stream_error_value("simulated failure")), response::done_event()];
            Some(response::stream("text/event-stream; charset=utf-8", stream::iter(events.map(Ok))))
        }
        EngineFault::GarbageBody => {
            let kind = if streaming { "text/event-stream; charset=utf-8" } else { "application/json" };
            let garbage = Bytes::from_static(b"data: {\"id\":\xff\x00 this is not\n\n<html>neither is this");
            Some(response::stream(kind, stream::iter([Ok(garbage)])))
        }
        EngineFault::None
        | EngineFault::DisconnectMidStream { .. }
        | EngineFault::HangMidStream { .. }
        | EngineFault::Slow { .. } => None,
    }
}

fn internal_error(protocol: SimProtocol, message: &str) -> SimResponse {
    response::rejection(protocol, &SimRejection::internal_error(message))
}

/// An error in the format of the endpoint.
fn reject(api: GenerationEndpoint, protocol: SimProtocol, rejection: &SimRejection) -> SimResponse {
    match api {
        GenerationEndpoint::Generate if rejection.status.is_client_error() => {
            response::json_with(rejection.status, &json!({"error": {"message": rejection.message}}))
        }
        GenerationEndpoint::Messages => api_messages::reject(protocol, rejection),
        GenerationEndpoint::Responses => api_responses::reject(protocol, rejection),
        _ => response::rejection(protocol, rejection),
    }
}

/// Counts a request, and counts it as aborted by its client if dropped before its outcome is recorded.
pub(crate) struct OpenRequestGuard {
    engine: Arc<SimEngineState>,
    number: u64,
    rid: String,
    pub(crate) cancel: CancellationToken,
    outcome_recorded: bool,
}

impl OpenRequestGuard {
    fn new(engine: &Arc<SimEngineState>, rids: Vec<String>) -> Self {
        let number = engine.next_request.fetch_add(1, Ordering::Relaxed);
        let cancel = CancellationToken::new();
        let rid = rids.first().cloned().unwrap_or_default();
        engine.abortable_requests.lock().insert(number, AbortableRequest { rids, cancel: cancel.clone() });
        engine.stats.update(|stats| {
            stats.started += 1;
            stats.active += 1;
        });
        Self { engine: Arc::clone(engine), number, rid, cancel, outcome_recorded: false }
    }

    /// Records how the request ended.
    pub(crate) fn record_outcome(&mut self, failed: bool) {
        self.outcome_recorded = true;
        if self.cancel.is_cancelled() {
            self.engine.stats.abort(AbortKind::Rid, &self.rid);
        } else {
            self.engine.stats.update(|stats| if failed { stats.failed += 1 } else { stats.finished += 1 });
        }
    }
}

impl Drop for OpenRequestGuard {
    fn drop(&mut self) {
        self.engine.abortable_requests.lock().remove(&self.number);
        self.engine.stats.update(|stats| stats.active -= 1);
        if !self.outcome_recorded {
            self.engine.stats.abort(AbortKind::Disconnect, &self.rid);
        }
    }
}

/// A call of a generation endpoint.
#[derive(Clone, Copy)]
struct GenerationCall<'a> {
    api: GenerationEndpoint,
    parts: &'a Parts,
    body: &'a Bytes,
}

/// What a request generates, and how the response is rendered.
pub(crate) struct PlannedGeneration {
    pub(crate) renderer: ResponseRenderer,
    pub(crate) parsed: GenerationRequest,
    pub(crate) jobs: Vec<GenerationJob>,
}

async fn generate(
    engine: &Arc<SimEngineState>,
    connection_fault: &ConnectionFault,
    call: GenerationCall<'_>,
    fault: EngineFault,
) -> SimResponse {
    let GenerationCall { api, parts, body } = call;
    let protocol = engine.options.protocol;
    let parsed = GenerationRequest::of_call(engine, api, body);
    let rids = parsed.as_ref().map(|parsed| request_ids(parsed, parts, protocol)).unwrap_or_default();
    let mut guard = OpenRequestGuard::new(engine, rids.clone());
    if !matches!(
        fault,
        EngineFault::None
            | EngineFault::Slow { .. }
            | EngineFault::DisconnectMidStream { .. }
            | EngineFault::HangMidStream { .. }
    ) {
        if !matches!(fault, EngineFault::Hang) {
            guard.record_outcome(true);
        }
        let streaming = parsed.as_ref().is_ok_and(|parsed| parsed.stream);
        if let Some(response) = fault_response(protocol, connection_fault, fault, streaming).await {
            return response;
        }
    }
    let planned = parsed.and_then(|parsed| {
        let timing = match fault {
            EngineFault::Slow { factor } => engine.timing.slowed(factor),
            _ => engine.timing.clone(),
        };
        let plan = match protocol {
            SimProtocol::Sglang => api_sglang::disaggregation_plan(engine, &parsed, parts)?,
            SimProtocol::Vllm => api_vllm::disaggregation_plan(engine, &parsed, parts, &rids)?,
        };
        let jobs = generation_jobs(engine, &parsed, &plan, &timing, &guard.cancel)?;
        Ok(PlannedGeneration { renderer: response_renderer(engine, &parsed, rids, &plan), parsed, jobs })
    });
    let planned = match planned {
        Ok(planned) => planned,
        Err(rejection) => {
            guard.record_outcome(true);
            return reject(api, protocol, &rejection);
        }
    };
    if planned.parsed.stream {
        return stream_response(engine, guard, planned, fault).await;
    }
    if let Some(request) = planned.parsed.responses.clone().filter(|request| request.is_in_background()) {
        let queued = request.store_queued(&planned.renderer.model, guard.cancel.clone());
        generate_in_background(engine, guard, planned);
        return response::json_ok(&queued);
    }
    match generate_all(engine, planned).await {
        Ok(whole) => {
            if let EngineFault::DisconnectMidStream { .. } | EngineFault::HangMidStream { .. } = fault {
                return truncated_response(&whole, guard, fault);
            }
            guard.record_outcome(false);
            response::json_ok(&whole)
        }
        Err(error) => {
            guard.record_outcome(true);
            reject(api, protocol, &SimRejection::internal_error(error.message))
        }
    }
}

/// Generates all choices; returns the whole response.
async fn generate_all(
    engine: &Arc<SimEngineState>,
    planned: PlannedGeneration,
) -> Result<Value, GenerationError> {
    let PlannedGeneration { renderer, parsed, jobs } = planned;
    let generations = join_all(jobs.into_iter().map(|job| generate_choice(engine, job))).await;
    let mut outputs = generations.into_iter().collect::<Result<Vec<ChoiceOutput>, GenerationError>>()?;
    for (index, output) in outputs.iter_mut().enumerate() {
        fill_request_fields(output, &parsed, index, &engine.options.role);
    }
    Ok(match (renderer.endpoint, &parsed.responses) {
        (GenerationEndpoint::Messages, _) => api_messages::complete_response(&renderer, &outputs),
        (GenerationEndpoint::Responses, Some(request)) => {
            let whole = api_responses::complete_response(&renderer, request, &outputs);
            request.store_finished(&whole);
            whole
        }
        _ => renderer.complete_response(&outputs, parsed.batched),
    })
}

/// Generates a response for which the client does not wait.
fn generate_in_background(
    engine: &Arc<SimEngineState>,
    mut guard: OpenRequestGuard,
    planned: PlannedGeneration,
) {
    let (engine, stop) = (Arc::clone(engine), engine.supervisor.token());
    engine.clone().supervisor.spawn("sim-engine-background", async move {
        let request = planned.parsed.responses.clone();
        let result = tokio::select! {
            result = generate_all(&engine, planned) => result,
            () = stop.cancelled() => return,
        };
        guard.record_outcome(result.is_err());
        if let (Err(_), Some(request)) = (result, request) {
            request.store_failed();
        }
    });
}

/// Values from the pair protocol and the headers of a request.
#[derive(Debug, Clone)]
pub(crate) struct DisaggregationPlan {
    pub(crate) transfers: Vec<SimKvTransfer>,
    pub(crate) ranks: Vec<u32>,
    pub(crate) kv_transfer_params: Value,
    pub(crate) prefill_leg: bool,
}

fn request_ids(parsed: &GenerationRequest, parts: &Parts, protocol: SimProtocol) -> Vec<String> {
    match protocol {
        SimProtocol::Sglang => {
            let mut ids = parsed.rids.clone();
            let first = ids.first().cloned();
            ids.resize_with(parsed.choice_count().max(ids.len()), || {
                // One id for a batch stands for all of it.
                first.clone().unwrap_or_else(response::hex_id)
            });
            ids
        }
        SimProtocol::Vllm => {
            let client_id =
                parts.headers.get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
            let id = client_id.unwrap_or_else(response::hex_id);
            vec![match (parsed.endpoint, &parsed.responses) {
                (_, Some(request)) => request.id.clone(),
                (GenerationEndpoint::Chat | GenerationEndpoint::Messages, None) => format!("chatcmpl-{id}"),
                _ => format!("cmpl-{id}"),
            }]
        }
    }
}

fn generation_jobs(
    engine: &SimEngineState,
    parsed: &GenerationRequest,
    plan: &DisaggregationPlan,
    timing: &super::ScaledTiming,
    cancel: &CancellationToken,
) -> Result<Vec<GenerationJob>, SimRejection> {
    let longest = parsed.prompts.iter().map(|prompt| prompt.len()).max().unwrap_or_default();
    if longest > engine.options.context_tokens {
        return Err(SimRejection::bad_request(format!(
            "The input ({longest} tokens) is longer than the model's context length ({} tokens).",
            engine.options.context_tokens
        )));
    }
    let places = plan.transfers.iter().zip(&plan.ranks).enumerate();
    Ok(places
        .map(|(index, (handover, rank))| {
            let (prompt, choice) = parsed.prompt_and_choice(index);
            GenerationJob {
                tokens: parsed.prompts.get(prompt).cloned().unwrap_or_default(),
                choice,
                namespace: PromptNamespace::of(&parsed.body, engine.options.protocol, prompt),
                max_tokens: parsed.max_tokens,
                stop: parsed.stop.clone(),
                tool_call: parsed.tool.clone(),
                thinks: parsed.thinks,
                ends_at_first_token: engine.options.ends_at_first_token && !parsed.forbids_early_end(),
                transfer: handover.clone(),
                rank: *rank,
                timing: timing.clone(),
                cancel: cancel.clone(),
            }
        })
        .collect())
}

fn response_renderer(
    engine: &SimEngineState,
    parsed: &GenerationRequest,
    ids: Vec<String>,
    plan: &DisaggregationPlan,
) -> ResponseRenderer {
    ResponseRenderer {
        protocol: engine.options.protocol,
        endpoint: parsed.endpoint,
        id: ids.first().cloned().unwrap_or_default(),
        ids,
        created: unix_ms() / 1_000,
        model: parsed.model.clone().unwrap_or_else(|| engine.options.model.clone()),
        logprobs: parsed.logprobs,
        return_token_ids: parsed.return_token_ids,
        n: parsed.n as usize,
        tool: parsed.tool.as_ref().filter(|_| !plan.prefill_leg).map(|tool| tool.name.clone()),
        kv_transfer_params: plan.kv_transfer_params.clone(),
        prefill_leg: plan.prefill_leg,
        started_unix_s: unix_s(),
    }
}

/// Copies values of the request that the response repeats.
pub(crate) fn fill_request_fields(
    output: &mut ChoiceOutput,
    parsed: &GenerationRequest,
    index: usize,
    role: &SimRole,
) {
    // A decode engine has no logits of the prompt; the gateway joins both legs' arrays.
    output.logprobs_from = parsed.logprobs_from.filter(|_| *role != SimRole::Decode);
    let (prompt, _) = parsed.prompt_and_choice(index);
    if (parsed.return_token_ids || output.logprobs_from.is_some())
        && let Some(tokens) = parsed.prompts.get(prompt)
    {
        output.prompt_ids = tokens.to_vec();
    }
}

async fn generate_choice(
    engine: &Arc<SimEngineState>,
    job: GenerationJob,
) -> Result<ChoiceOutput, GenerationError> {
    let mut output = ChoiceOutput { dp_rank: job.rank, ..ChoiceOutput::default() };
    let mut running = ChoiceGeneration::start(engine, job).await?;
    while let Some(piece) = running.next().await {
        output.push(piece);
    }
    output.close(&running);
    Ok(output)
}

/// A complete response, truncated in the middle.
fn truncated_response(whole: &Value, guard: OpenRequestGuard, fault: EngineFault) -> SimResponse {
    let text = Bytes::from(whole.to_string());
    let first = stream::iter([Ok(text.slice(..text.len() / 2))]);
    let end = stream::once(async move { Err(abort_body(Some(guard), fault).await) });
    response::stream("application/json", first.chain(end))
}

/// Waits forever, or truncates the body once everything before is written.
pub(crate) async fn abort_body(guard: Option<OpenRequestGuard>, fault: EngineFault) -> BodyAborted {
    if let EngineFault::HangMidStream { .. } = fault {
        // The guard stays here and detects the client's disconnect.
        std::future::pending::<()>().await;
    }
    if let Some(mut guard) = guard {
        guard.record_outcome(true);
    }
    // Yields once, so that earlier data is flushed.
    tokio::task::yield_now().await;
    BodyAborted
}
