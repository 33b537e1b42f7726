//! What roles yield beyond what was recorded: every pattern and workload, and what upstream gets wrong.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use moongate_render::{
    GangScheduler, Group, Kept, Manifest, Profiles, RenderError, RoleTarget, instance, pod, ports,
};
use rbg_api::conversion::{Version, convert};
use rbg_api::v1alpha2::{RoleBasedGroup, RoleInstance, RoleInstanceSet};
use serde_json::{Value, json};

fn group(annotations: Value, spec: Value) -> RoleBasedGroup {
    serde_json::from_value(json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
        "metadata": { "name": "g", "namespace": "ns", "uid": "u", "annotations": annotations },
        "spec": spec,
    }))
    .unwrap()
}

fn template(image: &str) -> Value {
    json!({ "spec": { "containers": [{ "name": "c", "image": image }] } })
}

fn workload_with(object: &RoleBasedGroup, profiles: &Profiles, kept: &Kept) -> Result<Manifest, RenderError> {
    let role = &object.spec.roles[0];
    let group = Group::new(object, profiles, GangScheduler::default())?;
    group.role(role)?.workload(&RoleTarget::of(role), kept)
}

fn workload(object: &RoleBasedGroup) -> Result<Value, RenderError> {
    workload_with(object, &Profiles::new(), &Kept::default()).map(|manifest| Value::Object(manifest.0))
}

fn at<'a>(value: &'a Value, pointer: &str) -> &'a Value {
    value.pointer(pointer).unwrap_or(&Value::Null)
}

const TEMPLATE: &str = "/spec/roleInstanceTemplate/components/0/template";

fn in_template<'a>(workload: &'a Value, pointer: &str) -> &'a Value {
    at(at(workload, TEMPLATE), pointer)
}

#[test]
fn role_templates_are_patched() {
    let object = group(
        json!({}),
        json!({
            "roleTemplates": [{ "name": "base", "template": template("i:1") }],
            "roles": [{ "name": "r", "standalonePattern": { "templateRef": {
                "name": "base",
                "patch": { "spec": { "containers": [{ "name": "c", "image": "i:2" }, { "name": "d", "image": "j" }] } },
            } } }],
        }),
    );
    let workload = workload(&object).unwrap();
    let images: Vec<&Value> =
        in_template(&workload, "/spec/containers").as_array().unwrap().iter().map(|c| &c["image"]).collect();
    assert_eq!(images, ["i:2", "j"]);
}

#[test]
fn leader_and_workers_have_their_patches_and_services() {
    let role = |selection: Value| {
        let mut pattern = json!({
            "size": 3,
            "template": template("i"),
            "leaderTemplatePatch": { "metadata": { "labels": { "who": "leader" } } },
            "workerTemplatePatch": { "metadata": { "labels": { "who": "worker" } } },
        });
        if !selection.is_null() {
            pattern["sharedServiceSelection"] = selection;
        }
        group(json!({}), json!({ "roles": [{ "name": "r", "leaderWorkerPattern": pattern }] }))
    };
    let rendered = workload(&role(Value::Null)).unwrap();
    let components = at(&rendered, "/spec/roleInstanceTemplate/components");
    assert_eq!(at(components, "/0/template/metadata/labels/who"), "leader");
    assert_eq!(at(components, "/1/template/metadata/labels/who"), "worker");
    assert_eq!(at(components, "/1/size"), 2);
    assert_eq!(at(components, "/1/serviceName"), &Value::Null);
    let all = workload(&role("All".into())).unwrap();
    assert_eq!(at(&all, "/spec/roleInstanceTemplate/components/1/serviceName"), "s-g-r");
}

