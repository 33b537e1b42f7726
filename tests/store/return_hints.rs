//! Hints whether a prompt will be used again reach the store's master.

use mooncake_wire::admin::DescribedObjects;
use mooncake_wire::types::{DEFAULT_TENANT, ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master_core::{CallContext, PutStartRequest};
use serde_json::{Value, json};

use crate::harness::fleet::TestFleet;
use crate::harness::store_prompts::{objects, prompt, start_fleet_with_store, wait_for_metric};
use moongate_store_testkit::mooncake::{NEWEST_WITHOUT_CUDA, RealMaster};
use moongate_store_testkit::test_master::start_http_master;

async fn complete(world: &TestFleet, prompt: &[u32], hint: Option<&str>) -> reqwest::Response {
    let body = json!({"model": world.model(), "prompt": prompt, "max_tokens": 2});
    let request = world.client.post(world.gateway.url("/v1/completions")).json(&body);
    hint.iter()
        .fold(request, |request, hint| request.header("x-moongate-return", *hint))
        .send()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn hints_of_clients_and_responses_reach_the_master() {
    let master = start_http_master(None).await;
    let admin = master.services.admin.to_string();
    let world = start_fleet_with_store(&admin, &[]).await;
    let prompt = prompt(1, 10);
    for hint in [None, Some("never"), Some("soon"), Some("30")] {
        assert_eq!(complete(&world, &prompt, hint).await.status(), 200, "{hint:?}");
    }
    let mut kept = json!({"model": world.model(), "prompt": prompt, "max_tokens": 2});
    kept["prompt_cache_retention"] = json!("24h");
    assert_eq!(world.post("/v1/completions", kept.to_string()).await.status(), 200);
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    let message = json!({"role": "user", "content": "call_tool"});
    let chat = json!({"model": world.model(), "messages": [message], "tools": [tool], "stream": true});
    let response = world.post("/v1/chat/completions", chat.to_string()).await.text().await.unwrap();
    assert!(response.contains("tool_calls"), "{response}");
    wait_for_metric(&world, r#"moongate_prompt_reports_total{outcome="sent"}"#, |sent| sent == 5).await;
    let metrics =
        world.client.get(format!("http://{admin}/metrics")).send().await.unwrap().text().await.unwrap();
    for line in ["never\"} 1", "expected\"} 4", "unknown\"} 0"] {
        let line = format!("moongate_master_described_prompts_total{{returns=\"{line}\n");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    let hints =
        world.client.get(world.gateway.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
    for line in [
        r#"moongate_return_hints_total{returns="never",source="header"} 1"#,
        r#"moongate_return_hints_total{returns="expected",source="header"} 2"#,
        r#"moongate_return_hints_total{returns="expected",source="body"} 1"#,
        r#"moongate_return_hints_total{returns="expected",source="tool_calls"} 1"#,
    ] {
        assert!(hints.contains(line), "{line} in {hints}");
    }
    // Two prompts in one request are not predicted, so their blocks are unknown.
    let two = json!({"model": world.model(), "prompt": [prompt, prompt], "max_tokens": 2});
    let request = world.client.post(world.gateway.url("/v1/completions")).json(&two);
    assert_eq!(request.header("x-moongate-return", "never").send().await.unwrap().status(), 200);
    let outcome = r#"moongate_prompt_reports_total{outcome="without_blocks"}"#;
    wait_for_metric(&world, outcome, |count| count == 1).await;
    let rejected = complete(&world, &prompt, Some("tomorrow")).await;
    assert_eq!(rejected.status(), 400);
    let error: Value = rejected.json().await.unwrap();
    assert_eq!(error["error"]["param"], "x-moongate-return", "{error}");
}

/// The keys in a report are those that engines write.
#[tokio::test(flavor = "multi_thread")]
async fn a_report_names_the_objects_of_its_prompt() {
    let master = start_http_master(None).await;
    let world = start_fleet_with_store(&master.services.admin.to_string(), &[]).await;
    let prompt = prompt(1, 10);
    let core = &master.server.master;
    let (id, now_ms, mut changes) = (Uuid { first: 1, second: 2 }, master.server.clock.now_ms(), Vec::new());
    let segment = Segment {
        id,
        name: "127.0.0.1:1",
        base: 1 << 32,
        size: 32 << 20,
        te_endpoint: "127.0.0.1:1",
        protocol: "tcp",
        host_id: "",
        locality: None,
    };
    core.mount(now_ms, &segment, id, &mut changes).unwrap();
    let context = CallContext { now_ms, client: id, tenant: DEFAULT_TENANT };
    // The last page's values have not been written.
    for key in objects(&prompt).concat().iter().take(19) {
        let config = ReplicateConfig::<&str>::default();
        core.put_start(context, &PutStartRequest { key, size: 4_096, config: &config }, &mut changes)
            .unwrap();
        core.put_end(context, &ObjectMeta { key, object_checksum: None }, ReplicaType::ALL, &mut changes)
            .unwrap();
    }
    assert!(complete(&world, &prompt, Some("never")).await.status().is_success());
    wait_for_metric(&world, r#"moongate_prompt_reports_total{outcome="sent"}"#, |sent| sent == 1).await;
    let described = master.server.counters.described_objects();
    assert_eq!(described, DescribedObjects { existing: 19, announced: 1 });
}

#[tokio::test(flavor = "multi_thread")]
async fn masters_without_the_extension_get_no_further_reports() {
    let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    let world = start_fleet_with_store(&master.admin, &[]).await;
    for number in 0..3 {
        assert_eq!(complete(&world, &prompt(number, 10), Some("never")).await.status(), 200);
        let outcome = r#"moongate_prompt_reports_total{outcome="unsupported"}"#;
        wait_for_metric(&world, outcome, |count| count == u64::from(number) + 1).await;
    }
}
