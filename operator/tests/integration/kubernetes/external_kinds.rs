//! Kinds of other projects, and scheduling of a group's pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use moongate_operator::{GangScheduler, ResourceKind};
use moongate_testkit::{ControlPlane, NoopRuntime};
use rbg_api::v1alpha2::{CoordinatedPolicy, RoleBasedGroup};
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{eventually, group, nodes, pods, role, settled};

/// Installs a CRD without validation for a kind.
pub(crate) async fn define(client: &Client, kind: ResourceKind) {
    let any = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    define_with(client, kind, any).await;
}

async fn define_with(client: &Client, kind: ResourceKind, schema: Value) {
    let resource = kind.resource();
    let crd = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{}.{}", resource.plural, resource.group) },
        "spec": {
            "group": resource.group, "scope": "Namespaced",
            "names": { "kind": resource.kind, "plural": resource.plural },
            "versions": [{ "name": resource.version, "served": true, "storage": true,
                "schema": { "openAPIV3Schema": schema }, "subresources": { "status": {} } }],
        },
    });
    let crd: CustomResourceDefinition = serde_json::from_value(crd).unwrap();
    Api::all(client.clone()).create(&PostParams::default(), &crd).await.unwrap();
}

fn others(stage: &TestOperator, kind: ResourceKind) -> Api<DynamicObject> {
    Api::default_namespaced_with(stage.client.clone(), &kind.resource())
}

