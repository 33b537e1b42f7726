//! HTTP responses.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};

use super::config::SimProtocol;

/// Truncates the body: the connection is closed without the end of the body.
#[derive(Debug, thiserror::Error)]
#[error("response truncated by fault injection")]
pub(crate) struct BodyAborted;

impl From<Infallible> for BodyAborted {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

pub(crate) type SimResponse = Response<UnsyncBoxBody<Bytes, BodyAborted>>;

/// A request that the engine rejects.
#[derive(Debug)]
pub(crate) struct SimRejection {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    /// The member of the request that is wrong.
    pub(crate) param: Option<&'static str>,
    pub(crate) message: String,
}

/// Kind of a rejection by vLLM's validation of the body, before any of its handlers.
pub(crate) const INVALID_BODY: &str = "Bad Request";

impl SimRejection {
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            param: None,
            message: message.into(),
        }
    }

    /// A body without a required member, or with one of a wrong type.
    pub(crate) fn invalid_body(param: &'static str, message: &str) -> Self {
        let message = format!("1 validation error:\n  {param}: {message}");
        Self { status: StatusCode::BAD_REQUEST, kind: INVALID_BODY, param: Some(param), message }
    }

    /// A member that the Responses API rejects.
    pub(crate) fn invalid_request(
        status: StatusCode,
        param: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self { status, kind: "invalid_request_error", param: Some(param), message: message.into() }
    }

    /// vLLM's rejection of a model that it does not serve.
    pub(crate) fn unknown_model(model: &str, served: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError",
            param: Some("model"),
            message: format!("The model `{model}` does not exist. Valid aliases: {served}."),
        }
    }

    /// A failure of the engine.
    pub(crate) fn internal_error(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "InternalServerError",
            param: None,
            message: message.into(),
        }
    }

    /// SGLang's rejection of a request that did not come through a gateway.
    pub(crate) fn missing_bootstrap_room() -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequest",
            param: None,
            message: "Invalid request: Disaggregated request received without bootstrap room id".to_owned(),
        }
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

/// A body that is JSON already.
pub(crate) fn json_text(body: Bytes) -> SimResponse {
    with_content_type(StatusCode::OK, "application/json", body)
}

pub(crate) fn json_ok(value: &Value) -> SimResponse {
    json_with(StatusCode::OK, value)
}

pub(crate) fn text(status: StatusCode, body: impl Into<Bytes>) -> SimResponse {
    with_content_type(status, "text/plain; charset=utf-8", body.into())
}

/// A body of another type.
pub(crate) fn bytes(content_type: &'static str, body: &'static [u8]) -> SimResponse {
    with_content_type(StatusCode::OK, content_type, Bytes::from_static(body))
}

pub(crate) fn empty() -> SimResponse {
    Response::new(Full::new(Bytes::new()).map_err(BodyAborted::from).boxed_unsync())
}

/// A chunked body that may be truncated.
pub(crate) fn stream(
    content_type: &'static str,
    chunks: impl Stream<Item = Result<Bytes, BodyAborted>> + Send + 'static,
) -> SimResponse {
    let mut reply = Response::new(StreamBody::new(chunks.map(|chunk| chunk.map(Frame::data))).boxed_unsync());
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

pub(crate) fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

/// An event with its type in a line of its own, as Messages and Responses have.
pub(crate) fn named_event(value: &Value) -> Bytes {
    let name = value.get("type").and_then(Value::as_str).unwrap_or_default();
    Bytes::from(format!("event: {name}\ndata: {value}\n\n"))
}

pub(crate) fn done_event() -> Bytes {
    Bytes::from_static(b"data: [DONE]\n\n")
}

/// An error in the format of each engine's OpenAI API.
pub(crate) fn error_value(protocol: SimProtocol, rejection: &SimRejection) -> Value {
    let SimRejection { status, kind, param, message } = rejection;
    match protocol {
        SimProtocol::Sglang => json!({
            "object": "error", "message": message, "type": kind, "param": null, "code": status.as_u16(),
        }),
        SimProtocol::Vllm => json!({
            "error": {"message": message, "type": kind, "param": param, "code": status.as_u16()},
        }),
    }
}

/// An error inside a stream.
pub(crate) fn stream_error_value(message: &str) -> Value {
    json!({"error": {"object": "error", "message": message, "type": "InternalServerError", "param": null, "code": 500}})
}

pub(crate) fn rejection(protocol: SimProtocol, rejection: &SimRejection) -> SimResponse {
    json_with(rejection.status, &error_value(protocol, rejection))
}

pub(crate) fn not_found(protocol: SimProtocol) -> SimResponse {
    let value = match protocol {
        SimProtocol::Sglang | SimProtocol::Vllm => json!({"detail": "Not Found"}),
    };
    json_with(StatusCode::NOT_FOUND, &value)
}

/// A random id of 32 hexadecimal digits.
pub(crate) fn hex_id() -> String {
    format!("{:032x}", fastrand::u128(..))
}

/// A random version 4 UUID.
pub(crate) fn uuid() -> String {
    let hex = hex_id();
    format!("{}-{}-4{}-a{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
}
