//! The way of one HTTP request through an engine: record, fail if told to, generate, answer.

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
use super::{AbortableRequest, SimEngineState, SimProtocol, SimRole, api_sglang, api_vllm};

/// Largest request body: a prompt of about 64 million bytes.
const MAX_BODY_BYTES: usize = 64 * 1024 * 1024;

/// Answers a request at the main port.
pub(crate) async fn handle(
    engine: &Arc<SimEngineState>,
    scissors: &ConnectionFault,
    request: Request<Incoming>,
) -> SimResponse {
    let (parts, body) = request.into_parts();
    let Some(body) = read_body(body, MAX_BODY_BYTES).await else {
        return response::text(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large or incomplete");
    };
    let path = parts.uri.path();
    if let Some(answer) = simulator_route(engine, &parts, &body) {
        return answer;
    }
    let api = match (path, engine.options.protocol) {
        _ if parts.method != Method::POST => None,
        ("/v1/chat/completions", _) => Some(GenerationEndpoint::Chat),
        ("/v1/completions", _) => Some(GenerationEndpoint::Completion),
        ("/generate", SimProtocol::Sglang) => Some(GenerationEndpoint::Generate),
        _ => None,
    };
    if api.is_some() || path == "/abort_request" {
        engine.stats.record(recorded(&parts, &body));
    }
    let wants = match path {
        _ if api.is_some() => FaultScope::Generation,
        "/tokenize" | "/v1/tokenize" | "/v1/chat/completions/render" | "/v1/completions/render" => {
            FaultScope::Tokenization
        }
        _ => FaultScope::Other,
    };
    if wants == FaultScope::Tokenization {
        engine.stats.update(|stats| stats.tokens_asked += 1);
    }
    let fault = engine.faults.next_fault(wants);
    match api {
        Some(api) => generate(engine, scissors, api, &parts, &body, fault).await,
        None => {
            if let Some(answer) = fault_response(engine.options.protocol, scissors, fault, false).await {
                return answer;
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

/// The simulator's own interface. No fault meets it, except a closed port.
fn simulator_route(engine: &Arc<SimEngineState>, parts: &Parts, body: &Bytes) -> Option<SimResponse> {
    match (&parts.method, parts.uri.path()) {
        (&Method::GET, "/_sim/stats") => {
            Some(response::json_ok(&serde_json::to_value(engine.stats.snapshot()).unwrap_or_default()))
        }
        (&Method::GET, "/_sim/last") => {
            let last: Vec<Value> = engine
                .stats
                .recent_requests(MAX_RECORDED_REQUESTS)
                .iter()
                .map(|kept| {
                    json!({"method": kept.method, "target": kept.target, "headers": kept.headers,
                           "body": String::from_utf8_lossy(&kept.body)})
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
                    "not a fault: {error}; try {{\"fault\":\"hang\"}} or {{\"fault\":\"die_mid_stream\",\"tokens\":3}}\n"
                ),
            ),
        }),
        (&Method::POST, "/_sim/kv_events") => Some(match serde_json::from_slice::<KvEventFault>(body) {
            Ok(KvEventFault::LoseEvery(every)) => {
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
                format!("not a fault of events: {error}; try {{\"lose_every\":3}} or {{\"restart\":true}}\n"),
            ),
        }),
        _ => None,
    }
}

/// The answer of a broken engine, if it is broken in a way that needs no generation.
async fn fault_response(
    face: SimProtocol,
    scissors: &ConnectionFault,
    fault: EngineFault,
    streaming: bool,
) -> Option<SimResponse> {
    match fault {
        // A closed port reaches here only while it closes.
        EngineFault::Hang | EngineFault::Refuse => std::future::pending().await,
        EngineFault::CloseBeforeFirstByte => Some(scissors.trigger(ConnectionFaultKind::Close).await),
        EngineFault::Garbage => Some(scissors.trigger(ConnectionFaultKind::Garbage).await),
        EngineFault::Status500 => Some(internal_error(face, "Internal server error")),
        EngineFault::NotFound => Some(response::not_found(face)),
        EngineFault::SseError if !streaming => Some(internal_error(face, "simulated failure")),
        EngineFault::SseError => {
            let events = [response::event(&response::stream_error_value("simulated failure")), done_event()];
            Some(response::stream("text/event-stream; charset=utf-8", stream::iter(events.map(Ok))))
        }
        EngineFault::GarbageBody => {
            let kind = if streaming { "text/event-stream; charset=utf-8" } else { "application/json" };
            let garbage = Bytes::from_static(b"data: {\"id\":\xff\x00 this is not\n\n<html>neither is this");
            Some(response::stream(kind, stream::iter([Ok(garbage)])))
        }
        EngineFault::None
        | EngineFault::DieMidStream { .. }
        | EngineFault::HangMidStream { .. }
        | EngineFault::Slow { .. } => None,
    }
}

fn internal_error(face: SimProtocol, message: &str) -> SimResponse {
    let status = StatusCode::INTERNAL_SERVER_ERROR;
    response::json_with(status, &response::error_value(face, status, "InternalServerError", message))
}

pub(crate) fn done_event() -> Bytes {
    Bytes::from_static(b"data: [DONE]\n\n")
}

/// Counts a request, and counts it as left by its client unless it is settled before it is dropped.
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

    /// Says how the request ended.
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

async fn generate(
    engine: &Arc<SimEngineState>,
    scissors: &ConnectionFault,
    api: GenerationEndpoint,
    parts: &Parts,
    body: &Bytes,
    fault: EngineFault,
) -> SimResponse {
    let face = engine.options.protocol;
    let ask = GenerationRequest::parse(api, body);
    let rids = ask.as_ref().map(|ask| request_ids(ask, parts, face)).unwrap_or_default();
    let mut guard = OpenRequestGuard::new(engine, rids.clone());
    if !matches!(
        fault,
        EngineFault::None
            | EngineFault::Slow { .. }
            | EngineFault::DieMidStream { .. }
            | EngineFault::HangMidStream { .. }
    ) {
        if !matches!(fault, EngineFault::Hang) {
            guard.record_outcome(true);
        }
        let streaming = ask.as_ref().is_ok_and(|ask| ask.stream);
        if let Some(answer) = fault_response(face, scissors, fault, streaming).await {
            return answer;
        }
    }
    let planned = ask.and_then(|ask| {
        let timing = match fault {
            EngineFault::Slow { factor } => engine.timing.slowed(factor),
            _ => engine.timing.clone(),
        };
        let plan = match face {
            SimProtocol::Sglang => api_sglang::disaggregation_plan(engine, &ask, parts)?,
            SimProtocol::Vllm => api_vllm::disaggregation_plan(engine, &ask, parts, &rids)?,
        };
        let jobs = generation_jobs(engine, &ask, &plan, &timing, &guard.cancel)?;
        Ok((response_renderer(engine, &ask, rids, &plan), ask, jobs))
    });
    let (frame, ask, jobs) = match planned {
        Ok(planned) => planned,
        Err(refusal) => {
            guard.record_outcome(true);
            return match api {
                GenerationEndpoint::Generate => {
                    response::json_with(refusal.status, &json!({"error": {"message": refusal.message}}))
                }
                GenerationEndpoint::Chat | GenerationEndpoint::Completion => {
                    response::rejection(face, &refusal)
                }
            };
        }
    };
    if ask.stream {
        return stream_response(engine, guard, frame, &ask, jobs, fault).await;
    }
    let speeches = join_all(jobs.into_iter().map(|job| generate_choice(engine, job))).await;
    let answers: Result<Vec<ChoiceOutput>, GenerationError> = speeches.into_iter().collect();
    match answers {
        Ok(mut answers) => {
            for (index, answer) in answers.iter_mut().enumerate() {
                fill_request_fields(answer, &ask, index, &engine.options.role);
            }
            let whole = frame.complete_response(&answers, &ask);
            if let EngineFault::DieMidStream { .. } | EngineFault::HangMidStream { .. } = fault {
                return truncated_response(&whole, guard, fault);
            }
            guard.record_outcome(false);
            response::json_ok(&whole)
        }
        Err(error) => {
            guard.record_outcome(true);
            internal_error(face, &error.message)
        }
    }
}

/// What the protocol says about a request, beside its content.
#[derive(Debug, Clone)]
pub(crate) struct DisaggregationPlan {
    /// One per answer.
    pub(crate) transfers: Vec<SimKvTransfer>,
    /// One per answer.
    pub(crate) ranks: Vec<u32>,
    pub(crate) kv_transfer_params: Value,
    pub(crate) prefill_leg: bool,
}

fn request_ids(ask: &GenerationRequest, parts: &Parts, face: SimProtocol) -> Vec<String> {
    match face {
        SimProtocol::Sglang => {
            let mut ids = ask.rids.clone();
            let first = ids.first().cloned();
            ids.resize_with(ask.choice_count().max(ids.len()), || {
                // One id for a batch stands for all of it.
                first.clone().unwrap_or_else(response::hex_id)
            });
            ids
        }
        SimProtocol::Vllm => {
            let given = parts.headers.get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
            let id = given.unwrap_or_else(response::hex_id);
            vec![if ask.endpoint == GenerationEndpoint::Chat {
                format!("chatcmpl-{id}")
            } else {
                format!("cmpl-{id}")
            }]
        }
    }
}

fn generation_jobs(
    engine: &SimEngineState,
    ask: &GenerationRequest,
    plan: &DisaggregationPlan,
    timing: &super::ScaledTiming,
    cancel: &CancellationToken,
) -> Result<Vec<GenerationJob>, SimRejection> {
    let longest = ask.prompts.iter().map(|prompt| prompt.len()).max().unwrap_or_default();
    if longest > engine.options.context_tokens {
        return Err(SimRejection::bad_request(format!(
            "The input ({longest} tokens) is longer than the model's context length ({} tokens).",
            engine.options.context_tokens
        )));
    }
    let places = plan.transfers.iter().zip(&plan.ranks).enumerate();
    Ok(places
        .map(|(index, (handover, rank))| {
            let (prompt, choice) = ask.prompt_and_choice(index);
            GenerationJob {
                tokens: ask.prompts.get(prompt).cloned().unwrap_or_default(),
                choice,
                namespace: PromptNamespace::of(&ask.body, engine.options.protocol, prompt),
                max_tokens: ask.max_tokens,
                stop: ask.stop.clone(),
                tool_call: ask.tool.clone(),
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
    ask: &GenerationRequest,
    ids: Vec<String>,
    plan: &DisaggregationPlan,
) -> ResponseRenderer {
    ResponseRenderer {
        protocol: engine.options.protocol,
        endpoint: ask.endpoint,
        id: ids.first().cloned().unwrap_or_default(),
        ids,
        created: unix_ms() / 1_000,
        model: ask.model.clone().unwrap_or_else(|| engine.options.model.clone()),
        logprobs: ask.logprobs,
        return_token_ids: ask.return_token_ids,
        n: ask.n as usize,
        tool: ask.tool.as_ref().filter(|_| !plan.prefill_leg).map(|tool| tool.name.clone()),
        kv_transfer_params: plan.kv_transfer_params.clone(),
        prefill_leg: plan.prefill_leg,
        started_unix_s: unix_s(),
    }
}

/// Fills in what an answer repeats of its request.
pub(crate) fn fill_request_fields(
    answer: &mut ChoiceOutput,
    ask: &GenerationRequest,
    index: usize,
    role: &SimRole,
) {
    // A decode engine has no logits of the prompt; the gateway joins both legs' arrays.
    answer.logprobs_from = ask.logprobs_from.filter(|_| *role != SimRole::Decode);
    let (prompt, _) = ask.prompt_and_choice(index);
    if (ask.return_token_ids || answer.logprobs_from.is_some())
        && let Some(tokens) = ask.prompts.get(prompt)
    {
        answer.prompt_ids = tokens.to_vec();
    }
}

/// Produces a whole answer.
async fn generate_choice(
    engine: &Arc<SimEngineState>,
    job: GenerationJob,
) -> Result<ChoiceOutput, GenerationError> {
    let mut answer = ChoiceOutput { dp_rank: job.rank, ..ChoiceOutput::default() };
    let mut speech = ChoiceGeneration::start(engine, job).await?;
    while let Some(piece) = speech.next().await {
        answer.push(piece);
    }
    answer.close(&speech);
    Ok(answer)
}

/// A whole answer that breaks off in the middle.
fn truncated_response(whole: &Value, guard: OpenRequestGuard, fault: EngineFault) -> SimResponse {
    let text = Bytes::from(whole.to_string());
    let first = stream::iter([Ok(text.slice(..text.len() / 2))]);
    let end = stream::once(async move { Err(abort_body(Some(guard), fault).await) });
    response::stream("application/json", first.chain(end))
}

/// Falls silent for good, or breaks off once everything before is written.
pub(crate) async fn abort_body(guard: Option<OpenRequestGuard>, fault: EngineFault) -> BodyAborted {
    if let EngineFault::HangMidStream { .. } = fault {
        // The guard stays here, and sees the client go.
        std::future::pending::<()>().await;
    }
    if let Some(mut guard) = guard {
        guard.record_outcome(true);
    }
    // One turn of the event loop, so that what was written before is flushed.
    tokio::task::yield_now().await;
    BodyAborted
}
