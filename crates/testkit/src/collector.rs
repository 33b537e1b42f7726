//! A receiver of OTLP over HTTP, and readers of spans.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::net::{TcpListener, ToSocketAddrs};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

/// Receives spans from the programs under test.
pub struct TestCollector {
    /// Base URL of its OTLP endpoints.
    pub endpoint: String,
    received: UnboundedReceiver<Span>,
    _server: JoinSet<()>,
}

impl TestCollector {
    /// Starts a collector on loopback.
    pub async fn start() -> Self {
        Self::start_at(("127.0.0.1", 0)).await
    }

    /// Starts a collector at this address.
    pub async fn start_at(address: impl ToSocketAddrs) -> Self {
        async fn take(State(sender): State<UnboundedSender<Span>>, body: Bytes) {
            let request = ExportTraceServiceRequest::decode(body).unwrap();
            let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
            scopes.flat_map(|scope| scope.spans).for_each(|span| drop(sender.send(span)));
        }
        let (sender, received) = unbounded_channel();
        let router = Router::new().route("/v1/traces", post(take)).with_state(sender);
        let listener = TcpListener::bind(address).await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let mut server = JoinSet::new();
        server.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { endpoint, received, _server: server }
    }

    /// Spans that arrived since the last call: all of them, once the sender has ended.
    pub fn spans(&mut self) -> Vec<Span> {
        std::iter::from_fn(|| self.received.try_recv().ok()).collect()
    }
}

/// The text form of a trace id or span id.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The value of an attribute as text, whatever its type; empty without one.
#[must_use]
pub fn attribute_text(attributes: &[KeyValue], key: &str) -> String {
    let value =
        attributes.iter().find(|attribute| attribute.key == key).and_then(|found| found.value.clone());
    text(value.and_then(|value| value.value))
}

/// Several texts are separated by commas.
fn text(value: Option<Value>) -> String {
    match value {
        None => String::new(),
        Some(Value::ArrayValue(list)) => {
            let texts: Vec<String> = list.values.into_iter().map(|value| text(value.value)).collect();
            texts.join(",")
        }
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::BoolValue(truth)) => truth.to_string(),
        Some(other) => panic!("{other:?} is no attribute's value here"),
    }
}

/// The spans of a name, the earliest first.
#[must_use]
pub fn spans_named<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
    let mut found: Vec<&Span> = spans.iter().filter(|span| span.name == name).collect();
    found.sort_by_key(|span| span.start_time_unix_nano);
    found
}
