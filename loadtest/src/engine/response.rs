//! HTTP answers.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};

use super::config::SimProtocol;

/// The body breaks off here: the connection is closed without the end of the body.
#[derive(Debug, thiserror::Error)]
#[error("the simulated engine dies here")]
pub(crate) struct BodyAborted;

impl From<Infallible> for BodyAborted {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

pub(crate) type SimResponse = Response<UnsyncBoxBody<Bytes, BodyAborted>>;

/// A request the engine refuses.
#[derive(Debug)]
pub(crate) struct SimRejection {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    pub(crate) message: String,
}

impl SimRejection {
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, kind: "BadRequestError", message: message.into() }
    }
}

fn with_content_type(status: StatusCode, content_type: &'static str, body: Bytes) -> SimResponse {
    let mut reply = Response::new(Full::new(body).map_err(BodyAborted::from).boxed_unsync());
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

pub(crate) fn json_with(status: StatusCode, value: &Value) -> SimResponse {
    with_content_type(status, "application/json", Bytes::from(value.to_string()))
}

pub(crate) fn json_ok(value: &Value) -> SimResponse {
    json_with(StatusCode::OK, value)
}

pub(crate) fn text(status: StatusCode, body: impl Into<Bytes>) -> SimResponse {
    with_content_type(status, "text/plain; charset=utf-8", body.into())
}

pub(crate) fn empty() -> SimResponse {
    Response::new(Full::new(Bytes::new()).map_err(BodyAborted::from).boxed_unsync())
}

/// A body of chunks that may break off.
pub(crate) fn stream(
    content_type: &'static str,
    chunks: impl Stream<Item = Result<Bytes, BodyAborted>> + Send + 'static,
) -> SimResponse {
    let mut reply = Response::new(StreamBody::new(chunks.map(|chunk| chunk.map(Frame::data))).boxed_unsync());
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

/// One server-sent event.
pub(crate) fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

/// An error in the words of each engine's OpenAI API.
pub(crate) fn error_value(face: SimProtocol, status: StatusCode, kind: &str, message: &str) -> Value {
    match face {
        SimProtocol::Sglang => json!({
            "object": "error", "message": message, "type": kind, "param": null, "code": status.as_u16(),
        }),
        SimProtocol::Vllm => json!({
            "error": {"message": message, "type": kind, "param": null, "code": status.as_u16()},
        }),
    }
}

/// An error inside a stream.
pub(crate) fn stream_error_value(message: &str) -> Value {
    json!({"error": {"object": "error", "message": message, "type": "InternalServerError", "param": null, "code": 500}})
}

pub(crate) fn rejection(face: SimProtocol, refusal: &SimRejection) -> SimResponse {
    json_with(refusal.status, &error_value(face, refusal.status, refusal.kind, &refusal.message))
}

pub(crate) fn not_found(face: SimProtocol) -> SimResponse {
    let value = match face {
        SimProtocol::Sglang | SimProtocol::Vllm => json!({"detail": "Not Found"}),
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
