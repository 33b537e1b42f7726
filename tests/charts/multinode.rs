//! Engines that span several machines.

use serde_json::{Value, json};

use super::rendered::{Rendered, rejected};

fn pattern(engine: &str) -> Value {
    let values = format!("--set=engines.large.engine={engine},engines.large.model=m,engines.large.nodes=2");
    let sizes = "--set=engines.large.tensorParallel=16,engines.large.args[0]=--own";
    let rendered = Rendered::with(&[&values, sizes]);
    let role = rendered.role("large");
    assert!(role.get("standalonePattern").is_none());
    role["leaderWorkerPattern"].clone()
}

fn arguments(container: &Value) -> Vec<&str> {
    container["args"].as_array().unwrap().iter().map(|argument| argument.as_str().unwrap()).collect()
}

#[test]
fn an_engine_on_several_machines_has_a_leader_and_workers() {
    let pattern = pattern("vllm");
    assert_eq!(pattern["size"], 2);
    let common = &pattern["template"]["spec"];
    let container = &common["containers"][0];
    for flag in [
        "--tensor-parallel-size=16",
        "--nnodes=2",
        "--node-rank=$(RBG_LWP_WORKER_INDEX)",
        "--master-addr=$(RBG_LWP_LEADER_ADDRESS)",
        "--own",
    ] {
        assert!(arguments(container).contains(&flag), "{flag}");
    }
    let variables = container["env"].as_array().unwrap();
    assert!(variables.contains(&json!({ "name": "VLLM_HOST_IP", "value": "$(POD_IP)" })));
    let leader = &pattern["leaderTemplatePatch"]["spec"]["containers"][0];
    let worker = &pattern["workerTemplatePatch"]["spec"]["containers"][0];
    assert_eq!([&container["name"], &leader["name"], &worker["name"]], ["engine"; 3]);
    assert_eq!(arguments(worker), [&arguments(container)[..], &["--headless"]].concat());
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        assert!(container.get(probe).is_none() && worker.get(probe).is_none(), "workers have no server");
        assert_eq!(leader[probe]["httpGet"]["path"], "/health");
    }
    let labels = &pattern["workerTemplatePatch"]["metadata"]["labels"];
    assert_eq!(*labels, json!({ "app.kubernetes.io/component": "engine-worker" }));
}

#[test]
fn engines_of_each_mode_can_span_several_machines() {
    for (engine, mode, flag) in [
        ("sglang", "prefill", "--disaggregation-mode=prefill"),
        ("sglang", "decode", "--disaggregation-mode=decode"),
        ("sglang", "plain", "--nnodes=3"),
        ("vllm,engines.large.connector=nixl", "prefill", "--kv-transfer-config="),
        ("vllm,engines.large.connector=nixl", "decode", "--kv-transfer-config="),
        ("vllm", "plain", "--nnodes=3"),
    ] {
        let values = format!("--set=engines.large.nodes=3,engines.large.model=m,engines.large.mode={mode}");
        let rendered = Rendered::with(&[&values, &format!("--set=engines.large.engine={engine}")]);
        let pattern = &rendered.role("large")["leaderWorkerPattern"];
        assert_eq!(pattern["size"], 3, "{engine} {mode}");
        let flags = arguments(&pattern["template"]["spec"]["containers"][0]);
        assert!(flags.iter().any(|argument| argument.starts_with(flag)), "{engine} {mode}: {flags:?}");
        let component =
            |part: &str| pattern[part]["metadata"]["labels"]["app.kubernetes.io/component"].clone();
        assert_eq!([component("template"), component("workerTemplatePatch")], ["engine", "engine-worker"]);
    }
}

#[test]
fn workers_stay_until_their_leader_has_drained() {
    let pattern = pattern("sglang");
    let common = &pattern["template"]["spec"];
    assert_eq!(common["terminationGracePeriodSeconds"], 330);
    assert!(common.get("initContainers").is_none());
    let script = |patch: &str| {
        let container = &pattern[patch]["spec"]["containers"][0];
        container["lifecycle"]["preStop"]["exec"]["command"][2].as_str().unwrap().to_owned()
    };
    assert!(script("leaderTemplatePatch").contains("(\"127.0.0.1\", 9400,"));
    assert!(script("workerTemplatePatch").contains("(os.environ[\"RBG_LWP_LEADER_ADDRESS\"], 9400,"));
    let sidecars = &pattern["leaderTemplatePatch"]["spec"]["initContainers"];
    assert_eq!(sidecars[0]["name"], "moongate-sidecar");
    assert!(pattern["workerTemplatePatch"]["spec"].get("initContainers").is_none());
    let address = "--dist-init-addr=$(RBG_LWP_LEADER_ADDRESS):20000";
    assert!(arguments(&common["containers"][0]).contains(&address));
    assert!(pattern["workerTemplatePatch"]["spec"]["containers"][0].get("args").is_none());
}

#[test]
fn simulated_engines_have_one_machine() {
    let message = rejected(&["--set=engines.large.engine=simulated,engines.large.nodes=2"]);
    assert!(message.contains("engines.large.nodes: a simulated engine has one machine"), "{message}");
    let rendered = Rendered::with(&["--set=engines.one.engine=vllm,engines.one.model=m,engines.one.nodes=1"]);
    assert!(rendered.role("one").get("leaderWorkerPattern").is_none());
}
