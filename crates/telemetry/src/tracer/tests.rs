mod receiver;

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue};
use moongate_testkit::TestAuthority;
use opentelemetry::trace::SpanKind;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::*;
use crate::export::{MAX_QUEUED_SPANS, OtlpProtocol};
use crate::{AttributeWriter, ChildSpans, SpanAttributes};
use receiver::{OtlpTestReceiver, spans_of};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

fn options(endpoint: &str, trace_sample_ratio: f64) -> TelemetryArgs {
    TelemetryArgs { otlp_endpoint: Some(endpoint.to_owned()), trace_sample_ratio, ..TelemetryArgs::default() }
}

fn start(options: &TelemetryArgs, delay: Duration) -> Tracer {
    let target = options.target(|_| None).unwrap().unwrap();
    Tracer::start_export(options, target, "moongate", delay).unwrap()
}

async fn sampling(ratio: f64) -> (OtlpTestReceiver, Tracer) {
    let receiver = OtlpTestReceiver::start(None).await;
    let tracer = start(&options(&receiver.endpoint, ratio), EXPORT_DELAY);
    (receiver, tracer)
}

fn server(tracer: &Tracer, name: &'static str) -> SpanHandle {
    tracer.server_span(name, &HeaderMap::new(), Instant::now(), || ())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn span_named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no span {name}"))
}

fn attribute(span: &Span, key: &str) -> Option<AnyValue> {
    span.attributes.iter().find(|pair| pair.key == key)?.value.clone()?.value
}

fn caller(flags: &str) -> HeaderMap {
    let parent = HeaderValue::try_from(format!("00-{TRACE}-{CALLER}-{flags}")).unwrap();
    HeaderMap::from_iter([
        (HeaderName::from_static("traceparent"), parent),
        (HeaderName::from_static("tracestate"), HeaderValue::from_static("vendor=opaque")),
    ])
}

#[tokio::test]
async fn spans_join_the_callers_trace() {
    let (mut receiver, tracer) = sampling(1.0).await;
    let before = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let start = Instant::now();
    let mut server = tracer.server_span("POST", &caller("01"), start, || ());
    server.rename("chat llama");
    server.set("gen_ai.request.model", "llama");
    server.set("gen_ai.usage.input_tokens", 42_u32);
    let mut prefill = server.child_at("prefill", SpanKind::Client, start, || ());
    prefill.error("refused");
    prefill.event("gave up");
    let failed = prefill.context().unwrap();
    let mut upstream = caller("00");
    prefill.inject(&mut upstream);
    prefill.end();
    let mut retry =
        server.child_at("prefill retry", SpanKind::Client, start, || TestRetrySpan { start, failed });
    retry.set_end(start + Duration::from_secs(1));
    retry.end();
    server.end();
    tracer.shutdown(TEST_TIMEOUT).await.unwrap();

    let (_, request) = receiver.received.try_recv().unwrap();
    let resource = request.resource_spans[0].resource.clone().unwrap();
    let service = resource.attributes.iter().find(|pair| pair.key == "service.name").unwrap();
    assert_eq!(service.value.clone().unwrap().value.unwrap(), AnyValue::StringValue("moongate".to_owned()));
    let spans = spans_of(request);
    assert_eq!(spans.len(), 4);

    let server = span_named(&spans, "chat llama");
    assert_eq!((hex(&server.trace_id).as_str(), hex(&server.parent_span_id).as_str()), (TRACE, CALLER));
    assert_eq!((server.kind, server.flags), (2, 0x301), "server, below a remote parent");
    assert_eq!(server.trace_state, "vendor=opaque");
    assert_eq!(attribute(server, "gen_ai.request.model"), Some(AnyValue::StringValue("llama".to_owned())));
    assert_eq!(attribute(server, "gen_ai.usage.input_tokens"), Some(AnyValue::IntValue(42)));
    assert!(server.start_time_unix_nano <= server.end_time_unix_nano);

    let prefill = span_named(&spans, "prefill");
    assert_eq!(hex(&prefill.trace_id), TRACE);
    assert_eq!(prefill.parent_span_id, server.span_id);
    assert_eq!((prefill.kind, prefill.flags), (3, 0x101), "client, below a local parent");
    // Compared in both directions: the two clocks are read in no guaranteed order.
    let offset = u128::from(prefill.start_time_unix_nano).abs_diff(before.as_nanos());
    assert!(
        offset < TEST_TIMEOUT.as_nanos() && prefill.start_time_unix_nano == server.start_time_unix_nano,
        "{offset}"
    );
    let status = prefill.status.clone().unwrap();
    assert_eq!((status.code, status.message.as_str()), (2, "refused"));
    assert_eq!(prefill.events[0].name, "gave up");
    assert_eq!(upstream["traceparent"], format!("00-{TRACE}-{}-01", hex(&prefill.span_id)));
    assert_eq!(upstream["tracestate"], "vendor=opaque");

    let retry = span_named(&spans, "prefill retry");
    assert_eq!((&retry.links[0].trace_id, &retry.links[0].span_id), (&prefill.trace_id, &prefill.span_id));
    assert!(attribute(retry, "why").is_some());
    let Some(AnyValue::ArrayValue(tries)) = attribute(retry, "tries") else { panic!("{retry:?}") };
    let tries: Vec<_> = tries.values.into_iter().map(|value| value.value.unwrap()).collect();
    assert_eq!(tries, [AnyValue::IntValue(0), AnyValue::IntValue(1)]);
    let step = span_named(&spans, "step");
    assert_eq!((&step.parent_span_id, step.flags, step.kind), (&retry.span_id, 0x101, 1));
    assert_eq!(step.end_time_unix_nano - step.start_time_unix_nano, 1_000_000_000);
    assert_eq!(step.end_time_unix_nano, retry.end_time_unix_nano);
    assert_eq!(attribute(step, "of"), Some(AnyValue::StringValue("the step".to_owned())));
}

