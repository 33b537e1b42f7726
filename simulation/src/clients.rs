//! Clients of the gateway, and checks of its responses.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use http::Request as HttpRequest;
use http::header::HOST;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use moongate_runtime::net::TcpStream;
use moongate_runtime::net::simulated::record;
use serde_json::{Value, json};

use crate::hosts::{GATEWAY, HostResult};
use crate::plan::{FAULTS_END, PlannedRequest, SeedPlan, SimulatedFault, SimulatedHost};
use crate::report::{count, violation};

/// Time limit of every request. The gateway's limits allow three attempts.
const REQUEST_DEADLINE: Duration = Duration::from_secs(40);
/// Time for the system to recover after the last fault.
const RECOVERY_TIME: Duration = Duration::from_secs(6);
/// Attempts of each final request.
const MAX_RECOVERY_ATTEMPTS: u32 = 5;
/// Characters per token of simulated engines.
const TOKEN_BYTES: usize = 4;

thread_local! {
    /// The first complete response to each prompt.
    static EXPECTED_COMPLETIONS: RefCell<BTreeMap<usize, String>> = const { RefCell::new(BTreeMap::new()) };
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum RequestEnd {
    /// With a response that ended as complete.
    Completed(String),
    /// With an error of the gateway or an engine, before or after the response started.
    Rejected(String),
    /// The stream ended without an end marker.
    Truncated(String),
    /// The connection failed or was interrupted.
    Disconnected(String),
    /// The request did not end within the limit.
    TimedOut,
}

/// Sends all requests of a plan, and some that must succeed after all faults have ended.
pub(crate) async fn run(plan: Rc<SeedPlan>) -> HostResult {
    let started = tokio::time::Instant::now();
    let requests = plan.requests.iter().copied().enumerate().map(|(number, request)| {
        let plan = Rc::clone(&plan);
        tokio::task::spawn_local(async move {
            tokio::time::sleep_until(started + request.at).await;
            run_request(number, request, &plan, requires_http_response(&plan)).await;
        })
    });
    for request in requests.collect::<Vec<_>>() {
        request.await?;
    }
    tokio::time::sleep_until(started + FAULTS_END + RECOVERY_TIME).await;
    for prompt in 0..plan.output_tokens.len() {
        let request = PlannedRequest { at: Duration::ZERO, prompt, stream: prompt % 2 == 0 };
        let mut tries = 0;
        while !run_request(1000 + prompt, request, &plan, true).await {
            tries += 1;
            if tries == MAX_RECOVERY_ATTEMPTS {
                violation(
                    "recovery",
                    &format!("prompt {prompt} gets no response after all faults have ended"),
                );
                break;
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }
    Ok(())
}

/// Whether the gateway never crashes and its client connections are intact: then every request must get an HTTP
/// response.
fn requires_http_response(plan: &SeedPlan) -> bool {
    let disturbs = |fault| {
        matches!(fault, SimulatedFault::Crash(SimulatedHost::Gateway) | SimulatedFault::CutConnections(_))
    };
    !plan.faults.iter().any(|incident| disturbs(incident.fault))
}

/// Sends a request and checks how it ends. Returns whether it got a complete response.
async fn run_request(number: usize, request: PlannedRequest, plan: &SeedPlan, is_spared: bool) -> bool {
    let started = tokio::time::Instant::now();
    let end =
        tokio::time::timeout(REQUEST_DEADLINE, exchange(request, plan)).await.unwrap_or(RequestEnd::TimedOut);
    record(format_args!("request {number} {request:?} ended after {:?}: {end:?}", started.elapsed()));
    let prompt = request.prompt;
    match &end {
        RequestEnd::Completed(text) => {
            count("completed");
            check_answer(prompt, text, plan);
        }
        RequestEnd::Rejected(_) => count("rejected"),
        RequestEnd::Truncated(_) => count("truncated"),
        RequestEnd::Disconnected(reason) if is_spared => {
            violation("typed error", &format!("request {number} has no HTTP response: {reason}"));
        }
        RequestEnd::Disconnected(_) => count("disconnected"),
        RequestEnd::TimedOut => {
            violation(
                "request deadline",
                &format!("request {number} has not ended within {REQUEST_DEADLINE:?}"),
            );
        }
    }
    matches!(end, RequestEnd::Completed(_))
}

fn check_answer(prompt: usize, text: &str, plan: &SeedPlan) {
    let length = plan.output_tokens.get(prompt).copied().unwrap_or_default() as usize * TOKEN_BYTES;
    if text.len() != length {
        let message =
            format!("prompt {prompt}: {} of {length} bytes were marked as a complete response", text.len());
        return violation("answer completeness", &message);
    }
    let first = EXPECTED_COMPLETIONS
        .with_borrow_mut(|completions| completions.entry(prompt).or_insert_with(|| text.to_owned()).clone());
    if first != text {
        violation("answer consistency", &format!("prompt {prompt} first got {first:?}, then {text:?}"));
    }
}

async fn exchange(request: PlannedRequest, plan: &SeedPlan) -> RequestEnd {
    match send_request(request, plan).await {
        Ok(end) => end,
        Err(error) => RequestEnd::Disconnected(error.to_string()),
    }
}

async fn send_request(
    request: PlannedRequest,
    plan: &SeedPlan,
) -> Result<RequestEnd, Box<dyn std::error::Error>> {
    let body = json!({
        "model": "sim",
        "prompt": format!("prompt {} ", request.prompt).repeat(120),
        "max_tokens": plan.output_tokens.get(request.prompt),
        "stream": request.stream,
    });
    let stream = TcpStream::connect(GATEWAY).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::task::spawn_local(async move {
        // Connection errors surface in the request.
        let _ = connection.await;
    });
    let http = HttpRequest::post("/v1/completions")
        .header(HOST, GATEWAY)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))?;
    let (head, mut body) = sender.send_request(http).await?.into_parts();
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data)),
            // The connection ends without the end of the body, so that no client can take the stream for complete.
            Err(error) if head.status.is_success() && request.stream => {
                return Ok(RequestEnd::Truncated(error.to_string()));
            }
            Err(error) => return Err(error.into()),
        }
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    if !head.status.is_success() {
        return Ok(parse_rejection(head.status.as_u16(), &text));
    }
    Ok(if request.stream { parse_stream(&text) } else { parse_completion(&text) })
}

