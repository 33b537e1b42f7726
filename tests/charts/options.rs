//! Options of all components: evictions, spreading, additions to pods, and additional objects.

use serde_json::{Value, json};

use super::rendered::{Rendered, container, pod};

/// A release with every kind of pod.
const ALL: &str =
    "--set=store.enabled=true,store.master.shards=2,engines.worker.engine=vllm,engines.worker.model=m";
/// Values of each component, its role or Deployment, and its container.
const COMPONENTS: [(&str, &str, &str); 6] = [
    ("gateway", "release-gateway", "gateway"),
    ("operator", "release-operator", "operator"),
    ("store.master", "mooncake-master-1", "master"),
    ("store.router", "mooncake-router", "router"),
    ("store.nodes", "mooncake-store", "store"),
    ("engines.worker", "worker", "engine"),
];

/// The pod's spec of a role or Deployment.
fn spec<'r>(rendered: &'r Rendered, name: &str) -> &'r Value {
    match rendered.find("Deployment", name) {
        Some(deployment) => &deployment["spec"]["template"]["spec"],
        None => &pod(rendered.role(name))["spec"],
    }
}

fn named<'v>(list: &'v Value, name: &str) -> &'v Value {
    let found = list.as_array().and_then(|list| list.iter().find(|entry| entry["name"] == name));
    found.unwrap_or_else(|| panic!("no {name} in {list}"))
}

#[test]
fn prefills_and_decodes_are_updated_in_proportion() {
    let pair = "--set=engines.p.engine=simulated,engines.p.mode=prefill,engines.d.engine=simulated,engines.d.mode=decode";
    let policies = |more: &str| {
        let rendered = Rendered::with(&[pair, more]);
        rendered.find("CoordinatedPolicy", "release").map(|policy| policy["spec"]["policies"].clone())
    };
    let update = json!({ "rollingUpdate": { "maxSkew": "10%" } });
    let pairs = json!({ "name": "pairs", "roles": ["p", "d"], "strategy": update });
    assert_eq!(policies("--set=store.enabled=false"), Some(json!([pairs])));
    assert_eq!(policies("--set=coordinatePairs=false"), None);
    let own = policies("--set-json=coordination=[{\"name\":\"own\",\"roles\":[\"p\"],\"strategy\":{}}]");
    assert_eq!(own, Some(json!([{ "name": "own", "roles": ["p"], "strategy": {} }, pairs])));
    let plain = Rendered::with(&["--set=engines.w.engine=simulated"]);
    assert!(plain.find("CoordinatedPolicy", "release").is_none());
}

#[test]
fn every_component_takes_the_same_additions_to_its_pods() {
    for (values, name, container) in COMPONENTS {
        let additions = json!({
            "env": [{ "name": "OWN", "value": "1" }],
            "volumeMounts": [{ "name": "own", "mountPath": "/own" }],
            "securityContext": { "runAsUser": 7 },
            "extraContainers": [{ "name": "own", "image": "own" }],
            "pod": {
                "volumes": [{ "name": "own", "emptyDir": {} }],
                "securityContext": { "fsGroup": 8 },
                "priorityClassName": "high",
            },
        });
        let mut all = Vec::from([ALL.to_owned()]);
        for (key, value) in additions.as_object().unwrap() {
            all.push(format!("--set-json={values}.{key}={value}"));
        }
        let rendered = Rendered::with(&all.iter().map(String::as_str).collect::<Vec<_>>());
        let spec = spec(&rendered, name);
        let own = named(&spec["containers"], container);
        assert_eq!(named(&own["env"], "OWN")["value"], "1", "{values}");
        assert_eq!(named(&own["volumeMounts"], "own")["mountPath"], "/own", "{values}");
        assert_eq!(own["securityContext"]["runAsUser"], 7, "{values}");
        assert_eq!(named(&spec["containers"], "own")["image"], "own", "{values}");
        assert_eq!(named(&spec["volumes"], "own")["emptyDir"], json!({}), "{values}");
        assert_eq!(spec["securityContext"]["fsGroup"], 8, "{values}");
        assert_eq!(spec["priorityClassName"], "high", "{values}");
        if values != "engines.worker" {
            assert_eq!(spec["securityContext"]["runAsNonRoot"], true, "merged with that of {values}");
            assert_eq!(own["securityContext"]["readOnlyRootFilesystem"], true, "{values}");
        }
    }
}