#[test]
fn a_group_alone_in_its_topology_carries_the_label_it_asks_for() {
    for key in [rbg_api::keys::GROUP_EXCLUSIVE_TOPOLOGY, rbg_api::keys::legacy::EXCLUSIVE_TOPOLOGY] {
        let spec = |metadata: Value| {
            let mut template = template("i");
            template["metadata"] = metadata;
            json!({ "roles": [{ "name": "r", "standalonePattern": { "template": template } }] })
        };
        let workload_of = |metadata| workload(&group(json!({ key: "zone" }), spec(metadata))).unwrap();
        let rendered = workload_of(json!({}));
        let label = in_template(&rendered, "/metadata/labels/rbg.workloads.x-k8s.io~1group-unique-hash");
        let term = "/spec/affinity/podAffinity/requiredDuringSchedulingIgnoredDuringExecution/0";
        let term = in_template(&rendered, term);
        assert_eq!(term["topologyKey"], "zone");
        assert_eq!(at(term, "/labelSelector/matchExpressions/0/values/0"), label);
        assert!(label.is_string());
        let out = workload_of(
            json!({ "annotations": { rbg_api::keys::legacy::DISABLE_EXCLUSIVE_TOPOLOGY: "true" } }),
        );
        assert!(in_template(&out, "/spec/affinity").is_null());
    }
}

#[test]
fn gangs_count_every_pod() {
    let object = group(
        json!({
            rbg_api::keys::GANG_SCHEDULING: "true",
            rbg_api::keys::GANG_SCHEDULING_TIMEOUT: "90",
            rbg_api::keys::GANG_SCHEDULING_VOLCANO_QUEUE: "q",
        }),
        json!({ "roles": [
            { "name": "a", "replicas": 2, "standalonePattern": { "template": template("i") } },
            { "name": "b", "replicas": 3, "leaderWorkerPattern": { "size": 2, "template": template("i") } },
            { "name": "c", "replicas": 2, "customComponentsPattern": { "components": [
                { "name": "x", "size": 1, "template": template("i") },
                { "name": "y", "size": 4, "template": template("i") },
            ] } },
        ] }),
    );
    let profiles = Profiles::new();
    let pod_group = |scheduler| Group::new(&object, &profiles, scheduler).unwrap().pod_group().unwrap();
    let plugins = pod_group(GangScheduler::SchedulerPlugins);
    assert_eq!(plugins.0["spec"], json!({ "minMember": 18, "scheduleTimeoutSeconds": 90 }));
    assert_eq!(pod_group(GangScheduler::Volcano).0["spec"], json!({ "minMember": 18, "queue": "q" }));
    let label = "/metadata/labels/pod-group.scheduling.sigs.k8s.io~1name";
    assert_eq!(in_template(&workload(&object).unwrap(), label), "g");
}

#[test]
fn coordination_of_v1alpha1_becomes_a_policy_with_names() {
    let object = json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroup",
        "metadata": { "name": "g", "namespace": "ns", "uid": "u" },
        "spec": { "roles": [], "coordination": [{
            "name": "pd", "roles": ["a", "b"],
            "strategy": {
                "rollingUpdate": { "maxSkew": "1%" },
                "scaling": { "maxSkew": "5%", "progression": "OrderReady" },
            },
        }] },
    });
    let object: RoleBasedGroup =
        serde_json::from_value(convert(&object, Version::V1alpha2).unwrap()).unwrap();
    let profiles = Profiles::new();
    let policy = Group::new(&object, &profiles, GangScheduler::default())
        .unwrap()
        .coordinated_policy()
        .unwrap()
        .unwrap();
    assert_eq!(
        policy.0["spec"]["policies"],
        json!([{
            "name": "pd", "roles": ["a", "b"],
            "strategy": {
                "rollingUpdate": { "maxSkew": "1%" },
                "scaling": { "maxSkew": "5%", "progression": "OrderReady" },
            },
        }])
    );
    assert_eq!(policy.0["metadata"]["ownerReferences"][0].get("controller"), None);
}

