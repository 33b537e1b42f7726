//! Errors for clients: one type, converted into a response in one place.

use std::fmt;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, Response, StatusCode};
use serde_json::{Value, json};

/// Stable machine-readable codes, listed in `docs/errors.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ApiErrorCode {
    /// The body is not a valid JSON object.
    InvalidJson,
    /// A member is missing or has the wrong type or value.
    InvalidRequest,
    /// The body is larger than the limit.
    BodyTooLarge,
    /// The body has an unsupported media type or content encoding.
    UnsupportedMediaType,
    /// The body did not arrive in time, or was truncated.
    BodyIncomplete,
    /// No engine serves the requested model.
    ModelNotFound,
    /// `/workers` requires the registration token.
    Unauthorized,
    /// The API key or token is missing or invalid.
    InvalidApiKey,
    /// The key is valid but lacks the scope.
    InsufficientPermissions,
    /// The tenant has exceeded its quota.
    RateLimited,
    /// The response that a request refers to is not stored.
    ResponseNotFound,
    /// The path does not exist.
    NotFound,
    /// The path exists, but not with this method.
    MethodNotAllowed,
    /// Engines are listed, but none is available now.
    NoEngineAvailable,
    /// All engines are too busy to meet the TTFT target.
    Overloaded,
    /// No engine in the fleet supports this kind of request.
    UnsupportedByFleet,
    PrefillFailed,
    DecodeFailed,
    WorkerFailed,
    /// An engine answered 503 in every attempt.
    EngineUnavailable,
    /// An engine did not respond within its time limit.
    EngineTimeout,
    /// This gateway has no memory, connections or file descriptors left for the request.
    GatewayOverloaded,
    /// No engine could load the LoRA adapter that the request needs.
    AdapterLoadFailed,
    /// The gateway is shutting down.
    ShuttingDown,
    /// The storage of files and batches cannot be read or written, or the stored state is damaged.
    StorageFailed,
}

impl ApiErrorCode {
    /// The `code` member of the error body and the label in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ApiErrorCode::InvalidJson => "invalid_json",
            ApiErrorCode::InvalidRequest => "invalid_request",
            ApiErrorCode::BodyTooLarge => "body_too_large",
            ApiErrorCode::UnsupportedMediaType => "unsupported_media_type",
            ApiErrorCode::BodyIncomplete => "body_incomplete",
            ApiErrorCode::ModelNotFound => "model_not_found",
            ApiErrorCode::Unauthorized => "unauthorized",
            ApiErrorCode::InvalidApiKey => "invalid_api_key",
            ApiErrorCode::InsufficientPermissions => "insufficient_permissions",
            ApiErrorCode::RateLimited => "rate_limit_exceeded",
            ApiErrorCode::ResponseNotFound => "response_not_found",
            ApiErrorCode::NotFound => "not_found",
            ApiErrorCode::MethodNotAllowed => "method_not_allowed",
            ApiErrorCode::NoEngineAvailable => "no_engine_available",
            ApiErrorCode::Overloaded => "overloaded",
            ApiErrorCode::UnsupportedByFleet => "unsupported_by_fleet",
            ApiErrorCode::PrefillFailed => "prefill_failed",
            ApiErrorCode::DecodeFailed => "decode_failed",
            ApiErrorCode::WorkerFailed => "worker_failed",
            ApiErrorCode::EngineUnavailable => "engine_unavailable",
            ApiErrorCode::EngineTimeout => "engine_timeout",
            ApiErrorCode::GatewayOverloaded => "gateway_overloaded",
            ApiErrorCode::AdapterLoadFailed => "adapter_load_failed",
            ApiErrorCode::ShuttingDown => "shutting_down",
            ApiErrorCode::StorageFailed => "storage_failed",
        }
    }

    /// HTTP status of the error response.
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            ApiErrorCode::InvalidJson | ApiErrorCode::InvalidRequest | ApiErrorCode::BodyIncomplete => {
                StatusCode::BAD_REQUEST
            }
            ApiErrorCode::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ApiErrorCode::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ApiErrorCode::Unauthorized | ApiErrorCode::InvalidApiKey => StatusCode::UNAUTHORIZED,
            ApiErrorCode::InsufficientPermissions => StatusCode::FORBIDDEN,
            ApiErrorCode::ModelNotFound | ApiErrorCode::ResponseNotFound | ApiErrorCode::NotFound => {
                StatusCode::NOT_FOUND
            }
            ApiErrorCode::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            ApiErrorCode::NoEngineAvailable
            | ApiErrorCode::EngineUnavailable
            | ApiErrorCode::GatewayOverloaded
            | ApiErrorCode::AdapterLoadFailed
            | ApiErrorCode::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
            ApiErrorCode::Overloaded | ApiErrorCode::RateLimited => StatusCode::TOO_MANY_REQUESTS,
            ApiErrorCode::UnsupportedByFleet => StatusCode::NOT_IMPLEMENTED,
            ApiErrorCode::PrefillFailed | ApiErrorCode::DecodeFailed | ApiErrorCode::WorkerFailed => {
                StatusCode::BAD_GATEWAY
            }
            ApiErrorCode::EngineTimeout => StatusCode::GATEWAY_TIMEOUT,
            ApiErrorCode::StorageFailed => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// `type` of the error, as in OpenAI's API.
    fn openai_type(self) -> &'static str {
        match self.status() {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::INTERNAL_SERVER_ERROR => "server_error",
            _ => "engine_error",
        }
    }
}

