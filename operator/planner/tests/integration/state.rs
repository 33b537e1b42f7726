//! What survives a restart, and a change of the file.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::scripted_gateway::GatewayLoad;
use super::test_planner::{DECODE, PREFILL, QUIET, TestCluster, eventually};

fn configs(cluster: &TestCluster) -> Api<ConfigMap> {
    Api::default_namespaced(cluster.namespace.client.clone())
}

fn config_name(cluster: &TestCluster) -> String {
    format!("moongate-planner.{}.llama", cluster.namespace.name)
}

async fn stored_state(cluster: &TestCluster) -> Value {
    let config = configs(cluster).get(&config_name(cluster)).await.unwrap();
    serde_json::from_str(&config.data.unwrap()["state.json"]).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_learned_survives_a_restart() {
    let cluster = TestCluster::new("state", GatewayLoad { busy_prefill_engines: 1, ..QUIET }).await;
    cluster.create_engines("prefill", 1).await;
    cluster.create_engines("decode", 1).await;
    cluster.write_file(PREFILL, DECODE);
    let planner = cluster.start_planner(false);
    let forecast =
        |plan: &Value| plan["decision"]["prefill"]["explanation"]["forecast_tokens_per_s"].as_f64();
    planner.wait_for_plan("a forecast", forecast).await;
    planner.wait_for_steps(5).await;
    planner.stop().await;
    let first = stored_state(&cluster).await;

    // Without any metric, the forecast can only be that of before.
    cluster.gateway.set(GatewayLoad { is_failing: true, ..QUIET });
    let planner = cluster.start_planner(false);
    planner.wait_for_plan("a forecast from the stored state", forecast).await;
    planner.stop().await;
    assert_ne!(stored_state(&cluster).await, first, "the time of the last step");

    let damaged = json!({ "data": { "state.json": "{\"prefill\": 3" } });
    let patch = PatchParams::default();
    configs(&cluster).patch(&config_name(&cluster), &patch, &Patch::Merge(damaged)).await.unwrap();
    let planner = cluster.start_planner(false);
    let decision =
        planner.wait_for_plan("a decision", |plan| plan["decision"].is_object().then(|| plan.clone())).await;
    assert_eq!(forecast(&decision), None, "nothing is known");
    let failures = "moongate_planner_state_failures_total{";
    let metrics = planner.metrics().await;
    let counted = metrics.lines().find(|line| line.starts_with(failures)).unwrap();
    assert!(counted.ends_with("outcome=\"damaged\"} 1"), "{counted}");
    planner.stop().await;
    assert!(stored_state(&cluster).await.is_object(), "replaced");
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_file_changes_what_is_scaled() {
    let cluster = TestCluster::new("reload", QUIET).await;
    cluster.create_engines("prefill", 1).await;
    cluster.create_engines("decode", 1).await;
    cluster.write_file(PREFILL, DECODE);
    let planner = cluster.start_planner(true);
    let targets = |plan: &Value| Some(plan["roles"]["prefill"]["target"].as_str()?.to_owned());
    assert_eq!(planner.wait_for_plan("a decision", targets).await, PREFILL);
    let reloads = async |result: &str| {
        let metrics = planner.metrics().await;
        metrics
            .contains(&format!("moongate_planner_deployments_reloads_total{{result=\"{result}\"}} 1\n"))
            .then_some(())
    };

    std::fs::write(cluster.file(), "deployments: [{ name: llama }]").unwrap();
    eventually("the file is rejected", async || reloads("invalid").await).await;
    planner.wait_for_steps(1).await;

    cluster.write_file(DECODE, PREFILL);
    eventually("the file is read", async || reloads("ok").await).await;
    planner.wait_for_plan("the new target", |plan| targets(plan).filter(|target| target == DECODE)).await;

    std::fs::write(cluster.file(), "deployments: []").unwrap();
    eventually("the deployment is gone", async || planner.plan().await.is_null().then_some(())).await;
    assert!(!planner.metrics().await.contains("llama"));
    planner.stop().await;
    cluster.end().await;
}
