//! A receiver of OTLP over HTTP, and readers of spans.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::TEST_TIMEOUT;

/// Receives spans from the programs under test.
pub(crate) struct TestCollector {
    pub(crate) endpoint: String,
    received: UnboundedReceiver<Span>,
    _tasks: moongate_runtime::Supervisor,
}

impl TestCollector {
    pub(crate) async fn start() -> Self {
        async fn take(State(sender): State<UnboundedSender<Span>>, body: Bytes) {
            let request = ExportTraceServiceRequest::decode(body).unwrap();
            let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
            scopes.flat_map(|scope| scope.spans).for_each(|span| drop(sender.send(span)));
        }
        let (sender, received) = unbounded_channel();
        let router = Router::new().route("/v1/traces", post(take)).with_state(sender);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let tasks = moongate_runtime::Supervisor::new();
        tasks.spawn("collector", async move {
            axum::serve(listener, router).await.unwrap();
        });
        Self { endpoint, received, _tasks: tasks }
    }

    /// What has arrived: everything, once the sender has ended.
    pub(crate) fn spans(&mut self) -> Vec<Span> {
        std::iter::from_fn(|| self.received.try_recv().ok()).collect()
    }

    /// Waits for a span that is as wanted.
    pub(crate) async fn wait_for_span(&mut self, wanted: impl Fn(&Span) -> bool) -> Span {
        let coming = async {
            loop {
                let span = self.received.recv().await.unwrap();
                if wanted(&span) {
                    return span;
                }
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, coming).await.unwrap()
    }
}

/// An identity as it is written.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The value of an attribute as text, whatever its type; empty without one.
pub(crate) fn attribute_text(attributes: &[KeyValue], key: &str) -> String {
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
pub(crate) fn spans_named<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
    let mut found: Vec<&Span> = spans.iter().filter(|span| span.name == name).collect();
    found.sort_by_key(|span| span.start_time_unix_nano);
    found
}
