//! From `helm install` to tokens, traces and metrics, and through an upgrade: everything on a real control plane, our programs as the
//! processes of pods. As root, in some minutes: `cargo test --test whole -- --ignored --nocapture`.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]
#![expect(clippy::print_stdout, reason = "what is seen is the point of a run by hand")]
#![expect(clippy::disallowed_methods, reason = "a test outlives none of its tasks")]

mod cluster;
mod collector;
mod console;
mod dns;
mod host;
mod launch;
mod load;
mod multiturn;
mod pods;
mod probes;
mod prometheus;
mod queries;
mod services;
mod volumes;

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use cluster::{EndToEndCluster, wait_until};
use collector::SpanCollector;
use host::run;
use load::{ConversationLoad, LoadSummary};
use opentelemetry_proto::tonic::trace::v1::Span;
use prometheus::PrometheusServer;
use serde_json::json;

const RELEASE: &str = "simulated";
const MODEL: &str = "moongate-sim";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
/// Requests that are measured before the upgrade, and after: enough for a 99th percentile.
const MEASURED: usize = 600;
/// Requests meanwhile or afterwards that show how things are.
const SPOT_CHECK_REQUESTS: usize = 200;
/// Tag of the image to which everything is upgraded.
const UPGRADE_TAG: &str = "next";

#[test]
#[ignore = "takes minutes, and root's rights"]
fn from_nothing_to_tokens_and_through_an_upgrade() {
    host::run_isolated("from_nothing_to_tokens_and_through_an_upgrade", run_scenario());
}

#[test]
#[ignore = "takes a quarter of an hour, and root's rights"]
fn the_published_benchmark_shows_what_was_measured() {
    host::run_isolated("the_published_benchmark_shows_what_was_measured", multiturn::rows());
}

async fn run_scenario() {
    let begun = Instant::now();
    let step = |what: &str| println!("{:6.1} s  {what}", begun.elapsed().as_secs_f64());
    let cluster = Arc::new(EndToEndCluster::start().await);
    let (collector, endpoint) = SpanCollector::start().await;
    step("a control plane with a node");
    cluster.helm("install", "upgrade", &[format!("otlp.endpoint={endpoint}")]).await;
    step("helm install");
    cluster.settled().await;
    step("all roles are ready");
    let base = format!("http://{RELEASE}-gateway:8000");
    sdk(&cluster, &base).await;
    step("the OpenAI SDK is answered at the gateway's Service");
    trace(&base, &collector).await;
    step("the trace of a request has all spans");
    let prometheus = PrometheusServer::start(&cluster).await;
    step("Prometheus reads all pods");
    console::check(&cluster, &base, MODEL).await;
    step("the console shows all of it, and where a prompt is cached");
    let load = ConversationLoad::start(&base, MODEL);
    let began = SystemTime::now();
    let [before, during, after] = upgrade(&cluster, &load).await;
    for (name, seen) in [("before", &before), ("during the upgrade", &during), ("after", &after)] {
        step(&format!("{name}: {}", line(seen)));
    }
    print!("the slowest request:\n{}", collector::shown(&collector.slowest(began..SystemTime::now())));
    let rest = Instant::now();
    // Now the rest too, and an engine of the kind that is still missing.
    let plain =
        ["engine=simulated", "mode=plain", "replicas=1"].map(|value| format!("engines.plain.{value}"));
    let settings = [format!("otlp.endpoint={endpoint}"), format!("image.tag={UPGRADE_TAG}")];
    cluster.helm("upgrade", "upgrade", &[&settings[..], &plain].concat()).await;
    cluster.settled().await;
    load.wait_for_requests(SPOT_CHECK_REQUESTS).await;
    // By the gateway that stays, so that its failed legs are counted when all queries are looked at.
    cluster.kill(&format!("{RELEASE}-prefill-0"), "engine").await;
    load.wait_for_requests(SPOT_CHECK_REQUESTS).await;
    let rest = load.summary(rest, Instant::now());
    step(&format!("while helm upgraded the rest, and a prefill was killed: {}", line(&rest)));
    let empty = queries::without_data(&prometheus).await;
    step(&format!("queries without data: {}", empty.len()));
    for one in &empty {
        println!("           {one}");
    }
    let shrunk = scale_in(&cluster, &load, &[&settings[..], &plain].concat()).await;
    step(&format!("two prefills and a store node less: {}", line(&shrunk)));
    let mixed = mixed_version_pairs(&prometheus).await;
    step(&format!("pairs of different versions: {mixed}"));
    load.stop().await;
    for seen in [&before, &during, &after, &rest, &shrunk] {
        assert!(seen.failures.is_empty(), "{:?}", seen.failures);
    }
    for seen in [&during, &after, &shrunk] {
        assert!(seen.cached > 0.98 * before.cached, "{} {}", seen.cached, before.cached);
    }
    assert!(mixed < 0.5, "{mixed}");
    assert!(during.p99 < before.p99.mul_f64(1.2), "{:?} {:?}", during.p99, before.p99);
    assert!(empty.is_empty(), "{empty:?}");
}

