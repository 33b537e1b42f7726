//! Requests through Envoy go to the engine that the picker chooses, and the picker sees what becomes of them.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;
use moongate_loadtest::engine::{
    KvEventOptions, RecordedRequest, SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole,
};
use serde_json::{Value, json};

use crate::harness::process::{GatewayAddresses, MoongateProcess};
use crate::harness::{TEST_TIMEOUT, client};
use crate::proxy::{EnvoyOptions, EnvoyProxy};

/// Simulated vLLM engines of these roles, which report their caches.
async fn engines(roles: &[SimRole]) -> Vec<SimEngine> {
    let store = SharedL3Store::new(1 << 20);
    let start = |role: &SimRole| {
        let options = SimEngineOptions::new(*role, SimProtocol::Vllm).fast();
        SimEngine::start_with_store(
            SimEngineOptions { kv_events: Some(KvEventOptions::default()), ..options },
            &store,
        )
    };
    join_all(roles.iter().map(start)).await.into_iter().map(Result::unwrap).collect()
}

async fn workers(count: usize) -> Vec<SimEngine> {
    engines(&vec![SimRole::Plain; count]).await
}

/// `moongate epp` for these engines, ready to pick.
async fn picker(engines: &[SimEngine], flags: &[&str]) -> (MoongateProcess, GatewayAddresses) {
    let role = |engine: &SimEngine| match engine.options().role {
        SimRole::Prefill => "prefill",
        SimRole::Decode => "decode",
        _ => "worker",
    };
    let engines = engines.iter().map(|engine| format!("--{}={}", role(engine), engine.url()));
    let flags: Vec<String> = engines.chain(flags.iter().map(|flag| (*flag).to_owned())).collect();
    let (process, addresses) =
        MoongateProcess::listening(("epp", "endpoint picker listening"), &flags, &[]).await;
    let ready = format!("http://{}/ready", addresses.admin);
    poll("the picker is ready", async || {
        let response: Value = client().get(&ready).send().await.unwrap().json().await.unwrap();
        response["status"] == "ready" && response["waiting"].as_array().is_some_and(Vec::is_empty)
    })
    .await;
    (process, addresses)
}

/// Polls until `condition` holds.
async fn poll(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "not within {TEST_TIMEOUT:?}: {what}");
}

/// A prompt of a conversation, as tokens.
fn prompt(conversation: u32, length: u32, stream: bool) -> Value {
    let tokens: Vec<u32> = (0..length).map(|at| conversation * 1_000 + at % 997).collect();
    let usage = json!({"include_usage": true});
    let mut body = json!({"model": "sim", "prompt": tokens, "max_tokens": 3, "stream": stream});
    if stream {
        body["stream_options"] = usage;
    }
    body
}

/// The sum of a metric's samples with all of these labels.
async fn metric(admin: &str, name: &str, labels: &[&str]) -> f64 {
    let text = client().get(format!("http://{admin}/metrics")).send().await.unwrap().text().await.unwrap();
    let is_it = |line: &&str| {
        line.split(['{', ' ']).next() == Some(name) && labels.iter().all(|label| line.contains(label))
    };
    text.lines().filter(is_it).map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

/// Cached tokens that the picker predicts of each of the engines.
async fn predicted(admin: &str, body: &Value, engines: &[SimEngine]) -> Vec<u64> {
    let url = format!("http://{admin}/debug/predict/v1/completions");
    let answer: Value = client().post(url).json(body).send().await.unwrap().json().await.unwrap();
    let predictions = answer["engines"].as_array().cloned().unwrap_or_default();
    let of_engine = |engine: &SimEngine| {
        let address = engine.addr().to_string();
        let prediction = predictions.iter().find(|it| it["instance"].as_str().unwrap().contains(&address));
        prediction.map_or(0, |prediction| prediction["l1_tokens"].as_u64().unwrap())
    };
    engines.iter().map(of_engine).collect()
}

/// Requests that the picker counts on all engines.
async fn in_flight(admin: &str) -> u64 {
    let fleet = client().get(format!("http://{admin}/debug/fleet")).send().await.unwrap();
    let fleet: Value = fleet.json().await.unwrap();
    let engines = fleet["instances"].as_array().unwrap().iter();
    engines.map(|engine| engine["in_flight"].as_u64().unwrap()).sum()
}

/// The values of a header that an engine has got.
fn header<'a>(request: &'a RecordedRequest, name: &str) -> Vec<&'a str> {
    request.headers.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
}