struct TestRetrySpan {
    start: Instant,
    failed: SpanContext,
}

impl SpanAttributes for TestRetrySpan {
    fn write_attributes(&self, attributes: &mut AttributeWriter<'_>) {
        attributes.set("why", "written only when exported");
        attributes.link(&self.failed);
        attributes.list("tries", [0_u32, 1]);
    }

    fn write_children(&self, children: &mut ChildSpans<'_>) {
        let end = children.end();
        children.add("step", (self.start, end), |attributes| attributes.set("of", "the step"));
    }
}

#[tokio::test]
async fn spans_are_exported_while_the_program_runs() {
    for protocol in [OtlpProtocol::Http, OtlpProtocol::Grpc] {
        let mut receiver = OtlpTestReceiver::start(None).await;
        let options = TelemetryArgs {
            otlp_protocol: Some(protocol),
            otlp_headers: Some(HeaderMap::from_iter([(
                HeaderName::from_static("api-key"),
                HeaderValue::from_static("k"),
            )])),
            ..options(&receiver.endpoint, 1.0)
        };
        let tracer = start(&options, Duration::from_millis(10));
        for name in ["first", "second", "third"] {
            // A busy collector is retried.
            *receiver.busy_responses.busy.lock() = 1;
            server(&tracer, name).end();
            let (headers, request) =
                tokio::time::timeout(TEST_TIMEOUT, receiver.received.recv()).await.unwrap().unwrap();
            assert_eq!(headers["api-key"], "k");
            let spans = spans_of(request);
            assert_eq!(spans.len(), 1);
            assert_eq!(spans[0].name, name);
            assert!(spans[0].parent_span_id.is_empty(), "a root");
        }
        tracer.shutdown(TEST_TIMEOUT).await.unwrap();
    }
}

#[tokio::test]
async fn a_collector_with_tls_is_verified_by_its_certificate() {
    let authority = TestAuthority::new().unwrap();
    let identity = authority.issue(&["localhost"]).unwrap();
    for (protocol, alpn) in [(OtlpProtocol::Http, "http/1.1"), (OtlpProtocol::Grpc, "h2")] {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let certificate = CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        config.alpn_protocols = vec![alpn.into()];
        let mut receiver = OtlpTestReceiver::start(Some(config)).await;
        for ca in [Some(authority.ca_file()), None] {
            let trusted = ca.is_some();
            let options = TelemetryArgs {
                otlp_protocol: Some(protocol),
                otlp_ca: ca,
                ..options(&receiver.endpoint, 1.0)
            };
            let target = options.target(|_| None).unwrap().unwrap();
            // On a machine without CA certificates the start fails.
            let Ok(tracer) = Tracer::start_export(&options, target, "moongate", EXPORT_DELAY) else {
                assert!(!trusted);
                continue;
            };
            server(&tracer, "secret").end();
            assert_eq!(tracer.shutdown(TEST_TIMEOUT).await.is_ok(), trusted);
            assert_eq!(receiver.spans().len(), usize::from(trusted));
        }
    }
}

#[tokio::test]
async fn after_the_shutdown_there_are_no_spans() {
    let (mut receiver, tracer) = sampling(1.0).await;
    server(&tracer, "only").end();
    tracer.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(receiver.spans().len(), 1);
    tracer.shutdown(TEST_TIMEOUT).await.expect("a second shutdown does nothing");
    let mut headers = caller("01");
    tracer.server_span("late", &headers, Instant::now(), || ()).inject(&mut headers);
    assert_eq!(headers, caller("01"));
}

