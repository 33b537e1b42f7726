use super::*;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use clap::Parser;
use http::HeaderValue;
use opentelemetry::trace::SpanKind;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use std::time::{Instant, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

const LONG: Duration = Duration::from_secs(30);
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// A real OTLP/HTTP receiver.
struct Collector {
    endpoint: String,
    received: UnboundedReceiver<ExportTraceServiceRequest>,
    _tasks: JoinSet<()>,
}

impl Collector {
    async fn start() -> Self {
        async fn take(
            State(sender): State<UnboundedSender<ExportTraceServiceRequest>>,
            headers: HeaderMap,
            body: Bytes,
        ) -> StatusCode {
            assert_eq!(headers["content-type"], "application/x-protobuf");
            let _ = sender.send(ExportTraceServiceRequest::decode(body).unwrap());
            StatusCode::OK
        }
        let (sender, received) = unbounded_channel();
        let router = Router::new().route("/v1/traces", post(take)).with_state(sender);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { endpoint, received, _tasks: tasks }
    }

    fn options(&self) -> TelemetryOptions {
        TelemetryOptions { otlp_endpoint: Some(self.endpoint.clone()), ..TelemetryOptions::default() }
    }

    /// Everything received so far; complete once the exporter has been shut down.
    fn spans(&mut self) -> Vec<Span> {
        std::iter::from_fn(|| self.received.try_recv().ok()).flat_map(spans_of).collect()
    }
}

fn spans_of(request: ExportTraceServiceRequest) -> Vec<Span> {
    let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
    scopes.flat_map(|scope| scope.spans).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no span {name}"))
}

fn attribute(span: &Span, key: &str) -> AnyValue {
    let pair = span.attributes.iter().find(|pair| pair.key == key).unwrap();
    pair.value.clone().unwrap().value.unwrap()
}

fn caller(flags: &str) -> HeaderMap {
    let parent = HeaderValue::try_from(format!("00-{TRACE}-{CALLER}-{flags}")).unwrap();
    HeaderMap::from_iter([
        (http::HeaderName::from_static("traceparent"), parent),
        (http::HeaderName::from_static("tracestate"), HeaderValue::from_static("vendor=opaque")),
    ])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_keep_the_callers_trace_and_link_up() {
    let mut collector = Collector::start().await;
    let traces = Traces::start(&collector.options()).unwrap();
    let start = UNIX_EPOCH + Duration::from_secs(1_700_000_000);

    let mut server = traces.server_span_at("chat", &caller("01"), start);
    assert_eq!(server.trace_id().as_deref(), Some(TRACE));
    server.rename("chat llama");
    server.set(crate::names::GEN_AI_REQUEST_MODEL, "llama");
    server.set(crate::names::GEN_AI_USAGE_INPUT_TOKENS, 42);
    let mut prefill = server.child_at("prefill", SpanKind::Client, start + Duration::from_millis(1));
    prefill.error("refused");
    prefill.event("gave up");
    let mut upstream = caller("01");
    prefill.inject(&mut upstream);
    prefill.end_at(start + Duration::from_millis(5));
    // A handle lives in a response body, which another thread may drop.
    std::thread::spawn(move || drop(server)).join().unwrap();
    traces.shutdown(LONG).await.unwrap();

    let request = collector.received.try_recv().unwrap();
    let resource = request.resource_spans[0].resource.clone().unwrap();
    let service = resource.attributes.iter().find(|pair| pair.key == "service.name").unwrap();
    assert_eq!(service.value.clone().unwrap().value.unwrap(), AnyValue::StringValue("moongate".to_owned()));
    let mut spans = spans_of(request);
    spans.extend(collector.spans());
    assert_eq!(spans.len(), 2);

    let server = named(&spans, "chat llama");
    assert_eq!((hex(&server.trace_id).as_str(), hex(&server.parent_span_id).as_str()), (TRACE, CALLER));
    assert_eq!(server.kind, 2, "server");
    assert_eq!(server.start_time_unix_nano, 1_700_000_000_000_000_000);
    assert_eq!(attribute(server, "gen_ai.request.model"), AnyValue::StringValue("llama".to_owned()));
    assert_eq!(attribute(server, "gen_ai.usage.input_tokens"), AnyValue::IntValue(42));

    let prefill = named(&spans, "prefill");
    assert_eq!(hex(&prefill.trace_id), TRACE);
    assert_eq!(prefill.parent_span_id, server.span_id);
    assert_eq!(prefill.kind, 3, "client");
    assert_eq!(prefill.end_time_unix_nano - prefill.start_time_unix_nano, 4_000_000);
    let status = prefill.status.clone().unwrap();
    assert_eq!((status.code, status.message.as_str()), (2, "refused"));
    assert_eq!(prefill.events[0].name, "gave up");
    assert_eq!(upstream["traceparent"], format!("00-{TRACE}-{}-01", hex(&prefill.span_id)));
    assert_eq!(upstream["tracestate"], "vendor=opaque");
}

/// The exporter works on a thread without a runtime; it must go on after its first export.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exports_go_on_while_the_program_runs() {
    let mut collector = Collector::start().await;
    let endpoint = format!("{}{TRACES_PATH}", collector.endpoint);
    let traces = Traces::exporting(&collector.options(), &endpoint, Duration::from_millis(10)).unwrap();
    for name in ["first", "second", "third"] {
        traces.server_span(name, &HeaderMap::new()).end();
        let request = tokio::time::timeout(LONG, collector.received.recv()).await.unwrap().unwrap();
        let spans = spans_of(request);
        assert_eq!(spans.len(), 1);
        assert_eq!(spans[0].name, name);
        assert!(spans[0].parent_span_id.is_empty(), "a root");
    }
    traces.shutdown(LONG).await.unwrap();
}

#[tokio::test]
async fn a_runtime_of_one_thread_exports_too() {
    let mut collector = Collector::start().await;
    let traces = Traces::start(&collector.options()).unwrap();
    traces.server_span("only", &HeaderMap::new()).end();
    traces.shutdown(LONG).await.unwrap();
    assert_eq!(collector.spans().len(), 1);
    traces.shutdown(LONG).await.expect("a second time is nothing");
    let mut headers = caller("01");
    traces.server_span("late", &headers).inject(&mut headers);
    assert_eq!(headers, caller("01"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sampler_decides_unless_the_caller_has() {
    let mut collector = Collector::start().await;
    let traces = Traces::start(&TelemetryOptions { trace_sample_ratio: 0.0, ..collector.options() }).unwrap();
    for _ in 0..100 {
        let mut root = traces.server_span("root", &HeaderMap::new());
        assert!(!root.is_recording());
        root.set("key", "value");
        root.child("child", SpanKind::Client).end();
    }
    // Not sampled, and still the same trace for whoever comes next.
    let mut headers = caller("00");
    traces.server_span("unsampled", &headers).child("child", SpanKind::Client).inject(&mut headers);
    let parent = headers["traceparent"].to_str().unwrap();
    assert!(parent.starts_with(&format!("00-{TRACE}-")) && parent.ends_with("-00"), "{parent}");
    assert!(!parent.contains(CALLER), "{parent}");

    traces.server_span("chosen by the caller", &caller("01")).end();
    traces.shutdown(LONG).await.unwrap();
    let spans = collector.spans();
    assert_eq!(spans.len(), 1);
    assert_eq!(spans[0].name, "chosen by the caller");
}

#[tokio::test]
async fn malformed_parents_are_ignored() {
    let mut collector = Collector::start().await;
    let traces = Traces::start(&collector.options()).unwrap();
    let zeros = format!("00-{}-{CALLER}-01", "0".repeat(32));
    for parent in ["", "00", "garbage", "00-xyz-abc-01", zeros.as_str(), "ff-1-2-3"] {
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", HeaderValue::from_str(parent).unwrap());
        let span = traces.server_span("root", &headers);
        span.inject(&mut headers);
        assert_eq!(headers["traceparent"].len(), 55);
    }
    traces.shutdown(LONG).await.unwrap();
    let spans = collector.spans();
    assert_eq!(spans.len(), 6);
    assert!(spans.iter().all(|span| span.parent_span_id.is_empty()));
}

/// One collector refuses connections, the other takes them and never answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_collector_holds_up_nothing() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = [silent.local_addr().unwrap(), gone.local_addr().unwrap()];
    drop(gone);
    for address in addresses {
        let options = TelemetryOptions {
            otlp_endpoint: Some(format!("http://{address}")),
            ..TelemetryOptions::default()
        };
        let endpoint = format!("http://{address}{TRACES_PATH}");
        let traces = Traces::exporting(&options, &endpoint, Duration::from_millis(1)).unwrap();
        // More than fit the queue: a request that had to wait for room would wait for the collector.
        for _ in 0..MAX_WAITING_SPANS * 3 {
            traces.server_span("lost", &HeaderMap::new()).end();
        }
        let began = Instant::now();
        let deadline = Duration::from_millis(200);
        assert!(traces.shutdown(deadline).await.is_err());
        assert!(began.elapsed() < EXPORT_TIMEOUT, "{:?}", began.elapsed());
    }
}

#[test]
fn off_does_nothing_and_lets_headers_through() {
    let traces = Traces::off();
    assert!(!traces.is_on());
    let mut headers = caller("01");
    let mut span = traces.server_span("root", &headers);
    span.set("key", 1);
    span.error("nothing");
    span.child("child", SpanKind::Client).inject(&mut headers);
    assert_eq!(headers, caller("01"));
    assert_eq!(span.trace_id(), None);
    assert!(!span.is_recording());
}

#[test]
fn addresses_come_from_the_flag_then_from_the_standard_variables() {
    let with = |flag: Option<&str>, set: &[(&str, &str)]| {
        let options =
            TelemetryOptions { otlp_endpoint: flag.map(str::to_owned), ..TelemetryOptions::default() };
        let variable =
            |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        traces_endpoint(&options, variable).unwrap()
    };
    let base = (STANDARD_ENDPOINT, "http://base:4318/");
    let whole = (STANDARD_TRACES_ENDPOINT, "http://whole:4318/spans");
    assert_eq!(with(None, &[]), None);
    assert_eq!(with(None, &[(STANDARD_ENDPOINT, "")]), None);
    assert_eq!(with(None, &[base]).as_deref(), Some("http://base:4318/v1/traces"));
    assert_eq!(with(None, &[base, whole]).as_deref(), Some("http://whole:4318/spans"));
    assert_eq!(with(Some("http://flag:1"), &[base, whole]).as_deref(), Some("http://flag:1/v1/traces"));
}

#[test]
fn flags_are_checked() {
    #[derive(Parser, Debug)]
    struct Cli {
        #[command(flatten)]
        traces: TelemetryOptions,
        #[command(flatten)]
        logs: crate::LogOptions,
    }
    let parse =
        |args: &[&str]| Cli::try_parse_from([&["test"], args].concat()).map_err(|error| error.to_string());
    let right = parse(&["--otlp-endpoint", "http://collector:4318", "--trace-sample-ratio", "0.25"]).unwrap();
    assert_eq!(right.traces.otlp_endpoint.as_deref(), Some("http://collector:4318"));
    assert_eq!(right.traces.trace_sample_ratio, 0.25);
    assert_eq!(right.logs.filter, "info");
    for (flag, value, expected) in [
        ("--otlp-endpoint", "collector:4318", "needs a scheme and a host"),
        ("--otlp-endpoint", "https://collector", "TLS is not built in"),
        ("--otlp-endpoint", "not a url", "not a URL"),
        ("--trace-sample-ratio", "1.5", "from 0 (nothing) to 1"),
        ("--trace-sample-ratio", "nan", "from 0 (nothing) to 1"),
        ("--log-filter", "a=b", "is no log filter"),
    ] {
        let error = parse(&[flag, value]).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}
