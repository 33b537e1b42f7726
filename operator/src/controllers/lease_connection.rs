//! The connection of the Lease's requests. It is apart from that of other requests, whose load must not delay a renewal, and leaves
//! retries to [`super::leader_election`], which has to finish them before the Lease expires.

use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::header::RETRY_AFTER;
use http::{Request, Response};
use kube::Client;
use kube::client::{Body, ClientBuilder};
use parking_lot::Mutex;
use tower::layer::layer_fn;
use tower::{BoxError, Service};

use super::OperatorError;
use crate::{KubeClientError, OperatorMetrics};

/// A client that sends each request once, and the pause that the API server requested last.
pub(super) struct LeaseConnection {
    pub(super) client: Client,
    retry_after: RequestedPause,
}

/// The `Retry-After` of the last response, if it had one.
#[derive(Debug, Clone, Default)]
struct RequestedPause(Arc<Mutex<Option<Duration>>>);

impl LeaseConnection {
    /// Connects to the cluster of this kubeconfig, or of the process's environment.
    pub(super) async fn open(
        kubeconfig: Option<&Path>,
        metrics: &Arc<OperatorMetrics>,
    ) -> Result<Self, OperatorError> {
        let mut config = super::config(kubeconfig).await?;
        config.default_retry = false;
        let builder = ClientBuilder::try_from(config).map_err(KubeClientError::Client)?;
        Ok(Self::new(builder.with_layer(&super::count_requests(metrics))))
    }

    pub(super) fn new<S, B>(builder: ClientBuilder<S>) -> Self
    where
        S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let retry_after = RequestedPause::default();
        let recorded = retry_after.clone();
        let layer = layer_fn(move |inner| RecordRetryAfter { inner, recorded: recorded.clone() });
        Self { client: builder.with_layer(&layer).build(), retry_after }
    }

    /// The pause that the API server requested in its last response. `None` once it has been read.
    pub(super) fn take_requested_pause(&self) -> Option<Duration> {
        self.retry_after.0.lock().take()
    }
}

/// Records the header `Retry-After`, which errors of the client do not contain.
struct RecordRetryAfter<S> {
    inner: S,
    recorded: RequestedPause,
}

impl<S, B> Service<Request<Body>> for RecordRetryAfter<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (response, recorded) = (self.inner.call(request), self.recorded.clone());
        Box::pin(async move {
            let response = response.await?;
            let seconds =
                response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            *recorded.0.lock() = seconds.map(Duration::from_secs);
            Ok(response)
        })
    }
}