/// How clients expect errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorFormat {
    /// OpenAI's, and that of all paths without a format of their own.
    OpenAi,
    /// The same, except for events of a stream.
    Responses,
    Anthropic,
}

impl ErrorFormat {
    /// The format of error responses on this path, also for requests that have no route. Of events in a stream, the API determines it
    /// (`InferenceApi::error_format`).
    #[must_use]
    pub fn of_path(path: &str) -> Self {
        match path {
            "/v1/messages" | "/v1/messages/count_tokens" => Self::Anthropic,
            _ => Self::OpenAi,
        }
    }
}

/// A failed request, as reported to the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// Machine-readable code of the error.
    pub code: ApiErrorCode,
    /// Message for people: what is wrong, where, and how to fix it.
    pub message: String,
    /// The invalid request member, if there is one.
    pub param: Option<String>,
    /// Delay before the client should retry.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// An error without an invalid member.
    pub fn new(code: ApiErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), param: None, retry_after: None }
    }

    #[must_use]
    pub fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The body of the error's response.
    #[must_use]
    pub fn json(&self, format: ErrorFormat) -> String {
        self.value(format).to_string()
    }

    fn value(&self, format: ErrorFormat) -> Value {
        match format {
            ErrorFormat::OpenAi | ErrorFormat::Responses => json!({
                "error": {
                    "message": self.message,
                    "type": self.code.openai_type(),
                    "param": self.param,
                    "code": self.code.as_str(),
                }
            }),
            ErrorFormat::Anthropic => anthropic_error(self.code.status(), &self.message),
        }
    }

    /// The error as one server-sent event.
    #[must_use]
    pub fn event(&self, format: ErrorFormat) -> Bytes {
        let mut event = self.value(format);
        Bytes::from(match format {
            ErrorFormat::OpenAi => format!("data: {event}\n\n"),
            ErrorFormat::Anthropic => format!("event: error\ndata: {event}\n\n"),
            ErrorFormat::Responses => {
                // Besides the members of that API's own event the one by which OpenAI's clients recognize errors in any stream.
                event["type"] = "error".into();
                event["code"] = self.code.as_str().into();
                event["message"] = self.message.as_str().into();
                event["param"] = self.param.as_deref().into();
                format!("event: error\ndata: {event}\n\n")
            }
        })
    }

    /// The error as an HTTP response.
    #[must_use]
    pub fn response(&self, format: ErrorFormat) -> Response<Body> {
        let mut response = Response::new(Body::from(self.json(format)));
        *response.status_mut() = self.code.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(after) = self.retry_after {
            headers.insert(RETRY_AFTER, retry_after(after));
        }
        if self.code.status() == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// `{"type": "error", "error": {…}}` as Anthropic's clients expect it.
pub(crate) fn anthropic_error(status: StatusCode, message: &str) -> Value {
    let kind = match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// The value of `Retry-After`: whole seconds, rounded up so that no client retries too early.
pub(crate) fn retry_after(after: Duration) -> HeaderValue {
    HeaderValue::from(after.as_secs() + u64::from(after.subsec_nanos() > 0 || after.is_zero()))
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.as_str(), self.message)
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_api_gets_errors_in_its_own_format() {
        let error = ApiError::new(ApiErrorCode::ModelNotFound, "no such model").param("model");
        let json = |path| -> Value { serde_json::from_str(&error.json(ErrorFormat::of_path(path))).unwrap() };
        let openai = json!({"error": {"message": "no such model", "type": "invalid_request_error",
            "param": "model", "code": "model_not_found"}});
        assert_eq!(json("/v1/chat/completions"), openai);
        assert_eq!(json("/v1/responses"), openai);
        let anthropic =
            json!({"type": "error", "error": {"type": "not_found_error", "message": "no such model"}});
        assert_eq!(json("/v1/messages"), anthropic);
        assert_eq!(json("/v1/messages/count_tokens"), anthropic);
    }

    #[test]
    fn events_have_the_names_that_clients_expect() {
        let error = ApiError::new(ApiErrorCode::DecodeFailed, "lost");
        let event = |format| String::from_utf8(error.event(format).to_vec()).unwrap();
        assert!(event(ErrorFormat::OpenAi).starts_with("data: {\"error\":"));
        let anthropic = event(ErrorFormat::Anthropic);
        assert!(
            anthropic.starts_with("event: error\ndata: {") && anthropic.contains("api_error"),
            "{anthropic}"
        );
        let responses = event(ErrorFormat::Responses);
        let data: Value =
            serde_json::from_str(responses.strip_prefix("event: error\ndata: ").unwrap().trim()).unwrap();
        assert_eq!((&data["type"], &data["code"]), (&json!("error"), &json!("decode_failed")));
        assert_eq!(data["error"]["message"], "lost");
    }
}
