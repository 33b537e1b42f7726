//! Spans of the gateway as a collector receives them, and the trace context that engines get.

use std::time::Duration;

use moongate_loadtest::engine::{EngineFault, EngineFaultPlan, SimEngine, VllmConnector};
use moongate_testkit::collector::{TestCollector, attribute_text, hex, spans_named};
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::json;

use crate::harness::client_api::ClientApi;
use crate::harness::fleet::{TestEngines, TestFleetBuilder};
use crate::harness::process::{GatewayAddresses, MoongateProcess};
use crate::harness::{TEST_TIMEOUT, client};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// The `traceparent` of an engine's latest request: trace, span, flags.
fn parent_given_to(engine: &SimEngine) -> [String; 3] {
    let request = engine.recent_requests(1).pop().unwrap();
    let (_, value) = request.headers.iter().find(|(name, _)| name == "traceparent").unwrap();
    let parts: Vec<&str> = value.split('-').collect();
    [parts[1].to_owned(), parts[2].to_owned(), parts[3].to_owned()]
}

/// A gateway in front of engines that sends its spans to a collector.
async fn gateway(
    engines: &TestEngines,
    collector: &TestCollector,
    flags: &[&str],
) -> (MoongateProcess, GatewayAddresses) {
    let mut all = engines.flags();
    all.push(format!("--otlp-endpoint={}", collector.endpoint));
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let (binary, at) = MoongateProcess::gateway(&all).await;
    let (client, ready) = (client(), format!("http://{}/ready", at.public));
    let serving = async {
        while client.get(&ready).send().await.unwrap().status() != 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, serving).await.unwrap();
    (binary, at)
}

/// Requests a short stream, and waits until it has completed.
async fn ask(at: &GatewayAddresses, engines: &TestEngines, headers: &[(&str, &str)]) {
    let body = json!({"model": engines.all().next().unwrap().options().model, "max_tokens": 4, "stream": true,
        "stream_options": {"include_usage": true}, "messages": [{"role": "user", "content": "hello"}]});
    let mut request = client().post(format!("http://{}/v1/chat/completions", at.public)).json(&body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.send().await.unwrap().text().await.unwrap();
    assert!(answer.contains("[DONE]"), "{answer}");
}

fn one<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let found = spans_named(spans, name);
    let names: Vec<&String> = spans.iter().map(|span| &span.name).collect();
    assert_eq!(found.len(), 1, "one span {name} in {names:?}");
    found[0]
}

/// Both protocols; only with the second the decode certainly waits for the KV cache after the prefill's response.
#[tokio::test(flavor = "multi_thread")]
async fn one_request_is_one_trace_with_a_span_for_each_step() {
    for fleet in [TestFleetBuilder::sglang(), TestFleetBuilder::vllm(VllmConnector::Nixl)] {
        let mut collector = TestCollector::start().await;
        let engines = fleet.pairs(1).engines().await;
        let (binary, at) = gateway(&engines, &collector, &[]).await;
        let parent = format!("00-{TRACE}-{CALLER}-01");
        ask(&at, &engines, &[("traceparent", &parent), ("tracestate", "vendor=opaque")]).await;
        let metrics = client().get(format!("http://{}/metrics", at.admin)).send().await.unwrap();
        let metrics = metrics.text().await.unwrap();
        binary.signal("TERM").await;
        assert!(binary.wait().await.status.success());

        let spans = collector.spans();
        let root = one(&spans, &format!("chat {}", engines.prefills[0].options().model));
        assert_eq!((hex(&root.trace_id).as_str(), hex(&root.parent_span_id).as_str()), (TRACE, CALLER));
        assert_eq!(root.trace_state, "vendor=opaque");
        for name in ["read body", "decide", "prefill", "decode", "relay"] {
            let span = one(&spans, name);
            assert_eq!(span.parent_span_id, root.span_id, "{name} is a child of the request");
            // A prefill is not aborted after the response of its decode.
            let may_outlive = name == "prefill";
            let in_time = span.end_time_unix_nano <= root.end_time_unix_nano;
            assert!(in_time || may_outlive, "{name} ends before the request");
        }
        let decode = one(&spans, "decode");
        for (name, engine) in [("prefill", &engines.prefills[0]), ("decode", &engines.decodes[0])] {
            let leg = one(&spans, name);
            let [trace, span, flags] = parent_given_to(engine);
            assert_eq!((trace.as_str(), span, flags.as_str()), (TRACE, hex(&leg.span_id), "01"));
            assert_eq!(attribute_text(&leg.attributes, "server.port"), engine.addr().port().to_string());
            assert_eq!(attribute_text(&leg.attributes, "http.response.status_code"), "200");
        }
        assert!(spans_named(&spans, "first byte").iter().any(|span| span.parent_span_id == decode.span_id));
        if !attribute_text(&decode.attributes, "gen_ai.provider.name").eq("sglang") {
            let transfer = one(&spans, "kv transfer");
            assert_eq!(transfer.parent_span_id, decode.span_id);
            assert!(transfer.end_time_unix_nano <= one(&spans, "relay").start_time_unix_nano);
        }
        for key in [
            "gen_ai.request.model",
            "gen_ai.usage.output_tokens",
            "gen_ai.response.time_to_first_chunk",
            "gen_ai.response.id",
            "gen_ai.response.finish_reasons",
            "http.response.status_code",
        ] {
            assert!(
                !attribute_text(&root.attributes, key).is_empty(),
                "{key} is missing: {:?}",
                root.attributes
            );
        }
        assert_eq!(attribute_text(&root.attributes, "gen_ai.response.finish_reasons"), "length");
        assert_eq!(attribute_text(&root.attributes, "url.path"), "/v1/chat/completions");
        let decide = one(&spans, "decide");
        for key in ["moongate.candidate.engine", "moongate.candidate.cost", "moongate.term.service"] {
            assert!(!attribute_text(&decide.attributes, key).is_empty(), "{key} is missing: {decide:?}");
        }
        let exemplar = format!("# {{trace_id=\"{TRACE}\"}}");
        assert!(metrics.lines().any(|line| line.starts_with("moongate_ttft_") && line.contains(&exemplar)));
    }
}

