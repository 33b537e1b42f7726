//! Objects of a whole group: its gang, its policy, its discovery file.

use std::collections::BTreeMap;

use moongate_render::revision::SpecRevision;
use moongate_render::{
    GangPolicy, GangScheduler, GroupContext, PreservedFields, ResolvedRole, RoleTarget, RuntimeProfiles,
    coordinated_policy, discovery_config_map, pod_group, render_workload,
};
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::keys;
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::{group, in_template, template, workload};

#[test]
fn gangs_count_every_pod() {
    let object = group(
        json!({
            keys::GANG_SCHEDULING: "true",
            keys::GANG_SCHEDULING_TIMEOUT: "90",
            keys::GANG_SCHEDULING_VOLCANO_QUEUE: "q",
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
    let profiles = RuntimeProfiles::new();
    let pod_group = |scheduler| pod_group(GroupContext::new(&object, &profiles, scheduler).unwrap()).unwrap();
    let plugins = pod_group(GangScheduler::SchedulerPlugins);
    assert_eq!(plugins.0["spec"], json!({ "minMember": 18, "scheduleTimeoutSeconds": 90 }));
    assert_eq!(pod_group(GangScheduler::Volcano).0["spec"], json!({ "minMember": 18, "queue": "q" }));
    let label = "/metadata/labels/pod-group.scheduling.sigs.k8s.io~1name";
    assert_eq!(in_template(&workload(&object).unwrap(), label), "g");
}

/// The PodGroup in upstream's proposal for per-role minimums, with a component role instead of its second leader-worker role.
#[test]
fn minimums_of_a_policy_become_sub_groups_of_instances() {
    let object = group(
        json!({ keys::GANG_SCHEDULING: "true", keys::GANG_SCHEDULING_VOLCANO_QUEUE: "default" }),
        json!({ "roles": [
            { "name": "router", "replicas": 1, "standalonePattern": { "template": template("i") } },
            { "name": "prefill", "replicas": 4, "leaderWorkerPattern": { "size": 2, "template": template("i") } },
            { "name": "decode", "replicas": 6, "customComponentsPattern": { "components": [
                { "name": "x", "size": 1, "template": template("i") },
                { "name": "y", "size": 2, "template": template("i") },
            ] } },
        ] }),
    );
    let gang = json!({ "gang": { "minReplicas": { "prefill": 2, "decode": 1 } } });
    let rule = json!({ "name": "p", "roles": ["prefill", "decode"], "strategy": { "scheduling": gang } });
    let policy = serde_json::from_value(json!({ "policies": [rule] })).unwrap();
    let gang = GangPolicy::resolve(&policy).unwrap();
    let profiles = RuntimeProfiles::new();
    let context =
        GroupContext::new(&object, &profiles, GangScheduler::Volcano).unwrap().with_gang(gang.as_ref());
    let sub_group = |role: &str, minimum: i32, size: i32| {
        let labels = json!({ keys::GROUP_NAME: "g", keys::ROLE_NAME: role });
        json!({ "name": role, "labelSelector": { "matchLabels": labels },
            "matchLabelKeys": ["rbg.workloads.x-k8s.io/role-instance-name"],
            "minSubGroups": minimum, "subGroupSize": size })
    };
    let sub_groups = [sub_group("prefill", 2, 2), sub_group("decode", 1, 3)];
    assert_eq!(
        pod_group(context).unwrap().0["spec"],
        json!({ "minMember": 2 * 2 + 3, "queue": "default", "subGroupPolicy": sub_groups })
    );
}

#[test]
fn a_group_names_its_queue_once() {
    let role = |kind: &str| {
        json!({ "name": "a", "replicas": 1, "standalonePattern": { "template": template("i") },
        "annotations": { keys::ROLE_WORKLOAD_TYPE: kind } })
    };
    let sets = "workloads.x-k8s.io/v1alpha2/RoleInstanceSet";
    let queued = |kind: &str| {
        let annotations = json!({ keys::QUEUE: "team-a", keys::GANG_SCHEDULING: "true" });
        group(annotations, json!({ "roles": [role(kind)] }))
    };
    let profiles = RuntimeProfiles::new();
    let rendered = |kind: &str, scheduler| {
        let object = queued(kind);
        let context = GroupContext::new(&object, &profiles, scheduler).unwrap();
        let role = ResolvedRole::new(context, &object.spec.roles[0]).unwrap();
        let target = RoleTarget::of(&object.spec.roles[0]);
        let workload = render_workload(&role, &target, &PreservedFields::default()).unwrap();
        (Value::Object(workload.0)["metadata"].clone(), pod_group(context).unwrap().0["spec"].clone())
    };
    let (set, pod_group) = rendered(sets, GangScheduler::SchedulerPlugins);
    assert_eq!(set["annotations"][keys::KUEUE_QUEUE], "team-a", "for its pods");
    assert!(set["labels"].get(keys::KUEUE_QUEUE).is_none() && pod_group.get("queue").is_none());
    let (stateful, _) = rendered("apps/v1/StatefulSet", GangScheduler::SchedulerPlugins);
    assert_eq!(stateful["labels"][keys::KUEUE_QUEUE], "team-a", "Kueue admits StatefulSets");
    let (set, pod_group) = rendered(sets, GangScheduler::Volcano);
    assert_eq!(
        (&set["annotations"][keys::VOLCANO_QUEUE], &pod_group["queue"]),
        (&json!("team-a"), &json!("team-a"))
    );
    assert!(set["annotations"].get(keys::KUEUE_QUEUE).is_none());
}

#[test]
fn v1alpha1_coordination_becomes_a_named_policy() {
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
        serde_json::from_value(convert(&object, ApiVersion::V1alpha2).unwrap()).unwrap();
    let profiles = RuntimeProfiles::new();
    let group = GroupContext::new(&object, &profiles, GangScheduler::default()).unwrap();
    let policy = coordinated_policy(group).unwrap().unwrap();
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
fn the_discovery_file_names_pods_that_exist() {
    let object = group(
        json!({}),
        json!({ "roles": [
        { "name": "c", "replicas": 1, "customComponentsPattern": { "components": [
            { "name": "x", "template": template("i") },
            { "name": "y", "size": 2, "serviceName": "own", "template": template("i") },
        ] }, "servicePorts": [{ "name": "H-ttp", "port": 80 }, { "port": 81 }] },
        { "name": "s", "standalonePattern": { "template": template("i") }, "replicas": 9,
          "annotations": { keys::ROLE_INSTANCE_PATTERN: "Stateless" } },
    ] }),
    );
    let profiles = RuntimeProfiles::new();
    let group = GroupContext::new(&object, &profiles, GangScheduler::default()).unwrap();
    let file = discovery_config_map(group, &BTreeMap::new(), &BTreeMap::new()).unwrap();
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
    let config = serde_saphyr::from_str::<rbg_api::DiscoveryFile>(&text).unwrap().resolve().unwrap();
    assert_eq!(config.roles[0].instances[0].address, "g-c-0-x-0.s-g-c");
}

/// A mirror changes no pods. Other fields of later releases may.
#[test]
fn mirrors_of_templates_are_in_no_revision() {
    let role = json!({ "name": "a", "standalonePattern": { "template": template("i") } });
    let revisions = |extra: Value| {
        let mut role = role.clone();
        role.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let object = group(json!({}), json!({ "roles": [role] }));
        let profiles = RuntimeProfiles::new();
        let context = GroupContext::new(&object, &profiles, GangScheduler::default()).unwrap();
        let resolved = ResolvedRole::new(context, &object.spec.roles[0]).unwrap();
        (resolved.revision(), SpecRevision::for_group("g", &object.spec, 1))
    };
    let plain = revisions(json!({}));
    let mirror = json!({ "template": template("i"), "mirroredTemplateHash": "0" });
    assert_eq!(revisions(mirror), plain);
    assert_ne!(revisions(json!({ "template": template("i") })), plain);
}
