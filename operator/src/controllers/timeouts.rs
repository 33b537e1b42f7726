//! Timeouts for all requests, including those that the API server accepts without responding.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{Stream, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use kube::client::Body;
use tower::{BoxError, Service};

/// How long the API server may be silent.
#[derive(Debug, Clone, Copy)]
pub struct ApiServerTimeouts {
    /// Until a response starts, including retries of an overloaded server, and then between its parts.
    pub response: Duration,
    /// Between two messages of a watch. The API server sends bookmarks once a minute if there is nothing else.
    pub watch: Duration,
}

impl Default for ApiServerTimeouts {
    fn default() -> Self {
        Self { response: Duration::from_secs(30), watch: Duration::from_secs(150) }
    }
}

/// The API server exceeded a timeout.
#[derive(Debug, thiserror::Error)]
#[error("the API server was silent for {}", humantime::format_duration(*.0))]
struct ApiServerTimeoutError(Duration);

type ApiServerResponse = Response<UnsyncBoxBody<Bytes, BoxError>>;

/// Applies the timeouts to every request.
#[derive(Debug, Clone)]
pub(super) struct ResponseTimeoutService<S> {
    inner: S,
    limits: ApiServerTimeouts,
}

impl<S> ResponseTimeoutService<S> {
    pub(super) fn new(inner: S, limits: ApiServerTimeouts) -> Self {
        Self { inner, limits }
    }
}

impl<S, B> Service<Request<Body>> for ResponseTimeoutService<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = ApiServerResponse;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<ApiServerResponse, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let ApiServerTimeouts { response: response_timeout, watch } = self.limits;
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let silence = if is_watch { watch } else { response_timeout };
        let response = tokio::time::timeout(response_timeout, self.inner.call(request));
        Box::pin(async move {
            let response =
                response.await.map_err(|_| ApiServerTimeoutError(response_timeout))?.map_err(Into::into)?;
            let frames = |body| frames_with_timeout(body, silence, is_watch);
            Ok(response.map(|body| StreamBody::new(frames(body)).boxed_unsync()))
        })
    }
}

/// The frames of a body. If the next one is late, a watch just ends: often nothing has changed, and its client starts it again at the
/// same version, which fails if the API server does not respond. Any other response ends with an error.
fn frames_with_timeout<B>(
    body: B,
    silence: Duration,
    is_watch: bool,
) -> impl Stream<Item = Result<Frame<Bytes>, BoxError>> + Send
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let body: Pin<Box<B>> = Box::pin(body);
    stream::unfold(Some(body), move |body| async move {
        let mut body = body?;
        match tokio::time::timeout(silence, body.frame()).await {
            Ok(Some(part)) => Some((part.map_err(Into::into), Some(body))),
            Ok(None) => None,
            // Dropping the body closes the connection.
            Err(_) if is_watch => {
                tracing::debug!(?silence, "watch without events; starting it again");
                None
            }
            Err(_) => Some((Err(ApiServerTimeoutError(silence).into()), None)),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Instant;

    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use futures_util::{StreamExt, TryStreamExt};
    use http_body_util::Full;
    use kube::client::ClientBuilder;
    use serde_json::json;
    use tokio_util::sync::CancellationToken;
    use tower::layer::layer_fn;

    use super::*;
    use crate::resource_cache::{KindWatcher, ObservedCluster};
    use crate::{OperatorMetrics, ResourceKind};

    const LIMITS: ApiServerTimeouts =
        ApiServerTimeouts { response: Duration::from_millis(30), watch: Duration::from_millis(300) };

    fn request(uri: &str) -> Request<Body> {
        Request::get(uri).body(Body::empty()).unwrap()
    }

    #[tokio::test]
    async fn requests_to_a_silent_server_time_out() {
        let silent = tower::service_fn(|_| pending::<Result<Response<Full<Bytes>>, BoxError>>());
        let error =
            ResponseTimeoutService::new(silent, LIMITS).call(request("/pods?watch=true")).await.unwrap_err();
        assert_eq!(error.to_string(), "the API server was silent for 30ms");
    }

    #[tokio::test]
    async fn only_a_stalled_response_is_an_error() {
        let stalled = |_| async {
            let parts = stream::iter(["one", "two"]).map(|part| Ok::<_, BoxError>(Frame::data(part.into())));
            Ok::<_, BoxError>(Response::new(StreamBody::new(parts.chain(stream::pending()))))
        };
        for (uri, silence) in [("/pods", LIMITS.response), ("/pods?a=b&watch=true", LIMITS.watch)] {
            let response = ResponseTimeoutService::new(tower::service_fn(stalled), LIMITS)
                .call(request(uri))
                .await
                .unwrap();
            let mut parts = response.into_body().into_data_stream();
            assert_eq!(parts.try_next().await.unwrap().unwrap(), "one");
            assert_eq!(parts.try_next().await.unwrap().unwrap(), "two");
            let started = Instant::now();
            let end = parts.try_next().await;
            assert!(started.elapsed() >= silence);
            match uri.contains("watch") {
                true => assert!(end.unwrap().is_none(), "an idle watch is no failure"),
                false => assert!(end.is_err() && parts.try_next().await.unwrap().is_none()),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_watches_restart_without_failures() {
        let watches = Arc::<AtomicU64>::default();
        let started = Arc::clone(&watches);
        // An API server without services, whose watches stay silent.
        let idle = tower::service_fn(move |request: Request<Body>| {
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            if is_watch {
                started.fetch_add(1, Ordering::Relaxed);
            }
            let list = json!({ "apiVersion": "v1", "kind": "ServiceList",
                "metadata": { "resourceVersion": "1" }, "items": [] });
            let body = match is_watch {
                true => StreamBody::new(stream::pending()).boxed_unsync(),
                false => Full::from(list.to_string()).map_err(Into::into).boxed_unsync(),
            };
            async { Ok::<Response<UnsyncBoxBody<Bytes, BoxError>>, BoxError>(Response::new(body)) }
        });
        let limits = ApiServerTimeouts::default();
        let timeouts = layer_fn(|service| ResponseTimeoutService::new(service, limits));
        let metrics = Arc::<OperatorMetrics>::default();
        let watcher = KindWatcher {
            cluster: Arc::new(ObservedCluster::new(None)),
            client: ClientBuilder::new(idle, "n").with_layer(&timeouts).build(),
            namespace: None,
            kind: ResourceKind::Service,
            metrics: Arc::clone(&metrics),
        };
        let hour = Duration::from_secs(3600);
        let ended = tokio::time::timeout(hour, watcher.run(CancellationToken::new())).await;
        assert!(ended.is_err(), "it watches until stopped");
        let watches = watches.load(Ordering::Relaxed);
        assert!((20..=24).contains(&watches), "{watches} watches of 150 s");
        let text = metrics.text();
        let failures =
            text.lines().filter(|line| line.starts_with("moongate_operator_watch_failures_total{"));
        assert!(failures.clone().count() > 0 && failures.clone().all(|line| line.ends_with(" 0")), "{text}");
    }
}