/// Of the APIs of agents too: a leg for each engine of the pair, and the response as the API describes it.
#[tokio::test(flavor = "multi_thread")]
async fn agent_apis_have_a_span_for_each_leg() {
    for fleet in [TestFleetBuilder::sglang(), TestFleetBuilder::vllm(VllmConnector::Nixl)] {
        let fleet = fleet.pairs(1);
        for api in [ClientApi::Responses, ClientApi::Messages] {
            let mut collector = TestCollector::start().await;
            let engines = fleet.engines().await;
            let (binary, at) = gateway(&engines, &collector, &[]).await;
            let parent = format!("00-{TRACE}-{CALLER}-01");
            let body = api.body(&engines.prefills[0].options().model, true, 4);
            let request = client().post(format!("http://{}{}", at.public, api.path())).json(&body);
            let answer = request.header("traceparent", parent).send().await.unwrap().text().await.unwrap();
            assert!(api.is_complete(&answer), "{api:?}: {answer}");
            binary.signal("TERM").await;
            assert!(binary.wait().await.status.success());
            check_agent_trace(&collector.spans(), &engines, api);
        }
    }
}

fn check_agent_trace(spans: &[Span], engines: &TestEngines, api: ClientApi) {
    let root = one(spans, &format!("chat {}", engines.prefills[0].options().model));
    assert_eq!((hex(&root.trace_id).as_str(), hex(&root.parent_span_id).as_str()), (TRACE, CALLER));
    let of_root = |key| attribute_text(&root.attributes, key);
    assert_eq!(of_root("url.path"), api.path());
    let case = format!("{api:?} of {:?}: {:?}", engines.prefills[0].options().protocol, root.attributes);
    assert_eq!(of_root("gen_ai.usage.output_tokens"), "4", "{case}");
    assert_eq!(of_root("http.response.status_code"), "200", "{case}");
    assert!(!of_root("gen_ai.response.id").is_empty(), "{case}");
    for (name, engine) in [("prefill", &engines.prefills[0]), ("decode", &engines.decodes[0])] {
        let leg = one(spans, name);
        assert_eq!((&leg.trace_id, &leg.parent_span_id), (&root.trace_id, &root.span_id), "{name}");
        let [trace, span, _] = parent_given_to(engine);
        assert_eq!((trace.as_str(), span), (TRACE, hex(&leg.span_id)), "{name}: the engine's parent");
        let of_leg = |key| attribute_text(&leg.attributes, key);
        assert_eq!(of_leg("server.address"), engine.addr().ip().to_string(), "{name}");
        assert_eq!(of_leg("server.port"), engine.addr().port().to_string(), "{name}");
        assert_eq!(of_leg("http.response.status_code"), "200", "{name}");
        assert!(!of_leg("moongate.engine").is_empty() && of_leg("error.type").is_empty(), "{name}: {leg:?}");
    }
    let first_byte = one(spans, "first byte");
    assert_eq!(first_byte.parent_span_id, one(spans, "decode").span_id);
}