#[test]
fn a_group_of_v1alpha1_has_that_eras_labels_and_names() {
    let object = json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroup",
        "metadata": { "name": "g", "namespace": "ns", "uid": "u" },
        "spec": { "roles": [
            { "name": "router", "template": template("i") },
            { "name": "store", "template": template("i"),
              "annotations": { "instance.rolebasedgroup.workloads.x-k8s.io/pattern": "Stateless" },
              "workload": { "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "InstanceSet" } },
        ] },
    });
    let object: RoleBasedGroup =
        serde_json::from_value(convert(&object, Version::V1alpha2).unwrap()).unwrap();
    let profiles = Profiles::new();
    let group = Group::new(&object, &profiles, GangScheduler::default()).unwrap();
    let rendered = |index: usize, kept: &Kept| {
        let role = &object.spec.roles[index];
        Value::Object(group.role(role).unwrap().workload(&RoleTarget::of(role), kept).unwrap().0)
    };
    let router = rendered(0, &Kept::default());
    let old = "/spec/template/metadata/labels/rolebasedgroup.workloads.x-k8s.io~1role";
    assert_eq!(at(&router, old), "router");
    assert!(at(&router, "/spec/selector/matchLabels/rolebasedgroup.workloads.x-k8s.io~1role").is_null());
    let names: Vec<&str> = at(&router, "/spec/template/spec/containers/0/env")
        .as_array()
        .unwrap()
        .iter()
        .map(|variable| variable["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["RBG_GROUP_NAME", "RBG_ROLE_INDEX", "RBG_ROLE_NAME", "GROUP_NAME", "ROLE_INDEX", "ROLE_NAME"]
    );
    let adopted = rendered(0, &Kept { legacy: Some(false), ..Kept::default() });
    assert!(at(&adopted, old).is_null(), "a StatefulSet that does without is not changed");

    let mut store = rendered(1, &Kept::default());
    assert!(!store.to_string().contains("rolebasedgroup.workloads.x-k8s.io/role\""), "not in what is hashed");
    store["metadata"]["uid"] = "s".into();
    let set: RoleInstanceSet = serde_json::from_value(store).unwrap();
    let manifest = instance::unordered(&set, "abcde", "h", "2026-01-01T00:00:00Z").unwrap();
    let instance: RoleInstance = serde_json::from_value(Value::Object(manifest.0)).unwrap();
    let component = &instance.spec.components[0];
    let pod = Value::Object(pod::pod(&instance, component, 0, "h", &pod::Placement::default()).unwrap().0);
    assert_eq!(pod["metadata"]["name"], "g-store-abcde");
    assert_eq!(pod["metadata"]["labels"]["rolebasedgroup.workloads.x-k8s.io/name"], "g");
    assert_eq!(pod["metadata"]["labels"]["rolebasedgroup.workloads.x-k8s.io/role"], "store");
    assert!(pod["spec"]["containers"][0]["env"].to_string().contains("\"INSTANCE_NAME\""));
}

#[test]
fn runtime_profiles_add_what_is_missing() {
    let object = group(
        json!({}),
        json!({ "roles": [{
        "name": "r",
        "engineRuntimes": [{ "profileName": "p", "containers": [
            { "name": "side", "args": ["--more"], "env": [{ "name": "X", "value": "1" }] },
            { "name": "c", "args": ["never"] },
        ] }],
        "standalonePattern": { "template": template("i") },
    }] }),
    );
    let profile = json!({
        "containers": [{ "name": "side", "image": "s", "args": ["--some"] }, { "name": "c", "image": "other" }],
        "initContainers": [{ "name": "init", "image": "t" }],
        "volumes": [{ "name": "v", "emptyDir": {} }],
    });
    let profiles = Profiles::from([("p".to_owned(), serde_json::from_value(profile).unwrap())]);
    let rendered = Value::Object(workload_with(&object, &profiles, &Kept::default()).unwrap().0);
    let spec = in_template(&rendered, "/spec");
    assert_eq!(at(spec, "/containers/0/image"), "i", "what the pod has by that name stays");
    assert_eq!(at(spec, "/containers/1/args"), &json!(["--some", "--more"]));
    assert!(at(spec, "/containers/1/env").to_string().contains("RBG_GROUP_NAME"));
    assert_eq!(at(spec, "/initContainers/0/name"), "init");
    assert_eq!(at(spec, "/volumes/1/name"), "v");
    assert_eq!(workload(&object), Err(RenderError::UnknownProfile { role: "r".into(), profile: "p".into() }));
}

#[test]
fn other_workloads_are_rendered() {
    let role = |kind: &str, pattern: &str| {
        group(
            json!({}),
            json!({ "roles": [{
            "name": "r", "replicas": 4,
            "annotations": { rbg_api::keys::ROLE_WORKLOAD_TYPE: kind },
            "rolloutStrategy": { "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": "50%", "partition": "30%" } },
            pattern: { "template": template("i") },
        }] }),
        )
    };
    let deployment = workload(&role("apps/v1/Deployment", "standalonePattern")).unwrap();
    assert_eq!(deployment["kind"], "Deployment");
    assert_eq!(at(&deployment, "/spec/strategy/rollingUpdate/maxUnavailable"), "50%");
    assert!(at(&deployment, "/spec/template/spec/volumes").is_null(), "no discovery file without order");
    let leaders =
        workload(&role("leaderworkerset.x-k8s.io/v1/LeaderWorkerSet", "leaderWorkerPattern")).unwrap();
    assert_eq!(leaders["apiVersion"], "leaderworkerset.x-k8s.io/v1");
    assert_eq!(at(&leaders, "/spec/leaderWorkerTemplate/restartPolicy"), "RecreateGroupOnPodRestart");
    assert_eq!(
        at(&leaders, "/spec/rolloutStrategy/rollingUpdateConfiguration/partition"),
        2,
        "30 % of 4, as a number"
    );
    assert_eq!(
        workload(&role("batch/v1/Job", "standalonePattern")),
        Err(RenderError::UnknownWorkload { role: "r".into(), kind: "batch/v1/Job".into() })
    );
}

