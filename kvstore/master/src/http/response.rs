//! Responses in the format of Mooncake's admin server.

use std::io;

use axum::body::Body;
use axum::response::Response;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{StatusCode, request::Parts};
use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{AdminFailure, AdminSuccess};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, Serializer};

const JSON: HeaderValue = HeaderValue::from_static("application/json; charset=utf-8");
/// Mooncake serves all text with the content type of Prometheus' text format.
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4");
const PLAIN_TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

/// JSON whose floating-point numbers have an exponent, as in Mooncake: `3.1E-1`, `0E0`.
struct ExponentFormatter;

impl Formatter for ExponentFormatter {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        if value.is_finite() { write!(writer, "{value:E}") } else { CompactFormatter.write_null(writer) }
    }
}

fn response(status: StatusCode, content_type: Option<HeaderValue>, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    if let Some(content_type) = content_type {
        response.headers_mut().insert(CONTENT_TYPE, content_type);
    }
    response
}

pub(super) fn json(status: StatusCode, value: &impl Serialize) -> Response {
    let mut body = Vec::new();
    match value.serialize(&mut Serializer::with_formatter(&mut body, ExponentFormatter)) {
        Ok(()) => response(status, Some(JSON), body),
        Err(error) => {
            tracing::error!(%error, "cannot serialize a response");
            response(StatusCode::INTERNAL_SERVER_ERROR, None, Body::empty())
        }
    }
}

/// A JSON response with status 200.
pub(super) fn ok(value: &impl Serialize) -> Response {
    json(StatusCode::OK, value)
}

/// `{"success":true,"data":…}`, with status 200.
pub(super) fn data(data: impl Serialize) -> Response {
    ok(&AdminSuccess { success: true, data })
}

/// An error response with the name of Mooncake's error code.
pub(super) fn failed(code: ErrorCode) -> Response {
    refused(status_of(code), code)
}

/// [`failed`] with another HTTP status.
pub(super) fn refused(status: StatusCode, code: ErrorCode) -> Response {
    let error_message = code.name().map_or_else(|| code.to_string(), str::to_owned);
    json(status, &AdminFailure { success: false, error_code: code, error_message })
}

/// A response with status 400.
pub(super) fn invalid(message: impl Into<String>) -> Response {
    let failure =
        AdminFailure { success: false, error_code: ErrorCode::INVALID_PARAMS, error_message: message.into() };
    json(StatusCode::BAD_REQUEST, &failure)
}

fn status_of(code: ErrorCode) -> StatusCode {
    match code {
        ErrorCode::INVALID_PARAMS => StatusCode::BAD_REQUEST,
        ErrorCode::OBJECT_NOT_FOUND
        | ErrorCode::REPLICA_IS_NOT_READY
        | ErrorCode::SEGMENT_NOT_FOUND
        | ErrorCode::JOB_NOT_FOUND => StatusCode::NOT_FOUND,
        ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS
        | ErrorCode::UNAVAILABLE_IN_CURRENT_MODE
        | ErrorCode::TENANT_NOT_EMPTY => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// A text response, complete or streamed.
pub(super) fn text(status: StatusCode, body: impl Into<Body>) -> Response {
    response(status, Some(TEXT), body)
}

/// A single word with a UTF-8 content type.
pub(super) fn plain_text(word: &'static str) -> Response {
    response(StatusCode::OK, Some(PLAIN_TEXT), word)
}

/// JSON lines: one value per line.
pub(super) fn json_lines(body: Body) -> Response {
    response(StatusCode::OK, Some(HeaderValue::from_static("application/x-ndjson")), body)
}

/// A response in a binary format.
pub(super) fn binary(body: Vec<u8>) -> Response {
    response(StatusCode::OK, Some(HeaderValue::from_static("application/octet-stream")), body)
}

/// Mooncake's response to an unknown path or method.
pub(super) async fn no_such_path(_: Parts) -> Response {
    response(StatusCode::NOT_FOUND, None, "404 Not Found")
}
