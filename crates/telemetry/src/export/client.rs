//! Client of the collector: OTLP over HTTP, or a unary gRPC call, which is HTTP too.

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, TE, USER_AGENT};
use http::{HeaderMap, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use moongate_runtime::BackoffPolicy;
use percent_encoding::percent_decode_str;

use super::body::ExportBody;
use super::target::{OtlpProtocol, OtlpTarget};
use super::tls::{CollectorTlsError, connector};

/// Maximum response size; collectors send a few bytes.
const MAX_RESPONSE_BYTES: usize = 64 * 1024;
/// Timeout of one export including its retries.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
const RETRIES: u32 = 3;
/// Minimum pauses before the retries.
const RETRY_BACKOFF: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(100), max: Duration::from_millis(400) };

/// Why an export failed; its spans are lost.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("cannot reach the collector: {}", error_chain(.0))]
    Unreachable(#[source] legacy::Error),
    #[error("cannot reach the collector: {0}")]
    InvalidRequest(#[from] http::Error),
    /// The response is incomplete or too large. The error's type is that of bodies with a limit.
    #[error("cannot reach the collector: {}", error_chain(&**.0))]
    ResponseBody(#[source] Box<dyn Error + Send + Sync>),
    #[error("the collector returned {0}")]
    Status(StatusCode, Option<Duration>),
    #[error("the collector returned gRPC status {code}: {message}")]
    Grpc { code: u32, message: String },
    #[error("no response from the collector within {EXPORT_TIMEOUT:?}")]
    Timeout,
}

impl ExportError {
    /// Whether a retry may succeed (OTLP specification, "Failures").
    fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::InvalidRequest(_) | Self::ResponseBody(_) => true,
            Self::Status(status, _) => matches!(status.as_u16(), 429 | 502 | 503 | 504),
            // Cancelled, deadline exceeded, aborted, out of range, unavailable, data loss.
            Self::Grpc { code, .. } => matches!(code, 1 | 4 | 10 | 11 | 14 | 15),
            Self::Timeout => false,
        }
    }

    /// The collector's `Retry-After`, if any.
    const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status(_, pause) => *pause,
            _ => None,
        }
    }
}

/// Client for one collector endpoint.
pub(super) struct OtlpClient {
    client: Client<HttpsConnector<HttpConnector>, ExportBody>,
    protocol: OtlpProtocol,
    uri: Uri,
    headers: HeaderMap,
}

impl OtlpClient {
    pub(super) fn new(target: OtlpTarget) -> Result<Self, CollectorTlsError> {
        let OtlpTarget { protocol, uri, mut headers, ca } = target;
        let is_grpc = protocol == OtlpProtocol::Grpc;
        let connector = connector(protocol, uri.scheme_str() == Some("https"), ca.as_deref())?;
        let mut builder = Client::builder(TokioExecutor::new());
        // The timer closes idle connections.
        let client = builder.http2_only(is_grpc).pool_timer(TokioTimer::new()).build(connector);
        let kind = if is_grpc { "application/grpc" } else { "application/x-protobuf" };
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("moongate/", env!("CARGO_PKG_VERSION"))));
        if is_grpc {
            headers.insert(TE, HeaderValue::from_static("trailers"));
        }
        Ok(Self { client, protocol, uri, headers })
    }

    /// Sends a message, with retries until [`EXPORT_TIMEOUT`].
    pub(super) async fn send(&self, mut message: ExportBody) -> Result<(), ExportError> {
        if self.protocol == OtlpProtocol::Grpc {
            message.push_front(grpc_prefix(message.len()));
        }
        let sending = async {
            for failures in 1..=RETRIES {
                match self.attempt(message.clone()).await {
                    Err(error) if error.is_retryable() => {
                        tracing::debug!(%error, "retrying a trace export");
                        // Jitter: not all gateways retry at the same time.
                        let pause = RETRY_BACKOFF.pause(failures).mul_f64(1.0 + fastrand::f64() / 2.0);
                        tokio::time::sleep(error.retry_after().unwrap_or_default().max(pause)).await;
                    }
                    outcome => return outcome,
                }
            }
            self.attempt(message).await
        };
        tokio::time::timeout(EXPORT_TIMEOUT, sending).await.unwrap_or(Err(ExportError::Timeout))
    }

    async fn attempt(&self, body: ExportBody) -> Result<(), ExportError> {
        let mut request = Request::post(self.uri.clone());
        if let Some(headers) = request.headers_mut() {
            headers.clone_from(&self.headers);
        }
        let response = self.client.request(request.body(body)?).await.map_err(ExportError::Unreachable)?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await;
        let body = body.map_err(ExportError::ResponseBody)?;
        let head = Response::from_parts(head, ());
        if !head.status().is_success() {
            let pause = head.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            return Err(ExportError::Status(head.status(), pause.map(Duration::from_secs)));
        }
        match self.protocol {
            OtlpProtocol::Http => Ok(()),
            // Without a message in the response, the status is in the headers.
            OtlpProtocol::Grpc => grpc_status(body.trailers().unwrap_or(head.headers())),
        }
    }
}

/// Prefix of a gRPC message: not compressed, and its length.
fn grpc_prefix(length: usize) -> Bytes {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    [&[0], length.to_be_bytes().as_slice()].concat().into()
}

fn grpc_status(trailers: &HeaderMap) -> Result<(), ExportError> {
    let text = |name: &str| trailers.get(name).and_then(|value| value.to_str().ok());
    // 2 is "unknown", used for a response without a status.
    match text("grpc-status").and_then(|code| code.parse().ok()).unwrap_or(2) {
        0 => Ok(()),
        code => {
            let message = percent_decode_str(text("grpc-message").unwrap_or_default());
            Err(ExportError::Grpc { code, message: message.decode_utf8_lossy().into_owned() })
        }
    }
}

/// An error with all its sources.
fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trailers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn grpc_calls_without_status_0_fail() {
        assert!(grpc_status(&trailers(&[("grpc-status", "0")])).is_ok());
        let full = trailers(&[("grpc-status", "8"), ("grpc-message", "no%20room")]);
        let error = grpc_status(&full).unwrap_err();
        assert_eq!(error.to_string(), "the collector returned gRPC status 8: no room");
        assert!(grpc_status(&HeaderMap::new()).is_err());
        assert!(grpc_status(&trailers(&[("grpc-status", "ok")])).is_err());
    }

    #[test]
    fn only_transient_errors_are_retried() {
        let status = |code| ExportError::Status(StatusCode::from_u16(code).unwrap(), None);
        let grpc = |code| ExportError::Grpc { code, message: String::new() };
        assert!([429, 502, 503, 504].into_iter().all(|code| status(code).is_retryable()));
        assert!([400, 401, 404, 413, 500].into_iter().all(|code| !status(code).is_retryable()));
        assert!([1, 4, 10, 11, 14, 15].into_iter().all(|code| grpc(code).is_retryable()));
        assert!([2, 3, 7, 8, 12, 16].into_iter().all(|code| !grpc(code).is_retryable()));
    }
}