#[test]
fn specs_that_cannot_run_are_refused_with_the_reason() {
    let of = |role: Value| workload(&group(json!({}), json!({ "roles": [role] })));
    assert_eq!(of(json!({ "name": "r" })), Err(RenderError::NoPattern("r".into())));
    assert_eq!(of(json!({ "name": "r", "standalonePattern": {} })), Err(RenderError::NoTemplate("r".into())));
    let reference = json!({ "name": "r", "standalonePattern": { "templateRef": { "name": "t" } } });
    assert_eq!(of(reference), Err(RenderError::UnknownTemplate { role: "r".into(), template: "t".into() }));
    let stuck = json!({
        "name": "r", "standalonePattern": { "template": template("i") },
        "rolloutStrategy": { "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": 0, "maxSurge": "0%" } },
    });
    assert_eq!(of(stuck), Err(RenderError::NoProgress("r".into())));
}

#[test]
fn components_learn_ports_and_addresses_of_each_other() {
    let allocate = |name: &str, env: &str, scope: &str| {
        json!({ "allocations": [{ "name": name, "env": env, "scope": scope }] }).to_string()
    };
    let refer = json!({
        "portRefs": [
            { "env": "LEADER_PORT", "component": "leader", "portName": "grpc" },
            { "env": "WORKER_1_PORT", "component": "worker", "portName": "grpc", "index": 1 },
        ],
        "addressRefs": [{ "env": "LEADER_ADDR", "component": "leader", "index": 0 }],
    });
    let instance: RoleInstance = serde_json::from_value(json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleInstance",
        "metadata": {
            "name": "g-r-0", "namespace": "ns", "uid": "u",
            "labels": { rbg_api::keys::ROLE_TYPE: "Components", rbg_api::keys::ROLE_INSTANCE_INDEX: "0" },
            "annotations": { "leader.grpc": "30001", "g-r-0-worker-0.grpc": "30002", "g-r-0-worker-1.grpc": "30003" },
        },
        "spec": { "components": [
            { "name": "leader", "serviceName": "s", "template": template("i"),
              "annotations": { rbg_api::keys::PORT_ALLOCATOR: allocate("grpc", "PORT", "RoleScoped") } },
            { "name": "worker", "size": 2, "serviceName": "s", "template": template("i"),
              "annotations": {
                  rbg_api::keys::PORT_ALLOCATOR: allocate("grpc", "PORT", "PodScoped"),
                  rbg_api::keys::COMPONENT_DISCOVERY: refer.to_string(),
              } },
        ] },
    }))
    .unwrap();
    assert_eq!(ports::keys_of_set(&instance.spec.components[0]).unwrap(), ["leader.grpc"]);
    assert_eq!(ports::keys_of_instance(&instance).unwrap(), ["g-r-0-worker-0.grpc", "g-r-0-worker-1.grpc"]);
    let pod = pod::pod(&instance, &instance.spec.components[1], 0, "h", &pod::Placement::default()).unwrap();
    assert_eq!(pod.name(), "g-r-0-worker-0");
    let variables = &Value::Object(pod.0)["spec"]["containers"][0]["env"];
    let value = |name: &str| {
        let found = variables.as_array().unwrap().iter().find(|variable| variable["name"] == name);
        found.map(|variable| variable["value"].as_str().unwrap().to_owned())
    };
    assert_eq!(value("PORT").as_deref(), Some("30002"));
    assert_eq!(value("LEADER_PORT").as_deref(), Some("30001"));
    assert_eq!(value("WORKER_1_PORT").as_deref(), Some("30003"));
    assert_eq!(value("LEADER_ADDR").as_deref(), Some("g-r-0-leader-0.s.ns.svc.cluster.local"));
}

