//! A test collector: OTLP over HTTP and gRPC at one address, with or without TLS.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use axum::routing::post;
use axum::serve::Listener;
use http_body_util::{BodyExt as _, Full};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// The headers and the decoded message of an export.
pub(super) type ReceivedExport = (HeaderMap, ExportTraceServiceRequest);

/// Responses to the next exports.
#[derive(Clone, Default)]
pub(super) struct BusyResponses {
    /// Number of exports to reject as busy.
    pub(super) busy: Arc<parking_lot::Mutex<usize>>,
}

impl BusyResponses {
    fn is_busy(&self) -> bool {
        let mut busy = self.busy.lock();
        let is_busy = *busy > 0;
        *busy = busy.saturating_sub(1);
        is_busy
    }
}

pub(super) struct OtlpTestReceiver {
    pub(super) endpoint: String,
    pub(super) received: UnboundedReceiver<ReceivedExport>,
    pub(super) busy_responses: BusyResponses,
    _tasks: JoinSet<()>,
}

type OtlpReceiverState = (UnboundedSender<ReceivedExport>, BusyResponses);

async fn http(
    State((sender, busy_responses)): State<OtlpReceiverState>,
    headers: HeaderMap,
    body: Bytes,
) -> StatusCode {
    assert_eq!(headers["content-type"], "application/x-protobuf");
    if busy_responses.is_busy() {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    let _ = sender.send((headers, ExportTraceServiceRequest::decode(body).unwrap()));
    StatusCode::OK
}

async fn grpc(
    State((sender, busy_responses)): State<OtlpReceiverState>,
    headers: HeaderMap,
    mut body: Bytes,
) -> Response<Body> {
    assert_eq!(
        (&headers["content-type"], &headers["te"]),
        (&"application/grpc".parse().unwrap(), &"trailers".parse().unwrap())
    );
    let response = Response::builder().header("content-type", "application/grpc");
    if busy_responses.is_busy() {
        return response.header("grpc-status", "14").body(Body::empty()).unwrap();
    }
    let message = body.split_off(5);
    assert_eq!(body[0], 0, "not compressed");
    assert_eq!(body[1..], u32::try_from(message.len()).unwrap().to_be_bytes());
    let _ = sender.send((headers, ExportTraceServiceRequest::decode(message).unwrap()));
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
    let reply = Full::new(Bytes::from_static(&[0; 5])).with_trailers(async move { Some(Ok(trailers)) });
    response.body(Body::new(reply)).unwrap()
}

struct TlsListener(TcpListener, TlsAcceptor);

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = std::net::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (stream, address) = self.0.accept().await.unwrap();
            if let Ok(stream) = self.1.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.0.local_addr()
    }
}

impl OtlpTestReceiver {
    pub(super) async fn start(tls: Option<rustls::ServerConfig>) -> Self {
        let (sender, received) = unbounded_channel();
        let busy_responses = BusyResponses::default();
        let router = Router::new()
            .route("/v1/traces", post(http))
            .route("/opentelemetry.proto.collector.trace.v1.TraceService/Export", post(grpc))
            .with_state((sender, busy_responses.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut tasks = JoinSet::new();
        let scheme = match tls {
            None => {
                tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
                "http"
            }
            Some(config) => {
                let listener = TlsListener(listener, TlsAcceptor::from(Arc::new(config)));
                tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
                "https"
            }
        };
        Self { endpoint: format!("{scheme}://localhost:{port}"), received, busy_responses, _tasks: tasks }
    }

    /// All spans received so far; complete once the exporter has shut down.
    pub(super) fn spans(&mut self) -> Vec<Span> {
        std::iter::from_fn(|| self.received.try_recv().ok())
            .flat_map(|(_, request)| spans_of(request))
            .collect()
    }
}

pub(super) fn spans_of(request: ExportTraceServiceRequest) -> Vec<Span> {
    let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
    scopes.flat_map(|scope| scope.spans).collect()
}
