//! A receiver of spans over OTLP.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use prost::Message as _;

use super::host::HOST;

const FIRST_TOKEN: &str = "gen_ai.response.time_to_first_chunk";

/// What has arrived.
#[derive(Clone, Default)]
pub(crate) struct SpanCollector(Arc<Mutex<Vec<Span>>>);

impl SpanCollector {
    /// Starts one; answers with where pods reach it.
    pub(crate) async fn start() -> (Self, String) {
        async fn take(State(collector): State<SpanCollector>, body: Bytes) {
            let request = ExportTraceServiceRequest::decode(body).unwrap();
            let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
            collector.0.lock().extend(scopes.flat_map(|scope| scope.spans));
        }
        let collector = Self::default();
        let router = Router::new().route("/v1/traces", post(take)).with_state(collector.clone());
        let listener = tokio::net::TcpListener::bind((HOST, 0)).await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        (collector, endpoint)
    }

    /// The trace of the request that took longest until its first token, of those that began in this time.
    pub(crate) fn slowest(&self, when: Range<SystemTime>) -> Vec<Span> {
        let nanoseconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let when = nanoseconds(when.start)..nanoseconds(when.end);
        let time = |span: &Span| attribute(span, FIRST_TOKEN).and_then(|time| time.parse::<f64>().ok());
        let spans = self.0.lock();
        let within = spans.iter().filter(|span| when.contains(&u128::from(span.start_time_unix_nano)));
        let timed = within.filter_map(|span| time(span).map(|time| (time, hex(&span.trace_id))));
        let slowest = timed.max_by(|(one, _), (other, _)| one.total_cmp(other));
        drop(spans);
        slowest.map(|(_, id)| self.trace(&id)).unwrap_or_default()
    }

    /// All spans of a trace, in the order of their beginnings.
    pub(crate) fn trace(&self, id: &str) -> Vec<Span> {
        let mut spans: Vec<Span> =
            self.0.lock().iter().filter(|span| hex(&span.trace_id) == id).cloned().collect();
        spans.sort_by_key(|span| span.start_time_unix_nano);
        spans
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An attribute of a span as text, if it has it.
pub(crate) fn attribute(span: &Span, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        Value::DoubleValue(number) => Some(number.to_string()),
        other => Some(format!("{other:?}")),
    }
}

/// A trace for people: when each span began, how long it took and what it says.
pub(crate) fn shown(spans: &[Span]) -> String {
    let begun = spans.first().map_or(0, |span| span.start_time_unix_nano);
    let line = |span: &Span| {
        let after = Duration::from_nanos(span.start_time_unix_nano - begun);
        let took = Duration::from_nanos(span.end_time_unix_nano - span.start_time_unix_nano);
        let keys = span.attributes.iter().map(|attribute| attribute.key.as_str());
        let said: Vec<String> =
            keys.filter_map(|key| Some(format!("{key}={}", attribute(span, key)?))).collect();
        format!("{:28} at {after:.1?} for {took:.1?}: {}\n", span.name, said.join(" "))
    };
    spans.iter().map(line).collect()
}
