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
            Ok(response.map(|body| StreamBody::new(frames_with_timeout(body, silence)).boxed_unsync()))
        })
    }
}

/// The frames of a body; an error if the next one is late.
fn frames_with_timeout<B>(
    body: B,
    silence: Duration,
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
            Err(_) => Some((Err(ApiServerTimeoutError(silence).into()), None)),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Instant;

    use futures_util::{StreamExt, TryStreamExt};
    use http_body_util::Full;

    use super::*;

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
    async fn a_stalled_response_ends_with_an_error() {
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
            parts.try_next().await.unwrap_err();
            assert!(started.elapsed() >= silence);
            assert!(parts.try_next().await.unwrap().is_none());
        }
    }
}
