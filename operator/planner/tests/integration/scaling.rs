//! Which scale subresources the planner writes, and when.

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use rbg_api::v1alpha2::RoleBasedGroupScalingAdapter;
use serde_json::json;

use super::scripted_gateway::GatewayLoad;
use super::test_planner::{DECODE, PREFILL, QUIET, TestCluster, TestPlanner, eventually};

/// Prompts that keep one prefill engine busy all the time, and tokens for one decode engine.
const MANY_PROMPTS: GatewayLoad =
    GatewayLoad { requests_per_s: 8.0, prompt_tokens: 500.0, busy_prefill_engines: 1, ..QUIET };

async fn wait_for_wanted(planner: &TestPlanner, role: &'static str, is_wanted: impl Fn(u64) -> bool) -> u64 {
    planner
        .wait_for_plan(role, |plan| {
            plan["roles"][role]["wanted"].as_u64().filter(|wanted| is_wanted(*wanted))
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_role_whose_demand_rises_is_scaled() {
    let cluster = TestCluster::new("demand", QUIET).await;
    cluster.create_engines("prefill", 1).await;
    cluster.create_engines("decode", 1).await;
    cluster.write_file(PREFILL, DECODE);
    let planner = cluster.start_planner(false);
    planner.wait_for_plan("a decision", |plan| plan["decision"].is_object().then_some(())).await;
    planner.wait_for_steps(3).await;
    assert!(planner.is_ready().await);
    assert_eq!([cluster.replicas("prefill").await, cluster.replicas("decode").await], [1, 1]);

    cluster.gateway.set(MANY_PROMPTS);
    eventually("prefill is scaled", async || (cluster.replicas("prefill").await >= 2).then_some(())).await;
    let metrics = planner.metrics().await;
    assert!(metrics.contains("role=\"prefill\",result=\"written\""), "{metrics}");
    assert!(!metrics.contains("role=\"decode\",result="), "decode was not written: {metrics}");
    assert_eq!(cluster.replicas("decode").await, 1);
    // The pods of new engines are recognized.
    planner
        .wait_for_plan("the new engines are ready", |plan| {
            (plan["input"]["prefill_replicas"]["ready"].as_u64() >= Some(2)).then_some(())
        })
        .await;
    planner.stop().await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_without_metrics_never_removes_engines() {
    let cluster = TestCluster::new("missing", GatewayLoad { is_failing: true, ..QUIET }).await;
    cluster.create_engines("prefill", 4).await;
    cluster.create_engines("decode", 4).await;
    cluster.write_file(PREFILL, DECODE);
    let planner = cluster.start_planner(false);
    for _ in 0..8 {
        let (wanted, reason, missing) = planner
            .wait_for_plan("a decision", |plan| {
                let prefill = &plan["decision"]["prefill"];
                let explanation = &prefill["explanation"];
                Some((
                    prefill["wanted"].as_u64()?,
                    explanation["reason"].clone(),
                    explanation["missing"].clone(),
                ))
            })
            .await;
        assert!(wanted >= 4, "{reason} {missing}");
        assert!(missing.as_array().is_some_and(|missing| !missing.is_empty()), "{missing}");
    }
    let plan = planner.plan().await;
    let unreachable = plan["unreachable_gateways"].to_string();
    assert!(unreachable.contains("HTTP 500"), "{unreachable}");
    assert!(planner.metrics().await.contains("moongate_planner_scrape_failures_total{"));
    assert_eq!([cluster.replicas("prefill").await, cluster.replicas("decode").await], [4, 4]);

    // With metrics, the same load does not need them.
    cluster.gateway.set(GatewayLoad {
        prefill_engines: 4,
        busy_prefill_engines: 1,
        decode_engines: 4,
        ..QUIET
    });
    eventually("prefill is scaled down", async || (cluster.replicas("prefill").await < 4).then_some(()))
        .await;
    planner.stop().await;
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_decides_and_writes_nothing() {
    let cluster = TestCluster::new("dry-run", MANY_PROMPTS).await;
    cluster.create_engines("prefill", 1).await;
    cluster.create_engines("decode", 1).await;
    cluster.write_file(PREFILL, DECODE);
    let planner = cluster.start_planner(true);
    let wanted = wait_for_wanted(&planner, "prefill", |wanted| wanted >= 2).await;
    let plan = planner.plan().await;
    assert_eq!((&plan["dry_run"], &plan["roles"]["prefill"]["result"]), (&json!(true), &json!("dry_run")));
    let metrics = planner.metrics().await;
    let sample = |name: &str, value: u64| {
        let namespace = &cluster.namespace.name;
        format!("{name}{{target_namespace=\"{namespace}\",deployment=\"llama\",role=\"prefill\"}} {value}\n")
    };
    assert!(metrics.contains(&sample("moongate_planner_current_replicas", 1)), "{metrics}");
    assert!(metrics.contains("moongate_planner_dry_run 1\n"), "wanted {wanted}: {metrics}");
    planner.stop().await;
    assert_eq!(cluster.replicas("prefill").await, 1);
    let configs: Api<ConfigMap> = Api::default_namespaced(cluster.namespace.client.clone());
    let configs = configs.list(&ListParams::default()).await.unwrap().items;
    let names: Vec<_> = configs.iter().filter_map(|config| config.metadata.name.as_deref()).collect();
    assert!(!names.iter().any(|name| name.starts_with("moongate-planner")), "{names:?}");
    cluster.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scaling_adapter_of_a_group_is_scaled() {
    let cluster = TestCluster::new("adapter", MANY_PROMPTS).await;
    let client = cluster.namespace.client.clone();
    install_adapters(&client).await;
    cluster.create_engines("prefill", 1).await;
    cluster.create_engines("decode", 1).await;
    // The status is what the operator writes.
    let adapters: Api<RoleBasedGroupScalingAdapter> = Api::default_namespaced(client);
    let adapter = json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha2",
        "kind": "RoleBasedGroupScalingAdapter",
        "metadata": { "name": "llama-prefill" },
        "spec": { "replicas": 1, "scaleTargetRef": { "name": "llama", "role": "prefill" } },
    });
    adapters.create(&PostParams::default(), &serde_json::from_value(adapter).unwrap()).await.unwrap();
    let target = "rolebasedgroupscalingadapters.v1alpha2.workloads.x-k8s.io/llama-prefill";
    cluster.write_file(target, DECODE);
    let planner = cluster.start_planner(false);
    let problem =
        planner.wait_for_plan("a problem", |plan| plan["problem"].as_str().map(str::to_owned)).await;
    assert_eq!(
        problem,
        format!("the scale subresource of {target} has no selector yet; its controller writes it")
    );
    assert!(planner.is_ready().await, "a restart would not help");

    let status = json!({ "status": { "replicas": 1, "readyReplicas": 1, "selector": "engine=prefill" } });
    adapters.patch_status("llama-prefill", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    eventually("the adapter is scaled", async || {
        let adapter = adapters.get("llama-prefill").await.unwrap();
        (adapter.spec.replicas >= Some(2)).then_some(())
    })
    .await;
    assert_eq!(cluster.replicas("prefill").await, 1, "that is the operator's task");
    planner.stop().await;
    cluster.end().await;
}

async fn install_adapters(client: &kube::Client) {
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    let adapters = rbg_api::crds::all().into_iter().find(|definition| {
        definition.metadata.name.as_deref() == Some("rolebasedgroupscalingadapters.workloads.x-k8s.io")
    });
    let adapters = adapters.unwrap();
    let name = adapters.metadata.name.clone().unwrap();
    definitions.create(&PostParams::default(), &adapters).await.unwrap();
    eventually("adapters are served", async || {
        let status = definitions.get(&name).await.unwrap().status.unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        conditions.iter().any(|one| one.type_ == "Established" && one.status == "True").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_something_else_scales_is_left_alone() {
    let cluster = TestCluster::new("external", QUIET).await;
    cluster.create_engines("prefill", 1).await;
    cluster.create_engines("decode", 1).await;
    cluster.write_file(PREFILL, DECODE);
    let planner = cluster.start_planner(false);
    planner.wait_for_plan("a decision", |plan| plan["decision"].is_object().then_some(())).await;
    cluster.gateway.set(GatewayLoad { is_failing: true, ..QUIET });
    let body = json!({ "spec": { "replicas": 3 } });
    cluster.deployments().patch_scale("prefill", &PatchParams::default(), &Patch::Merge(body)).await.unwrap();
    planner
        .wait_for_plan("the change is observed", |plan| {
            (plan["roles"]["prefill"]["replicas"] == 3 && plan["input"]["prefill_replicas"]["ready"] == 3)
                .then_some(())
        })
        .await;
    planner.wait_for_steps(3).await;
    assert_eq!(cluster.replicas("prefill").await, 3);
    planner.stop().await;
    cluster.end().await;
}
