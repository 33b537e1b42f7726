//! Clients of the gateway, and what their answers must be.

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

/// Time in which every request ends. The gateway's limits allow three attempts.
const REQUEST_DEADLINE: Duration = Duration::from_secs(40);
/// Time for the system to recover after the last fault.
const RECOVERY_TIME: Duration = Duration::from_secs(6);
/// How often the last requests are tried.
const MAX_RECOVERY_ATTEMPTS: u32 = 5;
/// Characters of a token of simulated engines.
const TOKEN_BYTES: usize = 4;

thread_local! {
    /// The whole answer to each prompt.
    static EXPECTED_COMPLETIONS: RefCell<BTreeMap<usize, String>> = const { RefCell::new(BTreeMap::new()) };
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum RequestEnd {
    /// With an answer that claims to be whole.
    Completed(String),
    /// With an error of the gateway or an engine, before or after the answer began.
    Rejected(String),
    /// The stream ended without claiming to be whole.
    Truncated(String),
    /// There is no connection, or it broke.
    Disconnected(String),
    /// Not at all within the bound.
    TimedOut,
}

/// Sends all requests of a plan, and some that must succeed when all faults are over.
pub(crate) async fn run(plan: Rc<SeedPlan>) -> HostResult {
    let begun = tokio::time::Instant::now();
    let requests = plan.requests.iter().copied().enumerate().map(|(number, request)| {
        let plan = Rc::clone(&plan);
        tokio::task::spawn_local(async move {
            tokio::time::sleep_until(begun + request.at).await;
            run_request(number, request, &plan, requires_http_response(&plan)).await;
        })
    });
    for request in requests.collect::<Vec<_>>() {
        request.await?;
    }
    tokio::time::sleep_until(begun + FAULTS_END + RECOVERY_TIME).await;
    for prompt in 0..plan.output_tokens.len() {
        let request = PlannedRequest { at: Duration::ZERO, prompt, stream: prompt % 2 == 0 };
        let mut tries = 0;
        while !run_request(1000 + prompt, request, &plan, true).await {
            tries += 1;
            if tries == MAX_RECOVERY_ATTEMPTS {
                violation("recovery", &format!("prompt {prompt} gets no answer after all faults are over"));
                break;
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }
    Ok(())
}

/// Whether the gateway runs all the time, and its connections with clients are whole: then every request gets an HTTP answer.
fn requires_http_response(plan: &SeedPlan) -> bool {
    let disturbs = |fault| {
        matches!(fault, SimulatedFault::Crash(SimulatedHost::Gateway) | SimulatedFault::CutConnections(_))
    };
    !plan.faults.iter().any(|incident| disturbs(incident.fault))
}

/// Makes a request and checks how it ends. Returns whether it was answered.
async fn run_request(number: usize, request: PlannedRequest, plan: &SeedPlan, is_spared: bool) -> bool {
    let begun = tokio::time::Instant::now();
    let end =
        tokio::time::timeout(REQUEST_DEADLINE, exchange(request, plan)).await.unwrap_or(RequestEnd::TimedOut);
    record(format_args!("request {number} {request:?} ended after {:?}: {end:?}", begun.elapsed()));
    let prompt = request.prompt;
    match &end {
        RequestEnd::Completed(text) => {
            count("answers");
            check_answer(prompt, text, plan);
        }
        RequestEnd::Rejected(_) => count("errors"),
        RequestEnd::Truncated(_) => count("broken"),
        RequestEnd::Disconnected(reason) if is_spared => {
            violation("typed error", &format!("request {number} has no HTTP answer: {reason}"));
        }
        RequestEnd::Disconnected(_) => count("lost"),
        RequestEnd::TimedOut => {
            violation("bound", &format!("request {number} has not ended within {REQUEST_DEADLINE:?}"));
        }
    }
    matches!(end, RequestEnd::Completed(_))
}

fn check_answer(prompt: usize, text: &str, plan: &SeedPlan) {
    let length = plan.output_tokens.get(prompt).copied().unwrap_or_default() as usize * TOKEN_BYTES;
    if text.len() != length {
        let what = format!("prompt {prompt}: {} of {length} bytes claim to be the whole answer", text.len());
        return violation("whole answers", &what);
    }
    let first = EXPECTED_COMPLETIONS
        .with_borrow_mut(|answers| answers.entry(prompt).or_insert_with(|| text.to_owned()).clone());
    if first != text {
        violation("right answers", &format!("prompt {prompt} was answered {first:?}, and then {text:?}"));
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
        // How it ends is seen by the request.
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
            // The connection ends without the end of the body, so that no client takes the stream for complete.
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

/// An error must have a body that says which.
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
            violation("whole answers", &format!("status 200 with a body that is no answer: {text:?}"));
            RequestEnd::Rejected(text.to_owned())
        }
    }
}

/// A stream whose connection ended in order.
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
                "whole answers",
                &format!("a stream ended in order, without [DONE] or an error: {text:?}"),
            );
            RequestEnd::Truncated(text.to_owned())
        }
    }
}
