//! Converts an engine's rejection of a request into the error format of the client's API.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde_json::{Value, json};

use crate::error::{ErrorFormat, anthropic_error, retry_after};

/// Longest message that is passed on.
const MAX_MESSAGE_LEN: usize = 2000;
/// Markers after which engines quote their input (with the members that the gateway added) or their own source files.
const INTERNAL_MARKERS: [&str; 3] = ["'input':", "\n\n  File ", "Traceback (most recent call last)"];

/// The response for an engine's 4xx response. `{"error": {…}}` stays as it is; SGLang's flat form and plain text are wrapped.
/// Messages are cut before internal details of the fleet.
pub(super) fn engine_error(
    format: ErrorFormat,
    status: StatusCode,
    body: &Bytes,
    after: Option<Duration>,
) -> Response<Body> {
    let error = match serde_json::from_slice::<Value>(body) {
        Ok(Value::Object(mut object)) => match object.remove("error") {
            Some(Value::Object(inner)) => Value::Object(inner),
            Some(Value::String(text)) => json!({"message": text}),
            _ => Value::Object(object),
        },
        Ok(Value::String(text)) => json!({"message": text}),
        _ => json!({"message": String::from_utf8_lossy(body)}),
    };
    let message = match (&error["message"], &error["detail"]) {
        (Value::String(text), _) | (_, Value::String(text)) => redact(text),
        (_, detail) if !detail.is_null() => redact(&detail.to_string()),
        _ => format!("the engine responded with {status}"),
    };
    let text_or = |key: &str, default: &str| match &error[key] {
        Value::String(text) if !text.is_empty() => text.clone(),
        _ => default.to_owned(),
    };
    let error_body = match format {
        ErrorFormat::Anthropic => anthropic_error(status, &message),
        ErrorFormat::OpenAi | ErrorFormat::Responses => json!({"error": {
            "message": message,
            "type": text_or("type", "invalid_request_error"),
            "param": error["param"],
            "code": text_or("code", "engine_rejected"),
        }}),
    };
    let mut response = Response::new(Body::from(error_body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(after) = after {
        response.headers_mut().insert(RETRY_AFTER, retry_after(after));
    }
    response
}

fn redact(message: &str) -> String {
    let end =
        INTERNAL_MARKERS.iter().filter_map(|marker| message.find(marker)).min().unwrap_or(message.len());
    let mut end = end.min(MAX_MESSAGE_LEN);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message[..end].trim_end_matches([' ', ',', '{', '\n']).to_owned()
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    async fn converted(body: &'static str) -> Value {
        let body = Bytes::from_static(body.as_bytes());
        let response = engine_error(ErrorFormat::OpenAi, StatusCode::BAD_REQUEST, &body, None);
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice::<Value>(&body).unwrap()["error"].take()
    }

    #[tokio::test]
    async fn every_error_format_is_converted_to_openais() {
        let vllm =
            converted(r#"{"error":{"message":"bad n","type":"BadRequestError","param":"n","code":400}}"#)
                .await;
        assert_eq!(
            vllm,
            json!({"message":"bad n","type":"BadRequestError","param":"n","code":"engine_rejected"})
        );
        let sglang = converted(
            r#"{"object":"error","message":"too long","type":"BadRequest","param":null,"code":400}"#,
        )
        .await;
        assert_eq!(
            sglang,
            json!({"message":"too long","type":"BadRequest","param":null,"code":"engine_rejected"})
        );
        assert_eq!(converted("nope").await["message"], "nope");
        assert_eq!(converted(r#"{"detail":[{"loc":["body"]}]}"#).await["message"], r#"[{"loc":["body"]}]"#);
        assert_eq!(converted(r#"{"error":"short"}"#).await["message"], "short");
    }

    #[tokio::test]
    async fn internal_details_are_removed_from_messages() {
        let body = r#"{"message":"1 validation error:\n {'type': 'float', 'msg': 'not a number', 'input': {'bootstrap_host': '10.0.0.1'}}\n\n  File \"/opt/x.py\""}"#;
        let message = converted(body).await["message"].as_str().unwrap().to_owned();
        assert!(message.contains("not a number"), "{message}");
        assert!(!message.contains("10.0.0.1") && !message.contains("/opt"), "{message}");
    }
}