/// What was seen after the roles of prefills and store nodes were scaled in, and meanwhile.
async fn scale_in(cluster: &EndToEndCluster, load: &ConversationLoad, settings: &[String]) -> LoadSummary {
    let begun = Instant::now();
    let fewer = ["engines.prefill.replicas=6", "store.nodes.replicas=2"].map(str::to_owned);
    cluster.helm("upgrade", "upgrade", &[settings, &fewer].concat()).await;
    wait_until("the pods have ended", async || {
        let names: Vec<String> = cluster.pods().await.iter().map(cluster::name).collect();
        let count = |role: &str| names.iter().filter(|name| name.contains(role)).count();
        let left = (count("-prefill-"), count("-mooncake-store-"));
        if left == (6, 2) { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
    cluster.settled().await;
    load.wait_for_requests(MEASURED).await;
    load.summary(begun, Instant::now())
}

/// Attempts whose prefill and decode had different versions.
async fn mixed_version_pairs(prometheus: &PrometheusServer) -> f64 {
    let found = prometheus.query("sum(max_over_time(moongate_mixed_version_pairs_total[1h]))").await;
    found[0]["value"][1].as_str().unwrap().parse().unwrap()
}

fn line(seen: &LoadSummary) -> String {
    let LoadSummary { requests, failures, cached, p50, p99, duration: took } = seen;
    let failed = failures.len();
    format!(
        "{requests} requests in {took:.1?}, {failed} failed, {:.1} % of tokens cached, time to first token {p50:.2?}, p99 {p99:.2?}",
        cached * 100.0
    )
}

/// Everything that the SDK's test does with `moongate up`, it does here.
async fn sdk(cluster: &EndToEndCluster, base: &str) {
    let python = format!("{}/venv/bin/python", host::sdk().display());
    let check = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gateway/sdk/check.py");
    let base = format!("{base}/v1");
    let metrics = format!("http://{}:9000/metrics", cluster.address_of("gateway").await);
    let checked = move || run("env", &["no_proxy=*", &python, check, &base, &metrics, MODEL]);
    tokio::task::spawn_blocking(checked).await.unwrap();
}

/// A request whose trace is complete, down to the engines. Now and then a decode answers before its prefill has said that it is done:
/// then there is no transfer to be seen.
async fn trace(base: &str, collector: &SpanCollector) {
    for attempt in 1..10 {
        let trace = format!("{attempt}{}", &TRACE[1..]);
        let spans = traced(base, collector, &trace).await;
        if spans.iter().any(|span| span.name == "kv transfer") {
            print!("{}", collector::shown(&spans));
            return;
        }
    }
    panic!("no request has waited for its KV cache");
}

async fn traced(base: &str, collector: &SpanCollector, trace: &str) -> Vec<Span> {
    let body = json!({ "model": MODEL, "max_tokens": 4, "stream": true, "messages": [{ "role": "user", "content": "hello" }] });
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let request = client.post(format!("{base}/v1/chat/completions")).json(&body);
    let answer =
        request.header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01")).send().await.unwrap();
    assert!(answer.text().await.unwrap().contains("[DONE]"));
    wait_until("the spans arrive", async || {
        let spans = collector.trace(trace);
        let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
        let root = format!("chat {MODEL}");
        let wanted = [&root, "read body", "predict", "decide", "prefill", "decode", "first byte", "relay"];
        if wanted.iter().all(|name| names.contains(name)) { Ok(spans) } else { Err(format!("{names:?}")) }
    })
    .await
}

/// What was seen before, during and after an upgrade in place, first of the stores and then of the engines.
async fn upgrade(cluster: &EndToEndCluster, load: &ConversationLoad) -> [LoadSummary; 3] {
    // Caches fill.
    load.wait_for_requests(SPOT_CHECK_REQUESTS).await;
    let begun = Instant::now();
    load.wait_for_requests(MEASURED).await;
    let from = Instant::now();
    for containers in [&["mooncake-store/store"][..], &["prefill", "decode"]] {
        cluster.upgrade(containers, &format!("moongate:{UPGRADE_TAG}")).await;
        cluster.settled().await;
    }
    let to = Instant::now();
    load.wait_for_requests(MEASURED).await;
    [load.summary(begun, from), load.summary(from, to), load.summary(to, Instant::now())]
}