#[tokio::test]
async fn the_callers_sampling_decision_takes_precedence() {
    let (mut receiver, tracer) = sampling(0.0).await;
    for _ in 0..100 {
        let mut root = server(&tracer, "root");
        root.set("key", "value");
        root.child("child", SpanKind::Client).end();
        assert_eq!(root.exported_trace_id(), None);
    }
    // Not sampled, but the trace context is still propagated.
    let mut headers = caller("00");
    tracer
        .server_span("unsampled", &headers, Instant::now(), || ())
        .child("child", SpanKind::Client)
        .inject(&mut headers);
    let parent = headers["traceparent"].to_str().unwrap();
    assert!(parent.starts_with(&format!("00-{TRACE}-")) && parent.ends_with("-00"), "{parent}");
    assert!(!parent.contains(CALLER), "{parent}");

    tracer.server_span("chosen by the caller", &caller("01"), Instant::now(), || ()).end();
    tracer.shutdown(TEST_TIMEOUT).await.unwrap();
    let spans = receiver.spans();
    assert_eq!(spans.len(), 1);
    assert_eq!(spans[0].name, "chosen by the caller");
}

#[test]
fn a_share_of_traces_is_sampled() {
    let sampled =
        |ratio| (0..10_000).filter(|_| is_sampled(TraceId::from(fastrand::u128(1..)), ratio)).count();
    assert_eq!((sampled(0.0), sampled(1.0)), (0, 10_000));
    assert!((700..1300).contains(&sampled(0.1)));
}

#[tokio::test]
async fn failed_traces_are_exported_with_earlier_spans() {
    let (mut receiver, tracer) = sampling(0.0).await;
    let mut bad = server(&tracer, "bad");
    bad.child("before", SpanKind::Client).end();
    let open = bad.child("after the root", SpanKind::Client);
    bad.force_export("error");
    assert_eq!(bad.exported_trace_id(), bad.trace_id());
    bad.child("after", SpanKind::Client).end();
    bad.end();
    open.end();
    let good = server(&tracer, "good");
    let late = good.child("late", SpanKind::Client);
    good.end();
    late.end();
    tracer.shutdown(TEST_TIMEOUT).await.unwrap();
    let spans = receiver.spans();
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["before", "after", "bad", "after the root"]);
    assert_eq!(attribute(&spans[2], "moongate.kept"), Some(AnyValue::StringValue("error".to_owned())));
}

#[tokio::test]
async fn forced_exports_are_limited_per_second() {
    let (mut receiver, tracer) = sampling(0.0).await;
    let started = Instant::now();
    for _ in 0..1000 {
        server(&tracer, "bad").force_export("error");
    }
    let max = 50 * (usize::try_from(started.elapsed().as_secs()).unwrap() + 2);
    tracer.shutdown(TEST_TIMEOUT).await.unwrap();
    let exported = receiver.spans().len();
    assert!((50..=max).contains(&exported), "{exported}");
}

#[tokio::test]
async fn annotations_per_span_are_limited() {
    let (mut receiver, tracer) = sampling(1.0).await;
    let mut span = server(&tracer, "chatty");
    for _ in 0..1000 {
        span.set("key", true);
    }
    span.end();
    tracer.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(receiver.spans()[0].attributes.len(), 128);
}

#[tokio::test]
async fn a_long_trace_is_exported_in_parts() {
    let (mut receiver, tracer) = sampling(1.0).await;
    let root = tracer.internal_span("root", Instant::now());
    for _ in 0..200 {
        root.child("child", SpanKind::Internal).end();
    }
    root.end();
    tracer.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(receiver.spans().len(), 201);
}

/// One collector refuses connections, the other accepts them and never responds.
#[tokio::test]
async fn a_dead_collector_does_not_delay_spans() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = [silent.local_addr().unwrap(), closed.local_addr().unwrap()];
    drop(closed);
    for address in addresses {
        let tracer = start(&options(&format!("http://{address}"), 1.0), Duration::from_millis(1));
        // More spans than the queue holds: if spans waited for space, they would wait for the collector.
        for _ in 0..MAX_QUEUED_SPANS * 2 {
            server(&tracer, "lost").end();
        }
        let started = Instant::now();
        assert!(tracer.shutdown(Duration::from_millis(200)).await.is_err());
        assert!(started.elapsed() < TEST_TIMEOUT, "{:?}", started.elapsed());
    }
}

#[test]
fn disabled_tracing_passes_headers_through() {
    let tracer = Tracer::disabled();
    assert_eq!(tracer.slow_threshold(), Duration::MAX);
    let mut headers = caller("01");
    let mut span = tracer.server_span("root", &headers, Instant::now(), || ());
    span.set("key", 1_u32);
    span.error("nothing");
    span.force_export("error");
    span.child("child", SpanKind::Client).inject(&mut headers);
    assert_eq!(headers, caller("01"));
    assert_eq!(span.trace_id(), None);
    assert!(!span.is_recording());
}
