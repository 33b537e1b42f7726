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

use crate::hosts::{GATEWAY, Outcome};
use crate::plan::{CALM, Fault, Host, Plan, Request};
use crate::report::{count, violation};

/// Time in which every request ends. The gateway's limits allow three attempts.
const BOUND: Duration = Duration::from_secs(40);
/// Time for the system to recover after the last fault.
const RECOVERY: Duration = Duration::from_secs(6);
/// How often the last requests are tried.
const LAST_TRIES: u32 = 5;
/// Characters of a token of simulated engines.
const TOKEN_BYTES: usize = 4;

thread_local! {
    /// The whole answer to each prompt.
    static ANSWERS: RefCell<BTreeMap<usize, String>> = const { RefCell::new(BTreeMap::new()) };
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    /// With an answer that claims to be whole.
    Whole(String),
    /// With an error of the gateway or an engine, before or after the answer began.
    Refused(String),
    /// The stream ended without claiming to be whole.
    Broken(String),
    /// There is no connection, or it broke.
    Lost(String),
    /// Not at all within the bound.
    Never,
}

/// Sends all requests of a plan, and some that must succeed when all faults are over.
pub(crate) async fn run(plan: Rc<Plan>) -> Outcome {
    let begun = tokio::time::Instant::now();
    let requests = plan.requests.iter().copied().enumerate().map(|(number, request)| {
        let plan = Rc::clone(&plan);
        tokio::task::spawn_local(async move {
            tokio::time::sleep_until(begun + request.at).await;
            one(number, request, &plan, is_spared(&plan)).await;
        })
    });
    for request in requests.collect::<Vec<_>>() {
        request.await?;
    }
    tokio::time::sleep_until(begun + CALM + RECOVERY).await;
    for prompt in 0..plan.lengths.len() {
        let request = Request { at: Duration::ZERO, prompt, stream: prompt % 2 == 0 };
        let mut tries = 0;
        while !one(1000 + prompt, request, &plan, true).await {
            tries += 1;
            if tries == LAST_TRIES {
                violation("recovery", &format!("prompt {prompt} gets no answer after all faults are over"));
                break;
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }
    Ok(())
}

/// Whether the gateway runs all the time, and its connections with clients are whole: then every request gets an HTTP answer.
fn is_spared(plan: &Plan) -> bool {
    let disturbs = |fault| matches!(fault, Fault::Crash(Host::Gateway) | Fault::CutConnections(_));
    !plan.incidents.iter().any(|incident| disturbs(incident.fault))
}

/// Makes a request and checks how it ends. Returns whether it was answered.
async fn one(number: usize, request: Request, plan: &Plan, is_spared: bool) -> bool {
    let begun = tokio::time::Instant::now();
    let end = tokio::time::timeout(BOUND, exchange(request, plan)).await.unwrap_or(End::Never);
    record(format_args!("request {number} {request:?} ended after {:?}: {end:?}", begun.elapsed()));
    let prompt = request.prompt;
    match &end {
        End::Whole(text) => {
            count("answers");
            check_answer(prompt, text, plan);
        }
        End::Refused(_) => count("errors"),
        End::Broken(_) => count("broken"),
        End::Lost(reason) if is_spared => {
            violation("typed error", &format!("request {number} has no HTTP answer: {reason}"));
        }
        End::Lost(_) => count("lost"),
        End::Never => {
            violation("bound", &format!("request {number} has not ended within {BOUND:?}"));
        }
    }
    matches!(end, End::Whole(_))
}

fn check_answer(prompt: usize, text: &str, plan: &Plan) {
    let length = plan.lengths.get(prompt).copied().unwrap_or_default() as usize * TOKEN_BYTES;
    if text.len() != length {
        let what = format!("prompt {prompt}: {} of {length} bytes claim to be the whole answer", text.len());
        return violation("whole answers", &what);
    }
    let first =
        ANSWERS.with_borrow_mut(|answers| answers.entry(prompt).or_insert_with(|| text.to_owned()).clone());
    if first != text {
        violation("right answers", &format!("prompt {prompt} was answered {first:?}, and then {text:?}"));
    }
}

async fn exchange(request: Request, plan: &Plan) -> End {
    match answer(request, plan).await {
        Ok(end) => end,
        Err(error) => End::Lost(error.to_string()),
    }
}

async fn answer(request: Request, plan: &Plan) -> Result<End, Box<dyn std::error::Error>> {
    let body = json!({
        "model": "sim",
        "prompt": format!("prompt {} ", request.prompt).repeat(120),
        "max_tokens": plan.lengths.get(request.prompt),
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
                return Ok(End::Broken(error.to_string()));
            }
            Err(error) => return Err(error.into()),
        }
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    if !head.status.is_success() {
        return Ok(refused(head.status.as_u16(), &text));
    }
    Ok(if request.stream { streamed(&text) } else { whole(&text) })
}

/// An error must have a body that says which.
fn refused(status: u16, text: &str) -> End {
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    let named = body.get("error").or(body.get("message")).is_some();
    if !named {
        violation("typed error", &format!("status {status} without an error in its body: {text:?}"));
    }
    End::Refused(format!("{status} {text}"))
}

fn whole(text: &str) -> End {
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    match body.pointer("/choices/0/text").and_then(Value::as_str) {
        Some(text) => End::Whole(text.to_owned()),
        None => {
            violation("whole answers", &format!("status 200 with a body that is no answer: {text:?}"));
            End::Refused(text.to_owned())
        }
    }
}

/// A stream whose connection ended in order.
fn streamed(text: &str) -> End {
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
        (true, None) => End::Whole(generated),
        (_, Some(error)) => End::Refused(error),
        (false, None) => {
            violation(
                "whole answers",
                &format!("a stream ended in order, without [DONE] or an error: {text:?}"),
            );
            End::Broken(text.to_owned())
        }
    }
}