#[test]
fn chosen_ports_are_never_taken_ones() {
    let mut taken = BTreeSet::new();
    for pod in 0..50 {
        let port = ports::choose(30_000..30_050, &taken, &format!("pod-{pod}")).unwrap();
        assert!((30_000..30_050).contains(&port) && taken.insert(port));
    }
    assert_eq!(ports::choose(30_000..30_050, &taken, "one more"), None);
    assert_eq!(ports::choose(5..5, &BTreeSet::new(), "none"), None);
}

#[test]
fn pods_go_where_their_predecessors_were() {
    let object = group(
        json!({}),
        json!({ "roles": [{ "name": "r", "standalonePattern": { "template": template("i") } }] }),
    );
    let mut set = workload(&object).unwrap();
    set["metadata"]["uid"] = "s".into();
    let set: RoleInstanceSet = serde_json::from_value(set).unwrap();
    let manifest = instance::ordered(&set, 3, "g-r-h").unwrap();
    let instance: RoleInstance = serde_json::from_value(Value::Object(manifest.0)).unwrap();
    let placed = |placement: &pod::Placement| {
        let pod = pod::pod(&instance, &instance.spec.components[0], 0, "h", placement).unwrap();
        Value::Object(pod.0)
    };
    let placement =
        |required| pod::Placement { nodes: vec!["n1".into()], required, avoid: vec!["bad".into()] };
    let required = placed(&placement(true));
    let terms = at(
        &required,
        "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms",
    );
    assert_eq!(terms.as_array().unwrap().len(), 1);
    assert_eq!(at(terms, "/0/matchExpressions/0/key"), "bad");
    assert_eq!(at(terms, "/0/matchExpressions/1/values/0"), "n1");
    let preferred = placed(&placement(false));
    let weight = "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution/0/weight";
    assert_eq!(at(&preferred, weight), 100);
    assert_eq!(at(&required, "/metadata/labels/rbg.workloads.x-k8s.io~1role-instance-index"), "3");
    assert!(placed(&pod::Placement::default())["spec"].get("affinity").is_none());
}

#[test]
fn the_discovery_file_names_pods_that_exist() {
    let object = group(
        json!({}),
        json!({ "roles": [
        { "name": "c", "replicas": 1, "customComponentsPattern": { "components": [
            { "name": "x", "template": template("i") },
            { "name": "y", "size": 2, "serviceName": "own", "template": template("i") },
        ] }, "servicePorts": [{ "name": "H-ttp", "port": 80 }, { "port": 81 }] },
        { "name": "s", "standalonePattern": { "template": template("i") }, "replicas": 9,
          "annotations": { rbg_api::keys::ROLE_INSTANCE_PATTERN: "Stateless" } },
    ] }),
    );
    let profiles = Profiles::new();
    let file = Group::new(&object, &profiles, GangScheduler::default())
        .unwrap()
        .config_map(&BTreeMap::new(), &BTreeMap::new())
        .unwrap();
    let text = Value::Object(file.unwrap().0)["data"]["config.yaml"].as_str().unwrap().to_owned();
    let file: Value = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(
        file,
        json!({
            "group": { "name": "g", "roles": ["c"], "size": 12 },
            "roles": { "c": { "size": 1, "instances": [{
                "address": "g-c-0-x-0.s-g-c",
                "pods": ["g-c-0-x-0.s-g-c", "g-c-0-y-0.own", "g-c-0-y-1.own"],
                "ports": { "h_ttp": 80, "port81": 81 },
            }] } },
        })
    );
    let config = serde_saphyr::from_str::<rbg_api::ClusterFile>(&text).unwrap().resolve().unwrap();
    assert_eq!(config.roles[0].instances[0].address, "g-c-0-x-0.s-g-c");
}
