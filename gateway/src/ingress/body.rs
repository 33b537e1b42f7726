//! Reads a request body into one piece, within limits of size and time.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt as _;
use tokio::time::timeout;

use crate::error::{ApiError, Code};

/// Bounds of a request body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimits {
    pub(crate) max_bytes: usize,
    /// Longest pause between two pieces.
    pub(crate) idle: Duration,
}

/// Collects `body`.
pub(crate) async fn collect(
    headers: &HeaderMap,
    mut body: Body,
    limits: BodyLimits,
) -> Result<Bytes, ApiError> {
    let declared = headers.get(CONTENT_LENGTH).and_then(length);
    if declared.is_some_and(|length| length > limits.max_bytes as u64) {
        return Err(too_large(limits));
    }
    let mut first = Bytes::new();
    let mut whole: Option<BytesMut> = None;
    loop {
        let frame = match timeout(limits.idle, body.frame()).await {
            Err(_) => {
                let text = format!(
                    "no data for {:?} before the body was complete; send it without pauses",
                    limits.idle
                );
                return Err(ApiError::new(Code::BodyIncomplete, text));
            }
            Ok(None) => break,
            Ok(Some(Err(error))) => {
                return Err(ApiError::new(Code::BodyIncomplete, format!("the body broke off: {error}")));
            }
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(data) = frame.into_data() else { continue };
        let so_far = whole.as_ref().map_or(first.len(), BytesMut::len);
        if so_far + data.len() > limits.max_bytes {
            return Err(too_large(limits));
        }
        match &mut whole {
            None if first.is_empty() => first = data,
            None => {
                let expected = declared.and_then(|length| usize::try_from(length).ok()).unwrap_or(0);
                let mut joined = BytesMut::with_capacity(expected.max(so_far + data.len()));
                joined.extend_from_slice(&first);
                joined.extend_from_slice(&data);
                whole = Some(joined);
            }
            Some(joined) => joined.extend_from_slice(&data),
        }
    }
    Ok(whole.map_or(first, BytesMut::freeze))
}

fn length(value: &HeaderValue) -> Option<u64> {
    value.to_str().ok()?.parse().ok()
}

fn too_large(limits: BodyLimits) -> ApiError {
    let megabytes = limits.max_bytes as f64 / f64::from(1 << 20);
    let text = format!(
        "the body is larger than {megabytes:.1} MiB; shorten it, or raise the gateway's --max-body-bytes ({})",
        limits.max_bytes
    );
    ApiError::new(Code::BodyTooLarge, text)
}