#[test]
fn evictions_of_engines_are_limited_on_request() {
    let replicas = "--set=engines.worker.replicas=3";
    let name = "release-engine-worker";
    assert!(Rendered::with(&[ALL, replicas]).find("PodDisruptionBudget", name).is_none());
    let limited = "--set=podDisruptionBudgets.engines=true";
    let rendered = Rendered::with(&[ALL, replicas, limited]);
    let spec = &rendered.object("PodDisruptionBudget", name)["spec"];
    assert_eq!(spec["minAvailable"], 2);
    assert_eq!(spec["selector"]["matchLabels"]["rbg.workloads.x-k8s.io/role-name"], "worker");
    let scaled = "--set=engines.worker.autoscaling.enabled=true,engines.worker.autoscaling.minReplicas=5,\
                  engines.worker.autoscaling.maxReplicas=9";
    let rendered = Rendered::with(&[ALL, limited, scaled]);
    assert_eq!(rendered.object("PodDisruptionBudget", name)["spec"]["minAvailable"], 4);
    assert!(Rendered::with(&[ALL, limited]).find("PodDisruptionBudget", name).is_none(), "a single engine");
}

#[test]
fn engines_of_a_role_are_spread() {
    let own = r#"--set-json=engines.worker.topologySpread=[{"topologyKey":"zone"},{"topologyKey":"host","maxSkew":2}]"#;
    let rendered = Rendered::with(&[ALL, own]);
    let constraints = &spec(&rendered, "worker")["topologySpreadConstraints"];
    let labels = &constraints[0]["labelSelector"]["matchLabels"];
    assert_eq!(labels["rbg.workloads.x-k8s.io/role-name"], "worker");
    assert_eq!(labels["app.kubernetes.io/instance"], "release");
    assert_eq!(
        [&constraints[0]["maxSkew"], &constraints[0]["whenUnsatisfiable"], &constraints[1]["maxSkew"]],
        [&json!(1), &json!("ScheduleAnyway"), &json!(2)]
    );
    let rendered = Rendered::with(&[ALL]);
    assert!(spec(&rendered, "worker").get("topologySpreadConstraints").is_none());
    assert!(container(rendered.role("worker")).get("securityContext").is_none());
}

#[test]
fn only_operators_and_workers_reach_the_sidecars_of_engines() {
    let policies = "--set=networkPolicies.enabled=true";
    let operators = r#"--set-json=networkPolicies.operators=[{"namespaceSelector":{}}]"#;
    let ingress = |values: &[&str]| {
        let rendered = Rendered::with(&[&[ALL, policies], values].concat());
        let spec = &rendered.object("NetworkPolicy", "release-engine")["spec"];
        assert_eq!(spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"], "engine");
        let group = &rendered.object("NetworkPolicy", "release-group")["spec"]["podSelector"];
        assert_eq!(group["matchExpressions"][0]["values"], json!(["engine"]), "it allows all ports");
        spec["ingress"].clone()
    };
    // Number of peers that each rule allows to connect to the port.
    let peers_at = |ingress: &Value, port: u64| -> Vec<usize> {
        let includes = |entry: &Value| {
            let first = entry["port"].as_u64();
            let last = entry["endPort"].as_u64().or(first);
            entry["protocol"] == "TCP" && first <= Some(port) && Some(port) <= last
        };
        let rules = ingress.as_array().unwrap().iter();
        let rules = rules.filter(|rule| rule["ports"].as_array().unwrap().iter().any(includes));
        rules.map(|rule| rule["from"].as_array().unwrap().len()).collect()
    };
    let own = ingress(&[]);
    for port in [1, 8000, 9399, 9401, 20000, 65535] {
        assert_eq!(peers_at(&own, port), [1], "pods of the release: {port}");
    }
    assert_eq!(peers_at(&own, 9400), [2], "the operator, and workers of the engine");
    assert_eq!(peers_at(&ingress(&[operators]), 9400), [3]);
    assert_eq!(peers_at(&ingress(&["--set=operator.enabled=false"]), 9400), [1]);
    let rendered = Rendered::with(&[ALL, policies, "--set=engineDrain.enabled=false"]);
    assert!(rendered.find("NetworkPolicy", "release-engine").is_none(), "there are no sidecars");
    let group = &rendered.object("NetworkPolicy", "release-group")["spec"]["podSelector"];
    assert!(group.get("matchExpressions").is_none());
}

#[test]
fn additional_objects_are_part_of_the_release() {
    let objects = json!([
        { "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "{{ .Release.Name }}-own" } },
        "apiVersion: v1\nkind: Secret\nmetadata: { name: {{ include \"moongate.name\" . }}-text }",
    ]);
    let rendered = Rendered::with(&[&format!("--set-json=extraObjects={objects}")]);
    rendered.object("ConfigMap", "release-own");
    rendered.object("Secret", "release-text");
}
