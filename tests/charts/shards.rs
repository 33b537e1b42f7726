//! A store with several shards: its roles and their flags, what clients connect to, and the values that it excludes.

use serde_json::{Value, json};

use super::rendered::{Rendered, container, pod, rejected};
use super::{CHART, examples, script};

/// All objects of a store with a simulated engine, which a case sets the shards of.
const STORE: &str = "--set=store.enabled=true,engines.worker.engine=simulated,networkPolicies.enabled=true,\
                     monitoring.podMonitors=true,monitoring.rules=true";

fn sharded(shards: usize, replicas: usize) -> Rendered {
    Rendered::with(&[STORE, &format!("--set=store.master.shards={shards},store.master.replicas={replicas}")])
}

fn flag<'r>(role: &'r Value, name: &str) -> Option<&'r str> {
    let arguments = container(role)["args"].as_array().unwrap().iter().map(|it| it.as_str().unwrap());
    arguments.filter_map(|it| it.strip_prefix("--")?.split_once('=')).find(|it| it.0 == name).map(|it| it.1)
}

fn ports(service: &Value) -> Vec<u64> {
    service["spec"]["ports"].as_array().unwrap().iter().map(|port| port["port"].as_u64().unwrap()).collect()
}

/// Whether the pods of a role have all labels of a selector.
fn selects(selector: &Value, role: &Value) -> bool {
    let labels = &pod(role)["metadata"]["labels"];
    let wanted = selector.as_object().unwrap();
    !wanted.is_empty() && wanted.iter().all(|(key, value)| labels[key] == *value)
}

#[test]
fn each_shard_has_a_role_with_its_own_flags() {
    let rendered = sharded(3, 1);
    let masters = ["mooncake-master-0", "mooncake-master-1", "mooncake-master-2"];
    assert_eq!(
        rendered.role_names(),
        [&masters[..], &["mooncake-router", "mooncake-store", "worker"]].concat()
    );
    for (index, name) in masters.iter().enumerate() {
        let role = rendered.role(name);
        assert_eq!(flag(role, "shard"), Some(&*format!("{index}/3")));
        assert_eq!(flag(role, "data_dir"), Some(&*format!("/var/lib/moongate/shard-{index}")));
        assert_eq!(pod(role)["spec"]["volumes"], json!([{ "name": "data", "emptyDir": {} }]));
        assert_eq!([flag(role, "enable_ha"), flag(role, "enable_kv_events")], [None, Some("true")], "{name}");
        let service = rendered.object("Service", &format!("release-master-{index}"));
        assert_eq!(ports(service), [50051, 9003, 5557]);
        let selected = masters.iter().filter(|it| selects(&service["spec"]["selector"], rendered.role(it)));
        assert_eq!(selected.collect::<Vec<_>>(), [name], "one shard per Service");
    }
    assert!(rendered.find("ServiceAccount", "release-master").is_none(), "no election with one master");
}

#[test]
fn each_shard_elects_its_own_leader() {
    let rendered = sharded(2, 3);
    for index in 0..2 {
        let role = rendered.role(&format!("mooncake-master-{index}"));
        assert_eq!(role["replicas"], 3);
        let lease = format!("here/release-master-{index}");
        assert_eq!(flag(role, "ha_backend_connstring"), Some(&*lease));
        assert_eq!(flag(role, "cluster_id"), Some(&*format!("release-{index}")));
        assert_eq!(pod(role)["spec"]["serviceAccountName"], "release-master");
        let selector = &rendered.object("Service", &format!("release-master-{index}"))["spec"]["selector"];
        assert_eq!(selector["moongate.io/shard"], index.to_string());
        assert_eq!(selector["mooncake.io/store-role"], "leader");
    }
    let rules = rendered.object("Role", "release-master")["rules"].as_array().unwrap();
    let leases = rules.iter().find(|rule| rule.get("resourceNames").is_some()).unwrap();
    assert_eq!(leases["resourceNames"], json!(["release-master-0", "release-master-1"]));
}

