//! The HTTP client of the exporter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use opentelemetry_http::{HttpClient, HttpError};
use tokio::runtime::Handle;

/// A collector answers with a few bytes.
const MAX_RESPONSE_BYTES: usize = 64 * 1024;

/// Sends on a runtime of its own choice. The exporter polls its requests on a plain thread without a reactor,
/// where an async client would panic at the first export and take the thread, and all later spans, with it.
#[derive(Debug, Clone)]
pub(super) struct CollectorClient {
    runtime: Handle,
    http: reqwest::Client,
    failing: Arc<AtomicBool>,
}

impl CollectorClient {
    pub(super) fn new(runtime: Handle, timeout: Duration) -> Result<Self, reqwest::Error> {
        // A proxy for the outside world is not the way to a collector in the cluster.
        let http = reqwest::Client::builder().timeout(timeout).connect_timeout(timeout).no_proxy().build()?;
        Ok(Self { runtime, http, failing: Arc::default() })
    }

    async fn send(self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let mut response = self.http.execute(request.try_into()?).await?;
        let mut answer = Response::builder().status(response.status());
        if let Some(headers) = answer.headers_mut() {
            *headers = std::mem::take(response.headers_mut());
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await? {
            if body.len() + chunk.len() > MAX_RESPONSE_BYTES {
                return Err(format!("the answer is larger than {MAX_RESPONSE_BYTES} bytes").into());
            }
            body.extend_from_slice(&chunk);
        }
        Ok(answer.body(body.into())?)
    }

    /// Logs the first failure and the recovery, not every attempt in between.
    fn note(&self, result: &Result<Response<Bytes>, HttpError>) {
        let problem = match result {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!("it answered {}", response.status())),
            Err(error) => Some(in_full(error.as_ref())),
        };
        match (problem, self.failing.load(Ordering::Relaxed)) {
            (Some(problem), false) => {
                self.failing.store(true, Ordering::Relaxed);
                tracing::warn!(
                    problem,
                    "the trace collector does not take spans; they are lost until it does"
                );
            }
            (None, true) => {
                self.failing.store(false, Ordering::Relaxed);
                tracing::info!("the trace collector takes spans again");
            }
            _ => {}
        }
    }
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        // The task is bounded by the client's timeout, and the exporter waits for it.
        let result = match self.runtime.spawn(self.clone().send(request)).await {
            Ok(result) => result,
            Err(error) => Err(error.into()),
        };
        self.note(&result);
        result
    }
}

/// reqwest's own text leaves out why.
fn in_full(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
