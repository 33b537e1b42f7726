//! Discovery against scripted HTTP APIs of engines.

use std::time::Duration;

use moongate_discovery::{
    BootstrapAddress, DeclaredKvFacts, DiscoveryOptions, EngineBlockHashing, EngineFacts, EngineInstance,
    EngineKind, EngineRole, InstanceReadiness, KvConnector, KvTransferMethod, ProbeCheckOutcome,
    ProbeOptions, ProbeVerdict, StaticInstance, StoreKeyScheme, Topology, TopologyReader, VllmHashAlgorithm,
    probe_once, start,
};
use moongate_runtime::{BackoffPolicy, Supervisor};
use serde_json::json;

use crate::fake_engine::{self, ScriptedServer};

const NIXL_METRICS: &str = include_str!("../data/vllm-0.32-nixl-decode-metrics.txt");
const STORE_METRICS: &str = include_str!("../data/vllm-0.32-store-decode-metrics.txt");
const SGLANG_INFO: &str = include_str!("../data/sglang-0.5.23-server_info.json");

/// The default options with shorter intervals.
fn quick() -> ProbeOptions {
    ProbeOptions {
        timeout: Duration::from_millis(500),
        refresh: Duration::from_secs(3600),
        backoff: BackoffPolicy { initial: Duration::from_millis(10), max: Duration::from_millis(40) },
        ..ProbeOptions::default()
    }
}

async fn discover(
    instances: Vec<StaticInstance>,
    probe: ProbeOptions,
    supervisor: &Supervisor,
) -> TopologyReader {
    let options = DiscoveryOptions { instances, probe, ..DiscoveryOptions::default() };
    start(options, supervisor).await.unwrap()
}

fn by_role(topology: &Topology, role: EngineRole) -> &EngineInstance {
    topology.instances.iter().find(|instance| instance.role == role).unwrap()
}

fn reason(instance: &EngineInstance) -> &str {
    match &instance.readiness {
        InstanceReadiness::Ready => "",
        InstanceReadiness::NotReady { reason } => reason,
    }
}

async fn until(
    reader: &mut TopologyReader,
    wanted: impl FnMut(&Topology) -> bool,
) -> std::sync::Arc<Topology> {
    let waited = tokio::time::timeout(Duration::from_secs(20), reader.wait_for(wanted)).await;
    waited.unwrap_or_else(|_| panic!("not in time; last: {:#?}", reader.current())).unwrap()
}

fn all_ready(topology: &Topology) -> bool {
    topology.instances.iter().all(|instance| instance.usable_facts().is_some())
}

#[tokio::test]
async fn sglang_pair_is_ready_once_prefill_ranks_are_registered() {
    let supervisor = Supervisor::new();
    let (prefill, decode, bootstrap) = (
        ScriptedServer::start(&supervisor).await,
        ScriptedServer::start(&supervisor).await,
        ScriptedServer::start(&supervisor).await,
    );
    fake_engine::sglang(&prefill, "prefill", bootstrap.port);
    fake_engine::sglang(&decode, "decode", 8998);
    fake_engine::sglang_bootstrap(&bootstrap, false);
    let instances = vec![
        StaticInstance::new(EngineRole::Prefill, prefill.url()),
        StaticInstance::new(EngineRole::Decode, decode.url()),
    ];
    let mut reader = discover(instances, quick(), &supervisor).await;
    assert_eq!(reader.current().instances.len(), 2, "listed at once, probed later");

    let waiting = until(&mut reader, |topology| {
        by_role(topology, EngineRole::Decode).usable_facts().is_some()
            && by_role(topology, EngineRole::Prefill).facts.is_some()
    })
    .await;
    let not_ready = by_role(&waiting, EngineRole::Prefill);
    assert!(reason(not_ready).contains("not all ranks"), "{}", reason(not_ready));

    fake_engine::sglang_bootstrap(&bootstrap, true);
    let topology = until(&mut reader, all_ready).await;
    let facts = by_role(&topology, EngineRole::Prefill).usable_facts().unwrap();
    assert_eq!(facts.models, ["tiny"], "duplicates removed");
    assert_eq!((facts.engine, facts.version.as_str(), facts.dp_size), (EngineKind::Sglang, "0.5.23", 2));
    assert_eq!((facts.page_size, facts.context_length), (Some(64), Some(8192)));
    assert_eq!(
        facts.transfer,
        Some(KvTransferMethod::SglangBootstrap {
            bootstrap: Some(BootstrapAddress { host: "127.0.0.1".into(), port: bootstrap.port })
        })
    );
    let facts = by_role(&topology, EngineRole::Decode).usable_facts().unwrap();
    assert_eq!(facts.transfer, Some(KvTransferMethod::SglangBootstrap { bootstrap: None }));
    supervisor.shutdown(Duration::from_secs(0)).await.ok();
    assert!(reader.changed().await.is_none(), "stopped");
}