/// The trace alone shows which engine failed, when and how, which leg was aborted, the retry, and the final response. It is exported
/// although sampling is off.
#[tokio::test(flavor = "multi_thread")]
async fn the_trace_explains_a_failed_prefill() {
    let mut collector = TestCollector::start().await;
    let engines = TestFleetBuilder::sglang().prefill(2).decode(1).engines().await;
    let flags = ["--trace-sample-ratio=0", "--policy=round_robin"];
    let (binary, at) = gateway(&engines, &collector, &flags).await;
    let dying = &engines.prefills[0];
    dying.set_fault(EngineFaultPlan {
        fault: EngineFault::CloseBeforeFirstByte,
        // The first may look like an idle connection that the engine has closed, which is replaced without a trace.
        times: Some(2),
        ..EngineFaultPlan::default()
    });
    // Round robin soon selects the failing engine.
    let turns = async {
        while dying.recent_requests(1).is_empty() {
            ask(&at, &engines, &[]).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, turns).await.unwrap();
    let [_, parent, flags] = parent_given_to(dying);
    assert_eq!(flags, "00", "engines get sampled=0");
    binary.signal("TERM").await;
    let ended = binary.wait().await;
    assert!(ended.status.success());

    let spans = collector.spans();
    let root = one(&spans, &format!("chat {}", dying.options().model));
    assert!(spans.iter().all(|span| span.trace_id == root.trace_id), "only this request failed");
    assert_eq!(parent, hex(&root.span_id), "of a trace that is not sampled they know the request's span");
    assert_eq!(attribute_text(&root.attributes, "http.response.status_code"), "200");

    let [failed, healed] = spans_named(&spans, "prefill")[..] else { panic!("two prefills: {spans:?}") };
    assert_eq!(attribute_text(&failed.attributes, "server.port"), dying.addr().port().to_string());
    assert!(
        ["closed", "transport"].contains(&attribute_text(&failed.attributes, "error.type").as_str()),
        "{failed:?}"
    );
    assert_eq!(failed.status.as_ref().unwrap().code, 2);
    assert_eq!(attribute_text(&failed.attributes, "moongate.kept"), "error");

    let [stopped, answered] = spans_named(&spans, "decode")[..] else { panic!("two decodes: {spans:?}") };
    assert_eq!(stopped.events.iter().map(|event| event.name.as_str()).collect::<Vec<_>>(), ["aborted"]);
    assert!(stopped.end_time_unix_nano >= failed.start_time_unix_nano);

    let [_, again] = spans_named(&spans, "decide")[..] else { panic!("two decisions: {spans:?}") };
    let other = &engines.prefills[1];
    assert_eq!(
        attribute_text(&again.attributes, "moongate.prefill"),
        attribute_text(&healed.attributes, "moongate.engine")
    );
    assert_eq!(attribute_text(&healed.attributes, "server.port"), other.addr().port().to_string());
    for retried in [again, healed, answered] {
        assert!(retried.start_time_unix_nano >= failed.end_time_unix_nano);
        assert_eq!(attribute_text(&retried.attributes, "http.request.resend_count"), "1");
        assert_eq!(retried.links[0].span_id, failed.span_id, "{} is there because of it", retried.name);
        assert!(retried.status.as_ref().is_none_or(|status| status.code == 0), "neither an error nor more");
    }
    assert_eq!(attribute_text(&answered.attributes, "http.response.status_code"), "200");
    assert_eq!(one(&spans, "relay").parent_span_id, root.span_id);

    let line = ended.stderr.lines().find(|line| line.contains("leg failed")).unwrap();
    assert!(line.contains(&format!("trace_id={}", hex(&root.trace_id))), "{line}");
    assert!(line.contains(&attribute_text(&root.attributes, "moongate.request_id")), "{line}");
}

/// With a threshold of a nanosecond every request is slow.
#[tokio::test(flavor = "multi_thread")]
async fn slow_requests_are_exported_independent_of_sampling() {
    let mut collector = TestCollector::start().await;
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let flags = ["--trace-sample-ratio=0", "--trace-slow=1ns"];
    let (binary, at) = gateway(&engines, &collector, &flags).await;
    ask(&at, &engines, &[]).await;
    binary.signal("TERM").await;
    assert!(binary.wait().await.status.success());
    let spans = collector.spans();
    let root = one(&spans, &format!("chat {}", engines.workers[0].options().model));
    assert_eq!(attribute_text(&root.attributes, "moongate.kept"), "slow");
    one(&spans, "worker");
}