#[test]
fn routers_have_the_masters_in_the_order_of_shards() {
    let rendered = sharded(2, 1);
    let router = rendered.role("mooncake-router");
    let hosts = ["release-master-0.here.svc", "release-master-1.here.svc"];
    let addresses = |port: u16| hosts.map(|host| format!("{host}:{port}")).join(",");
    assert_eq!(container(router)["args"][0], "store-router");
    assert_eq!(flag(router, "shards"), Some(&*addresses(50051)));
    assert_eq!(flag(router, "shard-admins"), Some(&*addresses(9003)));
    assert_eq!(router["dependencies"], json!(["mooncake-master-0", "mooncake-master-1"]));
    assert_eq!(router["replicas"], 2);
    assert!(pod(router)["spec"]["volumes"].is_null(), "a router has no state");
    assert_eq!(container(router)["readinessProbe"]["httpGet"]["path"], "/health");
    assert_eq!(
        container(router)["livenessProbe"],
        json!({ "tcpSocket": { "port": "admin" } }),
        "no restarts because masters are down"
    );

    let values = "--set=store.master.shards=2,store.router.replicas=5,store.router.podAnnotations.a=b,\
                  store.router.resources.limits.memory=9Gi,store.router.pod.priorityClassName=high";
    let rendered = Rendered::with(&[STORE, values]);
    let router = rendered.role("mooncake-router");
    assert_eq!(router["replicas"], 5);
    assert_eq!(pod(router)["metadata"]["annotations"], json!({ "a": "b" }));
    assert_eq!(container(router)["resources"]["limits"]["memory"], "9Gi");
    assert_eq!(pod(router)["spec"]["priorityClassName"], "high");
}

#[test]
fn clients_of_several_shards_connect_to_the_routers() {
    let rendered = sharded(2, 2);
    let service = rendered.object("Service", "release-master");
    assert_eq!(ports(service), [50051, 9003]);
    let names = rendered.role_names().into_iter();
    let selected: Vec<_> =
        names.filter(|name| selects(&service["spec"]["selector"], rendered.role(name))).collect();
    assert_eq!(selected, ["mooncake-router"]);

    let (store, worker) = (rendered.role("mooncake-store"), rendered.role("worker"));
    assert_eq!(store["dependencies"], json!(["mooncake-router"]));
    assert_eq!(worker["dependencies"], json!(["mooncake-router"]));
    let variables = container(store)["env"].as_array().unwrap();
    let master = variables.iter().find(|variable| variable["name"] == "MOONCAKE_MASTER").unwrap();
    assert_eq!(master["value"], "release-master:50051");
    assert_eq!(flag(worker, "store-master"), Some("release-master:50051"));
    let config = rendered.gateway_config();
    let hosts = ["release-master-0.here.svc", "release-master-1.here.svc"];
    let admins = hosts.map(|host| format!("{host}:9003"));
    let events = hosts.map(|host| format!("tcp://{host}:5557"));
    assert!(config.contains(&format!("mooncake-admin = {}", json!(admins))), "{config}");
    assert!(config.contains(&format!("mooncake-events = {}", json!(events))), "{config}");
}