#[tokio::test]
async fn the_recorded_response_of_an_older_path_makes_a_plain_worker() {
    let supervisor = Supervisor::new();
    let server = ScriptedServer::start(&supervisor).await;
    server.on("/get_server_info", 200, SGLANG_INFO);
    let mut reader =
        discover(vec![StaticInstance::new(EngineRole::Plain, server.url())], quick(), &supervisor).await;
    let topology = until(&mut reader, all_ready).await;
    let facts = topology.instances[0].usable_facts().unwrap();
    assert_eq!(facts.models, ["tiny"], "from /get_server_info, since /v1/models does not exist");
    assert_eq!(
        (facts.reported_role, facts.page_size, &facts.transfer),
        (Some(EngineRole::Plain), Some(32), &None)
    );
    assert_eq!(
        facts.hashing,
        Some(EngineBlockHashing::Sglang { namespaced: Some(true), bigrams: false, namespaced_events: false })
    );
    assert_eq!((facts.host_cache, &facts.store), (Some(false), &None));
    assert_eq!(facts.events, Some(Vec::new()));
}

/// Probes an engine and returns the facts; panics unless it is ready.
async fn facts_of(instance: &StaticInstance) -> EngineFacts {
    match probe_once(instance, &quick()).await.unwrap().verdict {
        ProbeVerdict::Ready(facts) => facts,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn sglang_cache_facts_need_no_extra_request() {
    let supervisor = Supervisor::new();
    let server = ScriptedServer::start(&supervisor).await;
    let mut info: serde_json::Value = serde_json::from_str(SGLANG_INFO).unwrap();
    for (key, value) in [
        ("enable_hierarchical_cache", json!(true)),
        ("hicache_storage_backend", json!("mooncake")),
        (
            "kv_events",
            json!({"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 1}),
        ),
        (
            "hicache_object_layout",
            json!({"hicache_object_layout": {"key_prefix": "tiny", "is_mla_backend": false}}),
        ),
    ] {
        info[key] = value;
    }
    server.on("/server_info", 200, info).on("/v1/models", 200, fake_engine::models(&["tiny"]));
    let facts = facts_of(&StaticInstance::new(EngineRole::Plain, server.url())).await;
    assert_eq!(facts.events.unwrap()[0].endpoint, "tcp://127.0.0.1:5557");
    assert_eq!(facts.host_cache, Some(true));
    let store = facts.store.unwrap();
    assert_eq!(store.keys, StoreKeyScheme::Sglang { prefix: Some("tiny".into()), mla: Some(false) });
    assert_eq!((store.tp_size, store.prefetch_threshold), (Some(1), Some(256)));
    assert_eq!((server.request_count("/server_info"), server.request_count("/v1/models")), (1, 1));
    assert_eq!((server.request_count("/kv_event_sources"), server.request_count("/metrics")), (0, 0));
}

#[tokio::test]
async fn vllm_event_sources_take_one_request_unless_declared() {
    let supervisor = Supervisor::new();
    let server = ScriptedServer::start(&supervisor).await;
    fake_engine::vllm(&server, STORE_METRICS);
    let card = json!({"data": [{"id": "tiny", "root": "/models/tiny-qwen3"}]});
    server.on("/v1/models", 200, card);
    let plain = StaticInstance::new(EngineRole::Plain, server.url());
    let facts = facts_of(&plain).await;
    assert_eq!(facts.events, Some(Vec::new()), "404 is not an error");
    assert_eq!(
        facts.hashing,
        Some(EngineBlockHashing::Vllm {
            algorithm: VllmHashAlgorithm::Sha256Cbor,
            seed: "vllm-none-hash".into()
        })
    );
    let keys = StoreKeyScheme::Vllm { prefix: String::new(), model: Some("tiny-qwen3".into()) };
    assert_eq!(facts.store.unwrap().keys, keys);

    server.on(
        "/kv_event_sources",
        200,
        json!({"0": {"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}}),
    );
    let facts = facts_of(&plain).await;
    let events = facts.events.unwrap();
    assert_eq!((events[0].endpoint.as_str(), events[0].topic.as_str()), ("tcp://127.0.0.1:5557", "kv"));
    assert_eq!(server.request_count("/kv_event_sources"), 2, "once a probe");

    let kv = DeclaredKvFacts { events: Some("tcp://*:9000".into()), ..DeclaredKvFacts::default() };
    let facts = facts_of(&StaticInstance { kv, ..plain.clone() }).await;
    assert_eq!(facts.events.unwrap()[0].endpoint, "tcp://127.0.0.1:9000");
    assert_eq!(server.request_count("/kv_event_sources"), 2, "declared");

    server.on("/kv_event_sources", 500, "");
    assert_eq!(facts_of(&plain).await.events, None, "not reported, and the engine serves");
}

#[tokio::test]
async fn an_engine_in_another_role_is_not_ready_with_the_reason() {
    let supervisor = Supervisor::new();
    let server = ScriptedServer::start(&supervisor).await;
    fake_engine::sglang(&server, "decode", 8998);
    let mut reader =
        discover(vec![StaticInstance::new(EngineRole::Prefill, server.url())], quick(), &supervisor).await;
    let topology = until(&mut reader, |topology| topology.instances[0].facts.is_some()).await;
    let text = reason(&topology.instances[0]);
    assert!(
        text.contains("listed as prefill")
            && text.contains("--disaggregation-mode decode")
            && text.contains(&server.url()),
        "{text}"
    );
    fake_engine::sglang(&server, "prefill", server.port);
    fake_engine::sglang_bootstrap(&server, true);
    until(&mut reader, all_ready).await;
}

#[tokio::test]
async fn a_nixl_pair_is_detected_by_its_metrics() {
    let supervisor = Supervisor::new();
    let (prefill, decode) =
        (ScriptedServer::start(&supervisor).await, ScriptedServer::start(&supervisor).await);
    fake_engine::vllm(&prefill, NIXL_METRICS);
    fake_engine::vllm(&decode, NIXL_METRICS);
    let instances = vec![
        StaticInstance::new(EngineRole::Prefill, prefill.url()),
        StaticInstance::new(EngineRole::Decode, decode.url()),
    ];
    let mut reader = discover(instances, quick(), &supervisor).await;
    let topology = until(&mut reader, all_ready).await;
    for instance in &topology.instances {
        let facts = instance.usable_facts().unwrap();
        assert_eq!((facts.engine, &facts.transfer), (EngineKind::Vllm, &Some(KvTransferMethod::VllmNixl)));
        assert_eq!((facts.page_size, facts.context_length), (Some(32), Some(4096)));
        assert_eq!((facts.host_cache, &facts.store), (Some(false), &None));
    }
}

#[tokio::test]
async fn mooncake_decode_follows_prefill_and_restart_changes_its_id() {
    let supervisor = Supervisor::new();
    let (prefill, decode, bootstrap) = (
        ScriptedServer::start(&supervisor).await,
        ScriptedServer::start(&supervisor).await,
        ScriptedServer::start(&supervisor).await,
    );
    fake_engine::vllm(&prefill, "");
    fake_engine::vllm(&decode, "");
    let instances = vec![
        StaticInstance {
            bootstrap_port: Some(bootstrap.port),
            ..StaticInstance::new(EngineRole::Prefill, prefill.url())
        },
        StaticInstance::new(EngineRole::Decode, decode.url()),
    ];
    let mut reader = discover(instances, quick(), &supervisor).await;
    let topology =
        until(&mut reader, |topology| topology.instances.iter().all(|instance| instance.facts.is_some()))
            .await;
    for instance in &topology.instances {
        assert!(reason(instance).contains("set `connector`"), "{}", reason(instance));
    }

    fake_engine::mooncake_query(&bootstrap, "first");
    let topology = until(&mut reader, all_ready).await;
    let prefill_id = by_role(&topology, EngineRole::Prefill).id.clone();
    let ids = |topology: &Topology| match &by_role(topology, EngineRole::Prefill)
        .facts
        .as_ref()
        .unwrap()
        .transfer
    {
        Some(KvTransferMethod::VllmMooncake { bootstrap: Some(_), engine_ids }) => engine_ids[&0].clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(ids(&topology), "first");
    assert!(matches!(
        by_role(&topology, EngineRole::Decode).usable_facts().unwrap().transfer,
        Some(KvTransferMethod::VllmMooncake { bootstrap: None, .. })
    ));

    fake_engine::mooncake_query(&bootstrap, "second");
    reader.request_probe(&prefill_id);
    let topology = until(&mut reader, |topology| ids(topology) == "second").await;
    assert!(all_ready(&topology));
}

#[tokio::test]
async fn declared_connector_needs_no_metrics_but_mooncake_bootstrap() {
    let supervisor = Supervisor::new();
    let (server, bootstrap) =
        (ScriptedServer::start(&supervisor).await, ScriptedServer::start(&supervisor).await);
    fake_engine::vllm(&server, "");
    let options = quick();
    let declared = |connector, role| StaticInstance {
        connector: Some(connector),
        bootstrap_port: Some(bootstrap.port),
        ..StaticInstance::new(role, server.url())
    };
    for (connector, transfer) in
        [(KvConnector::Nixl, KvTransferMethod::VllmNixl), (KvConnector::Store, KvTransferMethod::VllmStore)]
    {
        match probe_once(&declared(connector, EngineRole::Prefill), &options).await.unwrap().verdict {
            ProbeVerdict::Ready(facts) => assert_eq!(facts.transfer, Some(transfer)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(bootstrap.request_count("/query"), 0);
    let report = probe_once(&declared(KvConnector::Mooncake, EngineRole::Prefill), &options).await.unwrap();
    assert!(
        matches!(&report.verdict, ProbeVerdict::NotReady { reason, .. } if reason.contains("/query")),
        "{report:?}"
    );
    bootstrap.on("/query", 200, "{}");
    let report = probe_once(&declared(KvConnector::Mooncake, EngineRole::Prefill), &options).await.unwrap();
    assert!(
        matches!(&report.verdict, ProbeVerdict::NotReady { reason, .. } if reason.contains("no engine is registered"))
    );
    let report = probe_once(&declared(KvConnector::Mooncake, EngineRole::Decode), &options).await.unwrap();
    assert!(matches!(report.verdict, ProbeVerdict::Ready(_)));
}

#[tokio::test]
async fn unresponsive_engine_loses_readiness_and_regains_it() {
    let supervisor = Supervisor::new();
    let server = ScriptedServer::start(&supervisor).await;
    fake_engine::sglang(&server, "null", 8998);
    let probe =
        ProbeOptions { timeout: Duration::from_millis(100), refresh: Duration::from_millis(20), ..quick() };
    let mut reader =
        discover(vec![StaticInstance::new(EngineRole::Plain, server.url())], probe, &supervisor).await;
    until(&mut reader, all_ready).await;
    let requests_before = server.request_count("/server_info");
    server.hang("/server_info");
    let topology = until(&mut reader, |topology| !all_ready(topology)).await;
    assert!(reason(&topology.instances[0]).contains("no response in time"));
    assert!(server.request_count("/server_info") >= requests_before + 2, "a single timeout is tolerated");
    assert!(topology.instances[0].facts.is_some());
    fake_engine::sglang(&server, "null", 8998);
    until(&mut reader, all_ready).await;
}

#[tokio::test]
async fn a_report_lists_every_check_with_a_fix() {
    let supervisor = Supervisor::new();
    let server = ScriptedServer::start(&supervisor).await;
    server.on("/server_info", 401, "Unauthorized");
    let instance = StaticInstance::new(EngineRole::Prefill, server.url());
    let options = ProbeOptions { api_key: Some("k".into()), ..quick() };
    let report = probe_once(&instance, &options).await.unwrap();
    assert_eq!(server.authorizations(), ["Bearer k"]);
    assert_eq!(report.checks[0].outcome, ProbeCheckOutcome::Status(401));
    assert!(report.checks[0].fix.as_deref().unwrap().contains("--api-key"));
    assert!(!format!("{options:?}").contains("\"k\""), "the key stays out of logs");

    fake_engine::sglang(&server, "prefill", 1);
    let report = probe_once(&instance, &quick()).await.unwrap();
    let last = report.checks.last().unwrap();
    assert!(matches!(last.outcome, ProbeCheckOutcome::Failed(_)), "nothing listens on port 1: {last:?}");
    assert!(last.fix.as_deref().unwrap().contains("--disaggregation-bootstrap-port"));
    assert!(report.checks.iter().all(|check| !check.conclusion.is_empty()));

    let unreachable = StaticInstance::new(EngineRole::Plain, "http://127.0.0.1:1");
    let report = probe_once(&unreachable, &quick()).await.unwrap();
    assert!(matches!(report.verdict, ProbeVerdict::NotReady { timed_out: false, .. }));
    assert!(report.checks[0].fix.is_some());
    assert!(probe_once(&StaticInstance::new(EngineRole::Plain, "ftp://x"), &quick()).await.is_err());
}

#[tokio::test]
async fn an_oversized_response_is_rejected() {
    let supervisor = Supervisor::new();
    let server = ScriptedServer::start(&supervisor).await;
    server.on("/server_info", 200, "x".repeat(5 << 20));
    let probe = ProbeOptions { timeout: Duration::from_secs(10), ..quick() };
    let report = probe_once(&StaticInstance::new(EngineRole::Plain, server.url()), &probe).await.unwrap();
    assert!(
        matches!(&report.verdict, ProbeVerdict::NotReady { reason, .. } if reason.contains("larger than")),
        "{report:?}"
    );
}

#[tokio::test]
async fn a_vllm_whose_server_info_fails_is_still_a_vllm() {
    let supervisor = Supervisor::new();
    let server = ScriptedServer::start(&supervisor).await;
    let plain = StaticInstance::new(EngineRole::Plain, server.url());
    server.on("/server_info", 500, "Internal Server Error");
    let report = probe_once(&plain, &quick()).await.unwrap();
    assert!(
        matches!(&report.verdict, ProbeVerdict::NotReady { reason, .. } if reason.contains("/server_info: HTTP 500"))
    );
    fake_engine::vllm(&server, "");
    server.on("/server_info", 500, "Internal Server Error");
    assert_eq!(facts_of(&plain).await.engine, EngineKind::Vllm);
}

#[tokio::test]
async fn a_server_that_is_not_an_engine_is_reported_as_such() {
    let supervisor = Supervisor::new();
    let server = ScriptedServer::start(&supervisor).await;
    let plain = StaticInstance::new(EngineRole::Plain, server.url());
    let report = probe_once(&plain, &quick()).await.unwrap();
    assert!(
        matches!(&report.verdict, ProbeVerdict::NotReady { reason, .. } if reason.contains("neither as SGLang"))
    );
    fake_engine::vllm(&server, "");
    let declared = StaticInstance { engine: Some(EngineKind::Sglang), ..plain };
    let report = probe_once(&declared, &quick()).await.unwrap();
    assert!(matches!(&report.verdict, ProbeVerdict::NotReady { reason, .. } if reason.contains("as SGLang")));
}
