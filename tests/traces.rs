//! Spans of the gateway as a collector receives them, and the trace context that engines get.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod world;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use moongate_loadtest::engine::SimEngine;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use world::binary::Binary;
use world::fleet::Fleet;
use world::{PATIENCE, client};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// An OTLP/HTTP receiver; returns its address and what arrives.
async fn collector() -> (String, UnboundedReceiver<Span>) {
    async fn take(State(sender): State<UnboundedSender<Span>>, body: Bytes) {
        let request = ExportTraceServiceRequest::decode(body).unwrap();
        let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).for_each(|span| sender.send(span).unwrap());
    }
    let (sender, received) = unbounded_channel();
    let router = Router::new().route("/v1/traces", post(take)).with_state(sender);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    moongate_runtime::Supervisor::new().spawn("collector", async move {
        axum::serve(listener, router).await.unwrap();
    });
    (endpoint, received)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The span id that an engine was given as its parent.
fn parent_given_to(engine: &SimEngine) -> String {
    let request = engine.last_requests(1).pop().unwrap();
    let (_, value) = request.headers.iter().find(|(name, _)| name == "traceparent").unwrap();
    let parts: Vec<&str> = value.split('-').collect();
    assert_eq!(parts[1], TRACE, "the trace goes on at the engine: {value}");
    parts[2].to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_is_one_trace_with_a_span_for_each_step() {
    let (endpoint, mut received) = collector().await;
    let engines = Fleet::sglang().pairs(1).engines().await;
    let mut flags = engines.flags();
    flags.push(format!("--otlp-endpoint={endpoint}"));
    let (binary, at) = Binary::gateway(&flags).await;
    let client = client();
    let ready = format!("http://{}/ready", at.public);
    let serving = async {
        while client.get(&ready).send().await.unwrap().status() != 200 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, serving).await.unwrap();

    let body = json!({"model": engines.prefills[0].config().model, "max_tokens": 4, "stream": true,
        "stream_options": {"include_usage": true}, "messages": [{"role": "user", "content": "hello"}]});
    let request = client.post(format!("http://{}/v1/chat/completions", at.public)).json(&body);
    let answer = request.header("traceparent", format!("00-{TRACE}-{CALLER}-01")).send().await.unwrap();
    assert!(answer.text().await.unwrap().contains("[DONE]"));
    binary.signal("TERM").await;
    assert!(binary.ended().await.status.success());

    let mut spans = Vec::new();
    while let Ok(span) = received.try_recv() {
        spans.push(span);
    }
    let named = |name: &str| {
        let found: Vec<&Span> = spans.iter().filter(|span| span.name == name).collect();
        assert_eq!(
            found.len(),
            1,
            "one span {name} in {:?}",
            spans.iter().map(|s| &s.name).collect::<Vec<_>>()
        );
        found[0]
    };
    let root = named("POST /v1/chat/completions");
    assert_eq!((hex(&root.trace_id).as_str(), hex(&root.parent_span_id).as_str()), (TRACE, CALLER));
    for name in ["decide", "prefill", "decode", "relay"] {
        let span = named(name);
        assert_eq!(span.parent_span_id, root.span_id, "{name} is a child of the request");
        // A prefill whose decode has already answered is left to finish by itself.
        let may_outlive = name == "prefill";
        let in_time = span.end_time_unix_nano <= root.end_time_unix_nano;
        assert!(in_time || may_outlive, "{name} ends before the request");
    }
    assert_eq!(parent_given_to(&engines.prefills[0]), hex(&named("prefill").span_id));
    assert_eq!(parent_given_to(&engines.decodes[0]), hex(&named("decode").span_id));
    let attribute = |key: &str| root.attributes.iter().any(|attribute| attribute.key == key);
    for key in ["gen_ai.request.model", "gen_ai.usage.output_tokens", "gen_ai.response.time_to_first_chunk"] {
        assert!(attribute(key), "{key} is missing: {:?}", root.attributes);
    }
}