/// Cached tokens that a response reports.
fn cached(usage: &Value) -> u64 {
    usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_go_to_the_engine_with_the_cached_prefix() {
    let engines = workers(6).await;
    let (_picker, addresses) = picker(&engines, &[]).await;
    let envoy = EnvoyProxy::start(&EnvoyOptions::new(&addresses.public, &engines)).await;
    for conversation in 1..7 {
        let response = envoy.post("/v1/completions", &prompt(conversation, 600, false)).await;
        assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
        let next = prompt(conversation, 900, conversation % 2 == 0);
        poll("the prompt is indexed", async || {
            predicted(&addresses.admin, &next, &engines).await.iter().any(|hits| *hits >= 512)
        })
        .await;
        let started: Vec<u64> = engines.iter().map(|engine| engine.stats().started).collect();
        let hits = predicted(&addresses.admin, &next, &engines).await;
        let text = envoy.post("/v1/completions", &next).await.text().await.unwrap();
        let usage = |text: &str| serde_json::from_str::<Value>(text).ok().map(|event| event["usage"].clone());
        let events = text.lines().filter_map(|line| usage(line.strip_prefix("data: ").unwrap_or(line)));
        let found = events.map(|usage| cached(&usage)).max().unwrap_or_else(|| panic!("no usage in {text}"));
        assert_eq!(Some(&found), hits.iter().max(), "{hits:?} {text}");
        let received =
            engines.iter().zip(&started).position(|(engine, before)| engine.stats().started > *before);
        assert_eq!(received, hits.iter().position(|hit| *hit == found), "{hits:?}");
    }
    // The observed responses release the engines and are counted as the gateway counts its own.
    let admin = &addresses.admin;
    poll("all are complete", async || {
        metric(admin, "moongate_requests_total", &["code=\"ok\""]).await == 12.0
    })
    .await;
    assert_eq!(metric(admin, "moongate_requests_total", &[]).await, 12.0);
    assert_eq!(metric(admin, "moongate_ttft_seconds_count", &[]).await, 3.0, "three were streamed");
    poll("the engines are released", async || in_flight(admin).await == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_engine_fails_no_request() {
    let mut engines = workers(6).await;
    let flags = ["--health-interval=0s", "--policy=round_robin"];
    let (_picker, addresses) = picker(&engines, &flags).await;
    let envoy = EnvoyProxy::start(&EnvoyOptions::new(&addresses.public, &engines)).await;
    let send = async |from: u32| {
        let requests = (from..from + 60).map(|conversation| {
            let envoy = &envoy;
            async move { envoy.post("/v1/completions", &prompt(conversation, 64, false)).await.status() }
        });
        join_all(requests).await
    };
    let first = send(1);
    let kill = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        engines.remove(2).stop().await;
    };
    let (mut statuses, ()) = tokio::join!(first, kill);
    statuses.extend(send(100).await);
    let failed = statuses.iter().filter(|status| **status != 200).count();
    assert_eq!(failed, 0, "of {}: {statuses:?}", statuses.len());
    let failures = metric(&addresses.admin, "moongate_leg_failures_total", &[]).await;
    assert!(failures >= 1.0, "the picker has seen which engine failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_engines_are_named_in_case_one_fails() {
    let engines = workers(4).await;
    let (_picker, addresses) = picker(&engines, &[]).await;
    let envoy = EnvoyProxy::start(&EnvoyOptions::new(&addresses.public, &engines)).await;
    assert_eq!(envoy.post("/v1/completions", &prompt(1, 64, false)).await.status(), 200);
    let engine = engines.iter().find(|engine| engine.stats().started > 0).unwrap();
    let request = engine.recent_requests(1).pop().unwrap();
    let named = header(&request, "x-gateway-destination-endpoint").concat();
    let named: Vec<&str> = named.split(',').collect();
    let known: BTreeSet<String> = engines.iter().map(|engine| engine.addr().to_string()).collect();
    assert_eq!((named.len(), named[0]), (3, engine.addr().to_string().as_str()), "{named:?}");
    assert!(named.iter().all(|address| known.contains(*address)), "{named:?} {known:?}");
    assert_eq!(named.iter().collect::<BTreeSet<_>>().len(), 3, "{named:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_releases_the_engine() {
    let engines = workers(1).await;
    let (_picker, addresses) = picker(&engines, &[]).await;
    let envoy = EnvoyProxy::start(&EnvoyOptions::new(&addresses.public, &engines)).await;
    let mut body = prompt(1, 64, true);
    body["max_tokens"] = 1_000_000.into();
    let mut response = envoy.post("/v1/completions", &body).await;
    assert!(response.chunk().await.unwrap().is_some(), "the stream has begun");
    assert_eq!(in_flight(&addresses.admin).await, 1);
    drop(response);
    let admin = &addresses.admin;
    let abandoned = async || metric(admin, "moongate_requests_total", &["code=\"client_closed\""]).await;
    poll("the request is counted as abandoned", async || abandoned().await == 1.0).await;
    poll("the engine is released", async || in_flight(admin).await == 0).await;
    assert_eq!(metric(admin, "moongate_ttft_seconds_count", &[]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_picker_fails_open_or_closed_as_set() {
    for fails_open in [true, false] {
        let engines = workers(2).await;
        let (picker, addresses) = picker(&engines, &[]).await;
        let options = EnvoyOptions { fails_open, ..EnvoyOptions::new(&addresses.public, &engines) };
        let envoy = EnvoyProxy::start(&options).await;
        assert_eq!(envoy.post("/v1/completions", &prompt(1, 64, false)).await.status(), 200);
        picker.signal("KILL").await;
        picker.wait().await;
        let status = async || envoy.post("/v1/completions", &prompt(2, 64, false)).await.status();
        if fails_open {
            // A request whose body is sent to the picker as it dies is lost.
            poll("Envoy sees that the picker is gone", async || status().await == 200).await;
        }
        for _ in 0..10 {
            let status = status().await;
            assert_eq!(status.is_success(), fails_open, "{status}");
            assert!(fails_open || status.is_server_error(), "{status}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejections_are_the_gateways_own_errors() {
    let engines = workers(1).await;
    let (_picker, addresses) = picker(&engines, &["--max-queued-requests=0", "--max-body-bytes=10000"]).await;
    let envoy = EnvoyProxy::start(&EnvoyOptions::new(&addresses.public, &engines)).await;
    let unknown = json!({"model": "none", "prompt": "a"});
    let large = json!({"model": "sim", "prompt": "a".repeat(200_000)});
    for (body, status, code) in [
        (&unknown, 404, "model_not_found"),
        (&json!([]), 400, "invalid_json"),
        (&large, 413, "body_too_large"),
        (&prompt(1, 64, false), 429, "overloaded"),
    ] {
        let response = envoy.post("/v1/completions", body).await;
        assert_eq!(response.status(), status);
        let retry_after =
            response.headers().get("retry-after").map(|after| after.to_str().unwrap().to_owned());
        assert_eq!(retry_after.is_some(), status == 429, "{retry_after:?}");
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["code"], code, "{error}");
    }
    assert_eq!(engines[0].stats().started, 0);
    let models: Value = client().get(envoy.url("/v1/models")).send().await.unwrap().json().await.unwrap();
    assert_eq!(models["data"][0]["id"], "sim", "{models}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_engines_of_the_subset_are_picked() {
    let engines = workers(3).await;
    let (_picker, addresses) = picker(&engines, &["--policy=round_robin"]).await;
    let allowed = engines[1].addr().to_string();
    for (subset, status, started) in
        [(vec![allowed], 200, 4), (vec!["127.0.0.1:1".to_owned()], 503, 4), (vec![], 503, 4)]
    {
        let options = EnvoyOptions { subset: Some(subset), ..EnvoyOptions::new(&addresses.public, &engines) };
        let envoy = EnvoyProxy::start(&options).await;
        for conversation in 0..4 {
            let response = envoy.post("/v1/completions", &prompt(conversation, 64, false)).await;
            assert_eq!(response.status(), status, "{}", response.text().await.unwrap());
        }
        let by_engine: Vec<_> = engines.iter().map(|engine| engine.stats().started).collect();
        assert_eq!(by_engine, [0, started, 0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_engine_gets_the_address_of_its_prefill() {
    let engines = engines(&[SimRole::Prefill, SimRole::Decode]).await;
    let (_picker, addresses) = picker(&engines, &[]).await;
    let envoy = EnvoyProxy::start(&EnvoyOptions::new(&addresses.public, &engines)).await;
    let request = client().post(envoy.url("/v1/completions")).json(&prompt(1, 64, false));
    let request = request.header("x-prefiller-host-port", "10.9.9.9:1").header("x-client", "kept");
    request.send().await.unwrap();
    let received = engines[1].recent_requests(1).pop().expect("the decode has got the request");
    assert_eq!(header(&received, "x-prefiller-host-port"), [engines[0].addr().to_string()], "{received:?}");
    assert_eq!(header(&received, "x-client"), ["kept"]);
    assert_eq!(engines[0].stats().started, 0, "the prefill gets its request from the decode's sidecar");
}
