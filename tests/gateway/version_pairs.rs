//! During a rollout of the engines, a prefill hands its KV cache over to decodes of its own version only.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use moongate_loadtest::engine::{SimEngine, SimEngineOptions};
use serde_json::{Value, json};

use crate::harness::client;
use crate::harness::fleet::{TestEngines, TestFleetBuilder};
use crate::harness::gateway::TestGateway;
use crate::harness::metrics::metric_at;
use crate::harness::process::MoongateProcess;

const REQUESTS: usize = 120;

async fn engines(version: &'static str, prefills: usize, decodes: usize) -> TestEngines {
    let tune = |options: SimEngineOptions| SimEngineOptions {
        reported_version: Some(version.to_owned()),
        ..options.fast()
    };
    TestFleetBuilder::sglang().prefill(prefills).decode(decodes).tune(tune).engines().await
}

/// Sends requests to a fleet that is being upgraded. Returns how many each pair of versions served, prefill first.
async fn served(rule: &str) -> BTreeMap<(&'static str, &'static str), usize> {
    let fleets = [("0.5.5", engines("0.5.5", 2, 2).await), ("0.5.6", engines("0.5.6", 2, 1).await)];
    let early = engines("0.5.7", 1, 0).await;
    let all = fleets.iter().map(|(_, fleet)| fleet).chain([&early]);
    let mut flags: Vec<String> = all.flat_map(TestEngines::flags).collect();
    flags.push(format!("--pair-versions={rule}"));
    let (gateway, client) = (TestGateway::start_ready(&flags).await, client());
    let model = &fleets[0].1.prefills[0].options().model;
    let requests = (0..REQUESTS).map(async |number| {
        let prompt = format!("{number} is a prompt of its own");
        let body = json!({ "model": model, "prompt": prompt, "max_tokens": 2 });
        let sent =
            client.post(gateway.url("/v1/completions")).header("x-request-id", format!("request-{number}"));
        let sent = sent.json(&body).send().await.unwrap();
        assert_eq!(sent.status(), 200, "{}", sent.text().await.unwrap());
    });
    join_all(requests).await;
    let unpaired = metric_at(&client, &gateway.admin_url(""), "moongate_engines_unpaired").await;
    assert_eq!(unpaired, u64::from(rule != "any"), "{rule}");
    let mixed = metric_at(&client, &gateway.admin_url(""), "moongate_mixed_version_pairs_total").await;
    assert_eq!(mixed > 0, rule == "any", "{rule}: {mixed}");
    let admin = gateway.admin_url("").trim_start_matches("http://").to_owned();
    let explained = MoongateProcess::run(&["explain", "request-0", &format!("--admin={admin}")]).await.stdout;
    assert!(explained.contains("versions of these engines: 0.5."), "{explained}");
    assert_eq!(explained.contains("(--pair-versions): http://"), rule != "any", "{explained}");
    let fleet: Value =
        client.get(gateway.admin_url("/debug/fleet")).send().await.unwrap().json().await.unwrap();
    let paused = fleet["instances"].as_array().unwrap().iter().filter(|engine| engine["state"] == "paused");
    let paused: Vec<&Value> = paused.map(|engine| &engine["version"]).collect();
    if rule == "any" {
        assert_eq!(paused, [&Value::Null; 0]);
    } else {
        assert_eq!(paused, ["0.5.7"]);
        assert_eq!(early.started(), 0, "there is no decode of its version");
    }

    let bootstrap = |engine: &SimEngine| engine.bootstrap_addr().map(|address| u64::from(address.port()));
    let prefills = fleets.iter().flat_map(|(version, fleet)| fleet.prefills.iter().map(|it| (*version, it)));
    let prefills = prefills.chain(early.prefills.iter().map(|it| ("0.5.7", it)));
    let versions: BTreeMap<u64, &str> =
        prefills.filter_map(|(version, engine)| Some((bootstrap(engine)?, version))).collect();
    let mut pairs = BTreeMap::new();
    for (version, fleet) in &fleets {
        for request in fleet.decodes.iter().flat_map(|decode| decode.recent_requests(REQUESTS)) {
            let body: Value = serde_json::from_slice(&request.body).unwrap();
            let port = body["bootstrap_port"].as_u64().unwrap();
            *pairs.entry((versions[&port], *version)).or_default() += 1;
        }
    }
    pairs
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_are_not_mixed_during_a_rollout() {
    for rule in ["preferred", "equal"] {
        let pairs = served(rule).await;
        assert_eq!(pairs.values().sum::<usize>(), REQUESTS, "{rule}: {pairs:?}");
        assert!(pairs.keys().all(|(prefill, decode)| prefill == decode), "{rule}: {pairs:?}");
        assert_eq!(pairs.len(), 2, "both versions serve: {rule}: {pairs:?}");
    }
}

/// Of a model that has no pair of one version, only a list of compatible versions says what `equal` may pair.
#[tokio::test(flavor = "multi_thread")]
async fn versions_that_are_declared_compatible_pair() {
    let (prefills, decodes) = (engines("0.5.5", 1, 0).await, engines("0.5.6", 0, 1).await);
    let mut flags: Vec<String> = prefills.flags().into_iter().chain(decodes.flags()).collect();
    flags.extend(["--pair-versions=equal", "--compatible-versions=0.5.5=0.5.6"].map(str::to_owned));
    let (gateway, client) = (TestGateway::start_ready(&flags).await, client());
    let body = json!({ "model": prefills.prefills[0].options().model, "prompt": "hello", "max_tokens": 2 });
    let sent = client.post(gateway.url("/v1/completions")).json(&body).send().await.unwrap();
    assert_eq!(sent.status(), 200, "{}", sent.text().await.unwrap());
    for metric in ["moongate_engines_unpaired", "moongate_mixed_version_pairs_total"] {
        assert_eq!(metric_at(&client, &gateway.admin_url(""), metric).await, 0, "{metric}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_are_mixed_if_they_may_be() {
    let pairs = served("any").await;
    assert!(pairs.keys().any(|(prefill, decode)| prefill != decode), "{pairs:?}");
}
