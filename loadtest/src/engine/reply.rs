//! HTTP answers.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};

use super::config::Face;

/// The body breaks off here: the connection is closed without the end of the body.
#[derive(Debug, thiserror::Error)]
#[error("the simulated engine dies here")]
pub(crate) struct BreakOff;

impl From<Infallible> for BreakOff {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

pub(crate) type Reply = Response<UnsyncBoxBody<Bytes, BreakOff>>;

/// A request the engine refuses.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, kind: "BadRequestError", message: message.into() }
    }
}

fn with_type(status: StatusCode, content_type: &'static str, body: Bytes) -> Reply {
    let mut reply = Response::new(Full::new(body).map_err(BreakOff::from).boxed_unsync());
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

pub(crate) fn json_with(status: StatusCode, value: &Value) -> Reply {
    with_type(status, "application/json", Bytes::from(value.to_string()))
}

pub(crate) fn json_ok(value: &Value) -> Reply {
    json_with(StatusCode::OK, value)
}

pub(crate) fn text(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    with_type(status, "text/plain; charset=utf-8", body.into())
}

pub(crate) fn empty() -> Reply {
    Response::new(Full::new(Bytes::new()).map_err(BreakOff::from).boxed_unsync())
}

/// A body of chunks that may break off.
pub(crate) fn stream(
    content_type: &'static str,
    chunks: impl Stream<Item = Result<Bytes, BreakOff>> + Send + 'static,
) -> Reply {
    let mut reply = Response::new(StreamBody::new(chunks.map(|chunk| chunk.map(Frame::data))).boxed_unsync());
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

/// One server-sent event.
pub(crate) fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

/// An error in the words of each engine's OpenAI API.
pub(crate) fn error_value(face: Face, status: StatusCode, kind: &str, message: &str) -> Value {
    match face {
        Face::Sglang => json!({
            "object": "error", "message": message, "type": kind, "param": null, "code": status.as_u16(),
        }),
        Face::Vllm => json!({
            "error": {"message": message, "type": kind, "param": null, "code": status.as_u16()},
        }),
    }
}

/// An error inside a stream.
pub(crate) fn stream_error_value(message: &str) -> Value {
    json!({"error": {"object": "error", "message": message, "type": "InternalServerError", "param": null, "code": 500}})
}

pub(crate) fn refusal(face: Face, refusal: &Refusal) -> Reply {
    json_with(refusal.status, &error_value(face, refusal.status, refusal.kind, &refusal.message))
}

pub(crate) fn not_found(face: Face) -> Reply {
    let value = match face {
        Face::Sglang | Face::Vllm => json!({"detail": "Not Found"}),
    };
    json_with(StatusCode::NOT_FOUND, &value)
}

/// 32 hexadecimal digits.
pub(crate) fn hex_id() -> String {
    format!("{:032x}", fastrand::u128(..))
}

/// A version 4 UUID.
pub(crate) fn uuid() -> String {
    let hex = hex_id();
    format!("{}-{}-4{}-a{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
}