/// Checks that an error response has a typed error in its body.
fn parse_rejection(status: u16, text: &str) -> RequestEnd {
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    let named = body.get("error").or(body.get("message")).is_some();
    if !named {
        violation("typed error", &format!("status {status} without an error in its body: {text:?}"));
    }
    RequestEnd::Rejected(format!("{status} {text}"))
}

fn parse_completion(text: &str) -> RequestEnd {
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    match body.pointer("/choices/0/text").and_then(Value::as_str) {
        Some(text) => RequestEnd::Completed(text.to_owned()),
        None => {
            violation("answer completeness", &format!("status 200 with an invalid body: {text:?}"));
            RequestEnd::Rejected(text.to_owned())
        }
    }
}

/// Checks a stream whose connection ended without an error.
fn parse_stream(text: &str) -> RequestEnd {
    let (mut generated, mut error, mut is_done) = (String::new(), None, false);
    for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            is_done = true;
            continue;
        }
        let event: Value = serde_json::from_str(data).unwrap_or_default();
        if let Some(problem) = event.get("error") {
            error = Some(problem.to_string());
        }
        generated.extend(event.pointer("/choices/0/text").and_then(Value::as_str));
    }
    match (is_done, error) {
        (true, None) => RequestEnd::Completed(generated),
        (_, Some(error)) => RequestEnd::Rejected(error),
        (false, None) => {
            violation(
                "answer completeness",
                &format!("a stream ended in order, without [DONE] or an error: {text:?}"),
            );
            RequestEnd::Truncated(text.to_owned())
        }
    }
}
