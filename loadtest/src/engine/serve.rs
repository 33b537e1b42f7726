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

use super::ask::{Api, Ask};
use super::faults::{EventFault, Fault, FaultPlan, Wants};
use super::namespace::Namespace;
use super::reply::{self, BreakOff, Refusal, Reply};
use super::server::{Cut, Scissors, read_body};
use super::speech::{EngineError, Handover, Job, Speech};
use super::stats::{AbortKind, MAX_REQUESTS_KEPT, RecordedRequest, unix_ms, unix_s};
use super::stream::stream_answer;
use super::write::{Answer, Frame};
use super::{Engine, Face, OpenRequest, Role, face_sglang, face_vllm};

/// Largest request body: a prompt of about 64 million bytes.
const MAX_BODY_BYTES: usize = 64 * 1024 * 1024;

/// Answers a request at the main port.
pub(crate) async fn handle(engine: &Arc<Engine>, scissors: &Scissors, request: Request<Incoming>) -> Reply {
    let (parts, body) = request.into_parts();
    let Some(body) = read_body(body, MAX_BODY_BYTES).await else {
        return reply::text(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large or incomplete");
    };
    let path = parts.uri.path();
    if let Some(answer) = simulator_route(engine, &parts, &body) {
        return answer;
    }
    let api = match (path, engine.config.face) {
        _ if parts.method != Method::POST => None,
        ("/v1/chat/completions", _) => Some(Api::Chat),
        ("/v1/completions", _) => Some(Api::Completion),
        ("/generate", Face::Sglang) => Some(Api::Generate),
        _ => None,
    };
    if api.is_some() || path == "/abort_request" {
        engine.stats.record(recorded(&parts, &body));
    }
    let wants = match path {
        _ if api.is_some() => Wants::Generation,
        "/tokenize" | "/v1/tokenize" | "/v1/chat/completions/render" | "/v1/completions/render" => {
            Wants::Tokens
        }
        _ => Wants::Other,
    };
    if wants == Wants::Tokens {
        engine.stats.change(|stats| stats.tokens_asked += 1);
    }
    let fault = engine.faults.take(wants);
    match api {
        Some(api) => generate(engine, scissors, api, &parts, &body, fault).await,
        None => {
            if let Some(answer) = fail(engine.config.face, scissors, fault, false).await {
                return answer;
            }
            match engine.config.face {
                Face::Sglang => face_sglang::route(engine, &parts, &body),
                Face::Vllm => face_vllm::route(engine, &parts, &body),
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
fn simulator_route(engine: &Arc<Engine>, parts: &Parts, body: &Bytes) -> Option<Reply> {
    match (&parts.method, parts.uri.path()) {
        (&Method::GET, "/_sim/stats") => {
            Some(reply::json_ok(&serde_json::to_value(engine.stats.snapshot()).unwrap_or_default()))
        }
        (&Method::GET, "/_sim/last") => {
            let last: Vec<Value> = engine
                .stats
                .last(MAX_REQUESTS_KEPT)
                .iter()
                .map(|kept| {
                    json!({"method": kept.method, "target": kept.target, "headers": kept.headers,
                           "body": String::from_utf8_lossy(&kept.body)})
                })
                .collect();
            Some(reply::json_ok(&Value::Array(last)))
        }
        (&Method::POST, "/_sim/fault") => Some(match serde_json::from_slice::<FaultPlan>(body) {
            Ok(plan) => {
                engine.set_fault(plan);
                reply::json_ok(&json!({"ok": true}))
            }
            Err(error) => reply::text(
                StatusCode::BAD_REQUEST,
                format!(
                    "not a fault: {error}; try {{\"fault\":\"hang\"}} or {{\"fault\":\"die_mid_stream\",\"tokens\":3}}\n"
                ),
            ),
        }),
        (&Method::POST, "/_sim/kv_events") => Some(match serde_json::from_slice::<EventFault>(body) {
            Ok(EventFault::LoseEvery(every)) => {
                engine.lose_kv_events(every);
                reply::json_ok(&json!({"ok": true}))
            }
            Ok(EventFault::Restart(restart)) => {
                if restart {
                    engine.restart_caches();
                }
                reply::json_ok(&json!({"ok": true}))
            }
            Err(error) => reply::text(
                StatusCode::BAD_REQUEST,
                format!("not a fault of events: {error}; try {{\"lose_every\":3}} or {{\"restart\":true}}\n"),
            ),
        }),
        _ => None,
    }
}

/// The answer of a broken engine, if it is broken in a way that needs no generation.
async fn fail(face: Face, scissors: &Scissors, fault: Fault, streaming: bool) -> Option<Reply> {
    match fault {
        // A closed port reaches here only while it closes.
        Fault::Hang | Fault::Refuse => std::future::pending().await,
        Fault::CloseBeforeFirstByte => Some(scissors.cut(Cut::Close).await),
        Fault::Garbage => Some(scissors.cut(Cut::Garbage).await),
        Fault::Status500 => Some(internal_error(face, "Internal server error")),
        Fault::NotFound => Some(reply::not_found(face)),
        Fault::SseError if !streaming => Some(internal_error(face, "simulated failure")),
        Fault::SseError => {
            let events = [reply::event(&reply::stream_error_value("simulated failure")), done_event()];
            Some(reply::stream("text/event-stream; charset=utf-8", stream::iter(events.map(Ok))))
        }
        Fault::GarbageBody => {
            let kind = if streaming { "text/event-stream; charset=utf-8" } else { "application/json" };
            let garbage = Bytes::from_static(b"data: {\"id\":\xff\x00 this is not\n\n<html>neither is this");
            Some(reply::stream(kind, stream::iter([Ok(garbage)])))
        }
        Fault::None | Fault::DieMidStream { .. } | Fault::HangMidStream { .. } | Fault::Slow { .. } => None,
    }
}

fn internal_error(face: Face, message: &str) -> Reply {
    let status = StatusCode::INTERNAL_SERVER_ERROR;
    reply::json_with(status, &reply::error_value(face, status, "InternalServerError", message))
}

pub(crate) fn done_event() -> Bytes {
    Bytes::from_static(b"data: [DONE]\n\n")
}

/// Counts a request, and counts it as left by its client unless it is settled before it is dropped.
pub(crate) struct OpenGuard {
    engine: Arc<Engine>,
    number: u64,
    rid: String,
    pub(crate) cancel: CancellationToken,
    settled: bool,
}

impl OpenGuard {
    fn new(engine: &Arc<Engine>, rids: Vec<String>) -> Self {
        let number = engine.next_request.fetch_add(1, Ordering::Relaxed);
        let cancel = CancellationToken::new();
        let rid = rids.first().cloned().unwrap_or_default();
        engine.open.lock().insert(number, OpenRequest { rids, cancel: cancel.clone() });
        engine.stats.change(|stats| {
            stats.started += 1;
            stats.active += 1;
        });
        Self { engine: Arc::clone(engine), number, rid, cancel, settled: false }
    }

    /// Says how the request ended.
    pub(crate) fn settle(&mut self, failed: bool) {
        self.settled = true;
        if self.cancel.is_cancelled() {
            self.engine.stats.abort(AbortKind::Rid, &self.rid);
        } else {
            self.engine.stats.change(|stats| if failed { stats.failed += 1 } else { stats.finished += 1 });
        }
    }
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.engine.open.lock().remove(&self.number);
        self.engine.stats.change(|stats| stats.active -= 1);
        if !self.settled {
            self.engine.stats.abort(AbortKind::Disconnect, &self.rid);
        }
    }
}

async fn generate(
    engine: &Arc<Engine>,
    scissors: &Scissors,
    api: Api,
    parts: &Parts,
    body: &Bytes,
    fault: Fault,
) -> Reply {
    let face = engine.config.face;
    let ask = Ask::read(api, body);
    let rids = ask.as_ref().map(|ask| ids(ask, parts, face)).unwrap_or_default();
    let mut guard = OpenGuard::new(engine, rids.clone());
    if !matches!(
        fault,
        Fault::None | Fault::Slow { .. } | Fault::DieMidStream { .. } | Fault::HangMidStream { .. }
    ) {
        if !matches!(fault, Fault::Hang) {
            guard.settle(true);
        }
        let streaming = ask.as_ref().is_ok_and(|ask| ask.stream);
        if let Some(answer) = fail(face, scissors, fault, streaming).await {
            return answer;
        }
    }
    let planned = ask.and_then(|ask| {
        let timing = match fault {
            Fault::Slow { factor } => engine.timing.slowed(factor),
            _ => engine.timing.clone(),
        };
        let plan = match face {
            Face::Sglang => face_sglang::plan(engine, &ask, parts)?,
            Face::Vllm => face_vllm::plan(engine, &ask, parts, &rids)?,
        };
        let jobs = jobs(engine, &ask, &plan, &timing, &guard.cancel)?;
        Ok((frame(engine, &ask, rids, &plan), ask, jobs))
    });
    let (frame, ask, jobs) = match planned {
        Ok(planned) => planned,
        Err(refusal) => {
            guard.settle(true);
            return match api {
                Api::Generate => {
                    reply::json_with(refusal.status, &json!({"error": {"message": refusal.message}}))
                }
                Api::Chat | Api::Completion => reply::refusal(face, &refusal),
            };
        }
    };
    if ask.stream {
        return stream_answer(engine, guard, frame, &ask, jobs, fault).await;
    }
    let speeches = join_all(jobs.into_iter().map(|job| speak(engine, job))).await;
    let answers: Result<Vec<Answer>, EngineError> = speeches.into_iter().collect();
    match answers {
        Ok(mut answers) => {
            for (index, answer) in answers.iter_mut().enumerate() {
                complete(answer, &ask, index, &engine.config.role);
            }
            let whole = frame.whole(&answers, &ask);
            if let Fault::DieMidStream { .. } | Fault::HangMidStream { .. } = fault {
                return half(&whole, guard, fault);
            }
            guard.settle(false);
            reply::json_ok(&whole)
        }
        Err(error) => {
            guard.settle(true);
            internal_error(face, &error.message)
        }
    }
}

/// What the protocol says about a request, beside its content.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// One per answer.
    pub(crate) handovers: Vec<Handover>,
    /// One per answer.
    pub(crate) ranks: Vec<u32>,
    pub(crate) kv_transfer_params: Value,
    pub(crate) prefill_leg: bool,
}

fn ids(ask: &Ask, parts: &Parts, face: Face) -> Vec<String> {
    match face {
        Face::Sglang => {
            let mut ids = ask.rids.clone();
            let first = ids.first().cloned();
            ids.resize_with(ask.answers().max(ids.len()), || {
                // One id for a batch stands for all of it.
                first.clone().unwrap_or_else(reply::hex_id)
            });
            ids
        }
        Face::Vllm => {
            let given = parts.headers.get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
            let id = given.unwrap_or_else(reply::hex_id);
            vec![if ask.api == Api::Chat { format!("chatcmpl-{id}") } else { format!("cmpl-{id}") }]
        }
    }
}

fn jobs(
    engine: &Engine,
    ask: &Ask,
    plan: &Plan,
    timing: &super::Timing,
    cancel: &CancellationToken,
) -> Result<Vec<Job>, Refusal> {
    let longest = ask.prompts.iter().map(|prompt| prompt.len()).max().unwrap_or_default();
    if longest > engine.config.context_tokens {
        return Err(Refusal::bad_request(format!(
            "The input ({longest} tokens) is longer than the model's context length ({} tokens).",
            engine.config.context_tokens
        )));
    }
    let places = plan.handovers.iter().zip(&plan.ranks).enumerate();
    Ok(places
        .map(|(index, (handover, rank))| {
            let (prompt, choice) = ask.place(index);
            Job {
                tokens: ask.prompts.get(prompt).cloned().unwrap_or_default(),
                choice,
                namespace: Namespace::of(&ask.body, engine.config.face, prompt),
                max_tokens: ask.max_tokens,
                stop: ask.stop.clone(),
                tool: ask.tool.clone(),
                handover: handover.clone(),
                rank: *rank,
                timing: timing.clone(),
                cancel: cancel.clone(),
            }
        })
        .collect())
}

fn frame(engine: &Engine, ask: &Ask, ids: Vec<String>, plan: &Plan) -> Frame {
    Frame {
        face: engine.config.face,
        api: ask.api,
        id: ids.first().cloned().unwrap_or_default(),
        ids,
        created: unix_ms() / 1_000,
        model: ask.model.clone().unwrap_or_else(|| engine.config.model.clone()),
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
pub(crate) fn complete(answer: &mut Answer, ask: &Ask, index: usize, role: &Role) {
    // A decode engine has no logits of the prompt; the gateway joins both legs' arrays.
    answer.logprobs_from = ask.logprobs_from.filter(|_| *role != Role::Decode);
    let (prompt, _) = ask.place(index);
    if (ask.return_token_ids || answer.logprobs_from.is_some())
        && let Some(tokens) = ask.prompts.get(prompt)
    {
        answer.prompt_ids = tokens.to_vec();
    }
}

/// Produces a whole answer.
async fn speak(engine: &Arc<Engine>, job: Job) -> Result<Answer, EngineError> {
    let mut answer = Answer { dp_rank: job.rank, ..Answer::default() };
    let mut speech = Speech::begin(engine, job).await?;
    while let Some(piece) = speech.next().await {
        answer.push(piece);
    }
    answer.close(&speech);
    Ok(answer)
}

/// A whole answer that breaks off in the middle.
fn half(whole: &Value, guard: OpenGuard, fault: Fault) -> Reply {
    let text = Bytes::from(whole.to_string());
    let first = stream::iter([Ok(text.slice(..text.len() / 2))]);
    let end = stream::once(async move { Err(break_off(Some(guard), fault).await) });
    reply::stream("application/json", first.chain(end))
}

/// Falls silent for good, or breaks off once everything before is written.
pub(crate) async fn break_off(guard: Option<OpenGuard>, fault: Fault) -> BreakOff {
    if let Fault::HangMidStream { .. } = fault {
        // The guard stays here, and sees the client go.
        std::future::pending::<()>().await;
    }
    if let Some(mut guard) = guard {
        guard.settle(true);
    }
    // One turn of the event loop, so that what was written before is flushed.
    tokio::task::yield_now().await;
    BreakOff
}