#[test]
fn budgets_policies_and_monitors_include_shards() {
    let rendered = sharded(2, 3);
    let least = |name: &str| rendered.object("PodDisruptionBudget", name)["spec"]["minAvailable"].as_u64();
    assert_eq!([least("release-master"), least("release-store-router")], [Some(5), Some(1)]);
    let policy = rendered.object("NetworkPolicy", "release-group");
    let router = rendered.role("mooncake-router");
    assert!(selects(&policy["spec"]["podSelector"]["matchLabels"], router));
    assert!(selects(&policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"], router));

    let endpoint = |name: &str| &rendered.object("PodMonitor", name)["spec"]["podMetricsEndpoints"][0];
    assert_eq!(endpoint("release-master")["relabelings"][0]["replacement"], "release-master-$1");
    let routers = endpoint("release-store-router");
    assert_eq!(routers["relabelings"][0]["replacement"], "release-store-router");
    assert_eq!(routers["metricRelabelings"][0]["regex"], "moongate_router_.+", "no sums of the masters");
    let scraped = "--set=store.master.shards=2,monitoring.annotations=true";
    let annotated = Rendered::with(&[STORE, scraped]);
    assert!(pod(annotated.role("mooncake-router"))["metadata"].get("annotations").is_none());
    assert!(!pod(annotated.role("mooncake-master-1"))["metadata"]["annotations"].is_null());

    let groups = &rendered.object("PrometheusRule", "release")["spec"]["groups"];
    assert!(groups.as_array().unwrap().iter().any(|group| group["name"] == "moongate-store-shards"));
}

#[test]
fn values_that_several_shards_exclude_are_rejected() {
    let cases = [
        ("store.authentication.secretName=store-tls", "router of several shards has no TLS"),
        ("store.master.volume.persistentVolumeClaim.claimName=c", "is for one master"),
        ("store.master.config.shard=0/2", "store.master.config.shard: "),
        ("store.master.config.cluster_id=c", "store.master.config.cluster_id: "),
        ("store.master.config.ha_backend_connstring=a/b", "store.master.config.ha_backend_connstring: "),
    ];
    for (value, reason) in cases {
        let message = rejected(&[STORE, "--set=store.master.shards=2", &format!("--set={value}")]);
        let key = value.split('=').next().unwrap().trim_end_matches(".persistentVolumeClaim.claimName");
        assert!(message.contains(reason) && message.contains(key), "{value}: {message}");
        assert!(message.contains("store.master.shards is 2"), "{value}: {message}");
        Rendered::with(&[STORE, &format!("--set={value}")]);
    }
    let own = Rendered::with(&[
        STORE,
        "--set=store.master.shards=2,store.master.volume.ephemeral.volumeClaimTemplate.spec.x=y",
    ]);
    assert!(pod(own.role("mooncake-master-1"))["spec"]["volumes"][0].get("ephemeral").is_some());
    for count in ["0", "257"] {
        assert!(rejected(&[&format!("--set=store.master.shards={count}")]).contains("shards"), "{count}");
    }
    for name in ["mooncake-router", "mooncake-master-7"] {
        let message = rejected(&[&format!("--set=engines.{name}.engine=simulated")]);
        assert!(message.contains(&format!("invalid propertyName '{name}'")), "{message}");
    }
}

/// Releases with one master, or one leader, are rendered as before there were shards.
#[test]
fn a_store_with_one_shard_has_no_router() {
    for (replicas, lease) in [(1, None), (3, Some("here/release-master"))] {
        let rendered = sharded(1, replicas);
        assert_eq!(rendered.role_names(), ["mooncake-master", "mooncake-store", "worker"]);
        let master = rendered.role("mooncake-master");
        assert_eq!(flag(master, "shard"), None);
        assert_eq!(flag(master, "data_dir"), Some("/var/lib/moongate"));
        assert_eq!(flag(master, "cluster_id"), Some("release"));
        assert_eq!(flag(master, "ha_backend_connstring"), lease);
        assert_eq!(flag(master, "enable_kv_events"), Some("true"));
        let service = rendered.object("Service", "release-master");
        assert_eq!(ports(service), [50051, 9003, 5557]);
        assert_eq!(service["spec"]["selector"]["app.kubernetes.io/component"], "master");
        assert_eq!(rendered.role("mooncake-store")["dependencies"], json!(["mooncake-master"]));
        assert!(rendered.gateway_config().contains("mooncake-events = \"tcp://release-master:5557\""));
        let endpoint = &rendered.object("PodMonitor", "release-master")["spec"]["podMetricsEndpoints"][0];
        assert_eq!(
            endpoint["relabelings"],
            json!([{ "targetLabel": "job", "replacement": "release-master" }])
        );
    }
    for example in examples().iter().filter(|path| !path.ends_with("sharded.yaml")) {
        let text =
            script("helm", &["template", "release", CHART, &format!("--values={}", example.display())]);
        for part in ["store-router", "--shard", "moongate.io/shard", "moongate-store-shards"] {
            assert!(!text.contains(part), "{part} in {}", example.display());
        }
    }
}