async fn live(api: &Api<DynamicObject>, name: &str) -> Value {
    let what = format!("{name} exists");
    let live = eventually(&what, async || api.get_opt(name).await.ok().flatten()).await;
    serde_json::to_value(live).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn gang_gets_a_pod_group_once_the_kind_is_served() {
    let stage = TestOperator::begin("gang").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let mut gang = group(json!([role("a", 2, "engine:1"), role("b", 1, "engine:1")]));
    let annotation = (rbg_api::keys::GANG_SCHEDULING.to_owned(), "true".to_owned());
    gang.metadata.annotations = Some([annotation].into());
    groups.create(&PostParams::default(), &gang).await.unwrap();
    eventually("the group reports the missing kind", async || {
        let status = groups.get("g").await.unwrap().status.unwrap_or_default();
        let is_it = |text: &str| text.contains("PodGroup (scheduling.x-k8s.io/v1alpha1)");
        status.conditions.iter().any(|one| one.kind == "Ready" && is_it(&one.message)).then_some(())
    })
    .await;
    assert!(pods(&stage.client).await.is_empty());

    define(&stage.client, ResourceKind::PodGroup).await;
    settled(&groups).await;
    let pod_groups = others(&stage, ResourceKind::PodGroup);
    assert_eq!(live(&pod_groups, "g").await["spec"]["minMember"], 3);
    for pod in pods(&stage.client).await {
        let labels = pod.metadata.labels.unwrap();
        let keys = [rbg_api::keys::POD_GROUP, rbg_api::keys::COSCHEDULING_POD_GROUP];
        assert_eq!(keys.map(|key| labels[key].as_str()), ["g", "g"]);
    }

    // An edit reaches the PodGroup at once: nothing polls.
    for (patch, field, value) in [
        (
            json!({ "spec": { "roles": [role("a", 3, "engine:1"), role("b", 1, "engine:1")] } }),
            "minMember",
            4,
        ),
        (
            json!({ "metadata": { "annotations": { rbg_api::keys::GANG_SCHEDULING_TIMEOUT: "90" } } }),
            "scheduleTimeoutSeconds",
            90,
        ),
    ] {
        let started = Instant::now();
        groups.patch("g", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        eventually(field, async || (live(&pod_groups, "g").await["spec"][field] == value).then_some(()))
            .await;
        let elapsed = started.elapsed();
        eprintln!("{field} reached the PodGroup after {elapsed:?}");
        assert!(elapsed < Duration::from_secs(1), "{field}: {elapsed:?}");
    }

    let none = json!({ "metadata": { "annotations": { rbg_api::keys::GANG_SCHEDULING: null } } });
    groups.patch("g", &PatchParams::default(), &Patch::Merge(none)).await.unwrap();
    eventually("gang scheduling is off", async || {
        pod_groups.get_opt("g").await.unwrap().is_none().then_some(())
    })
    .await;
    stage.end().await;
}

/// Schema of Volcano's PodGroup, of a release with `subGroupPolicy` or before.
fn volcano_schema(has_sub_groups: bool) -> Value {
    let mut spec = json!({ "minMember": { "type": "integer", "format": "int32" },
        "queue": { "type": "string" }, "priorityClassName": { "type": "string" } });
    if has_sub_groups {
        let count = json!({ "type": "integer", "format": "int32" });
        let sub_group = json!({ "type": "object", "required": ["name"], "properties": {
            "name": { "type": "string" }, "subGroupSize": count, "minSubGroups": count,
            "labelSelector": { "type": "object", "x-kubernetes-map-type": "atomic",
                "properties": { "matchLabels": { "type": "object", "additionalProperties": { "type": "string" } } } },
            "matchLabelKeys": { "type": "array", "items": { "type": "string" } } } });
        spec["subGroupPolicy"] = json!({ "type": "array", "items": sub_group });
    }
    json!({ "type": "object", "properties": { "spec": { "type": "object", "properties": spec },
        "status": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } } })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_forms_a_gang_of_volcano() {
    let plane = ControlPlane::shared().await.unwrap();
    let stage = TestOperator::begin_as(&plane, "volcano", NoopRuntime, GangScheduler::Volcano).await;
    define_with(&stage.client, ResourceKind::VolcanoPodGroup, volcano_schema(false)).await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let policies: Api<CoordinatedPolicy> = stage.api();
    let rule = |minimums: Value| {
        let gang = json!({ "scheduling": { "gang": { "minReplicas": minimums } } });
        json!({ "spec": { "policies": [{ "name": "p", "roles": ["a", "b"], "strategy": gang }] } })
    };
    let mut policy = rule(json!({ "a": 2, "b": 1 }));
    policy["metadata"] = json!({ "name": "g" });
    policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
    let roles = json!([role("a", 3, "engine:1"), role("b", 2, "engine:1"), role("c", 1, "engine:1")]);
    groups.create(&PostParams::default(), &group(roles)).await.unwrap();
    eventually("the group reports that Volcano has no sub-groups", async || {
        let status = groups.get("g").await.unwrap().status.unwrap_or_default();
        let is_it = |text: &str| text.contains("subGroupPolicy");
        status.conditions.iter().any(|one| one.kind == "Stalled" && is_it(&one.message)).then_some(())
    })
    .await;
    assert!(pods(&stage.client).await.is_empty());

    let crds = Api::<CustomResourceDefinition>::all(stage.client.clone());
    let versions = json!([{ "name": "v1beta1", "served": true, "storage": true,
        "schema": { "openAPIV3Schema": volcano_schema(true) }, "subresources": { "status": {} } }]);
    let upgrade = Patch::Merge(json!({ "spec": { "versions": versions } }));
    crds.patch("podgroups.scheduling.volcano.sh", &PatchParams::default(), &upgrade).await.unwrap();
    let pod_groups = others(&stage, ResourceKind::VolcanoPodGroup);
    assert_eq!(live(&pod_groups, "g").await["spec"]["minMember"], 3);
    // The default scheduler ignores pods that name Volcano's; the kubelet of this test binds them.
    settled(&groups).await;
    let is_member = |pod: &Pod| {
        let annotations = pod.metadata.annotations.as_ref();
        annotations.is_some_and(|all| all.contains_key(rbg_api::keys::VOLCANO_POD_GROUP))
    };
    assert_eq!(
        pods(&stage.client).await.iter().map(is_member).collect::<Vec<_>>(),
        [true, true, true, true, true, false]
    );

    for (minimums, expected) in [(json!({ "a": 3, "b": 2 }), json!([3, 2])), (json!({ "b": 1 }), json!([1]))]
    {
        let started = Instant::now();
        policies.patch("g", &PatchParams::default(), &Patch::Merge(rule(minimums))).await.unwrap();
        eventually("the policy reaches the PodGroup", async || {
            let spec = live(&pod_groups, "g").await["spec"].clone();
            let subs = spec["subGroupPolicy"].as_array().unwrap().iter();
            let minimums: Value = subs.map(|sub| sub["minSubGroups"].clone()).collect();
            let sum =
                minimums.as_array().unwrap().iter().map(|minimum| minimum.as_i64().unwrap()).sum::<i64>();
            (minimums == expected && spec["minMember"] == sum).then_some(())
        })
        .await;
        let elapsed = started.elapsed();
        eprintln!("{expected} reached the PodGroup after {elapsed:?}");
        assert!(elapsed < Duration::from_secs(1), "{elapsed:?}");
    }
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_runs_as_a_leader_worker_set() {
    let stage = TestOperator::begin("lws").await;
    define(&stage.client, ResourceKind::LeaderWorkerSet).await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let template = role("a", 2, "engine:1")["standalonePattern"]["template"].clone();
    let wanted = json!([{
        "name": "a", "replicas": 2,
        "annotations": { rbg_api::keys::ROLE_WORKLOAD_TYPE: "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet" },
        "leaderWorkerPattern": { "size": 2, "template": template },
        "scalingAdapter": { "enable": true },
    }]);
    groups.create(&PostParams::default(), &group(wanted)).await.unwrap();
    let sets = others(&stage, ResourceKind::LeaderWorkerSet);
    let set = live(&sets, "g-a").await;
    assert_eq!(
        (&set["spec"]["replicas"], &set["spec"]["leaderWorkerTemplate"]["size"]),
        (&json!(2), &json!(2))
    );
    let status = json!({ "status": { "replicas": 2, "readyReplicas": 2, "updatedReplicas": 2, "hpaPodSelector": "of=g-a" } });
    sets.patch_status("g-a", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    settled(&groups).await;
    let adapters: Api<rbg_api::v1alpha2::RoleBasedGroupScalingAdapter> = stage.api();
    eventually("the adapter has the set's selector", async || {
        let status = adapters.get("g-a").await.unwrap().status.unwrap_or_default();
        (status.selector.as_deref() == Some("of=g-a") && status.ready_replicas == Some(2)).then_some(())
    })
    .await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_with_exclusive_topology_get_separate_racks() {
    let mut stage = TestOperator::begin("exclusive").await;
    // This kubelet would bind pods to any node.
    stage.kubelet = None;
    for (rack, host) in [("x", "0"), ("x", "1"), ("y", "0"), ("y", "1")] {
        let labels = json!({ "rack": rack });
        nodes::node(&stage.client, "exclusive", &format!("{rack}{host}"), labels, 10).await;
    }
    let groups: Api<RoleBasedGroup> = stage.api();
    let mut roles = json!([role("a", 2, "engine:1"), role("b", 1, "engine:1")]);
    roles.as_array_mut().unwrap().iter_mut().for_each(|role| nodes::select(role, "exclusive"));
    for name in ["g", "h", "i"] {
        let mut one = group(roles.clone());
        one.metadata.name = Some(name.to_owned());
        let annotation = (rbg_api::keys::GROUP_EXCLUSIVE_TOPOLOGY.to_owned(), "rack".to_owned());
        one.metadata.annotations = Some([annotation].into());
        groups.create(&PostParams::default(), &one).await.unwrap();
    }
    let racks = eventually("two groups have a rack each, and the third is unschedulable", async || {
        let mut racks: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut refused = BTreeSet::new();
        for pod in pods(&stage.client).await {
            let group = pod.metadata.name.as_ref().unwrap()[..1].to_owned();
            let node = pod.spec.as_ref().unwrap().node_name.clone();
            match node {
                Some(node) => {
                    racks.entry(group).or_default().push(node.trim_end_matches(['0', '1']).to_owned());
                }
                None if is_unschedulable(&pod) => drop(refused.insert(pod.metadata.name.unwrap())),
                None => {}
            }
        }
        (racks.len() == 2 && racks.values().all(|racks| racks.len() == 3) && refused.len() == 3)
            .then_some(racks)
    })
    .await;
    let one_each: BTreeSet<BTreeSet<String>> =
        racks.into_values().map(|racks| racks.into_iter().collect()).collect();
    let rack = |name: &str| BTreeSet::from([format!("exclusive-{name}")]);
    assert_eq!(one_each, BTreeSet::from([rack("x"), rack("y")]));
    stage.end().await;
}

fn is_unschedulable(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|one| one.reason.as_deref() == Some("Unschedulable"))
}
