//! Recovery from faults across roles on the control plane, with the real scheduler for lost nodes.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use moongate_testkit::{FakeKubelet, KubeletTimings};
use rbg_api::keys;
use rbg_api::v1alpha2::{CoordinatedPolicy, RoleBasedGroup, RoleInstance};
use serde_json::{Value, json};

use super::nodes::{node, select};
use super::test_operator::TestOperator;
use super::{eventually, group, is_settled, names, pods, restarts, role, settled};

async fn create_policy(stage: &TestOperator, recovery: Value) {
    let rule = json!({ "name": "pd", "roles": ["a", "b"], "strategy": { "faultRecovery": recovery } });
    let policy = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "CoordinatedPolicy",
        "metadata": { "name": "g" }, "spec": { "policies": [rule] } });
    let policy: CoordinatedPolicy = serde_json::from_value(policy).unwrap();
    stage.api::<CoordinatedPolicy>().create(&PostParams::default(), &policy).await.unwrap();
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap()
}

/// Waits until the group has recovered from a fault; returns the message of its condition.
async fn recovered(groups: &Api<RoleBasedGroup>) -> String {
    eventually("the group has recovered", async || {
        let group = groups.get("g").await.unwrap();
        let conditions = group.status.clone().unwrap_or_default().conditions;
        let condition = conditions.into_iter().find(|one| one.kind == "FaultRecovery")?;
        (condition.reason == "Recovered" && is_settled(&group)).then_some(condition.message)
    })
    .await
}

/// Waits until the operator has recorded the nodes of all instances.
async fn nodes_are_recorded(stage: &TestOperator) {
    let instances: Api<RoleInstance> = stage.api();
    eventually("nodes are recorded", async || {
        let all = instances.list(&ListParams::default()).await.unwrap().items;
        let is_recorded = |one: &RoleInstance| {
            let annotations = one.metadata.annotations.as_ref();
            annotations.is_some_and(|all| all.get(keys::FAULT).is_some_and(|text| text.contains("\"nodes\"")))
        };
        all.iter().all(is_recorded).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_pod_restarts_the_linked_role_in_place() {
    let stage = TestOperator::begin("fault-links").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let link = json!({ "when": { "role": "a", "conditions": ["Failed"] }, "scope": "Ordinal",
        "then": [{ "role": "b", "action": "Restart" }] });
    create_policy(&stage, json!({ "links": [link] })).await;
    let roles = json!([role("a", 2, "engine:1"), role("b", 2, "engine:1")]);
    groups.create(&PostParams::default(), &group(roles)).await.unwrap();
    settled(&groups).await;
    let before = pods(&stage.client).await;
    assert_eq!(names(&before), ["g-a-0", "g-a-1", "g-b-0", "g-b-1"]);

    let evicted = json!({ "status": { "phase": "Failed", "reason": "Evicted", "message": "low on memory" } });
    let pods_api: Api<Pod> = stage.api();
    pods_api.patch_status("g-a-1", &PatchParams::default(), &Patch::Strategic(evicted)).await.unwrap();
    let message = recovered(&groups).await;
    let expected = "; g-b-1 is restarted by policy pd";
    assert!(message.starts_with("g-a-1 failed on node ") && message.ends_with(expected), "{message}");
    assert!(message.contains("(pod g-a-1: Evicted)"), "{message}");

    let after = pods(&stage.client).await;
    assert_eq!(names(&after), names(&before));
    let is_same = |index: usize| uid(&before[index]) == uid(&after[index]);
    assert_eq!([0, 1, 2, 3].map(is_same), [true, false, true, true]);
    assert_eq!(after.iter().map(restarts).collect::<Vec<_>>(), [0, 0, 0, 1]);
    let metric = "moongate_operator_fault_actions_total{action=\"restart\"} 1";
    assert!(stage.metrics.text().lines().any(|line| line == metric), "{}", stage.metrics.text());
    let events: Api<Event> = stage.api();
    eventually("an event names the fault", async || {
        let all = events.list(&ListParams::default()).await.unwrap().items;
        let is_it = |event: &Event| {
            event.reason.as_deref() == Some("InstanceFault")
                && event.note.as_deref() == Some(message.as_str())
        };
        all.iter().any(is_it).then_some(())
    })
    .await;
    stage.end().await;
}

/// Two racks of two nodes, with a group that the scheduler packs into one of them.
async fn packed(name: &str, room: u32, recovery: Value) -> (TestOperator, String) {
    let mut stage = TestOperator::begin(name).await;
    stage.kubelet = None;
    for (rack, host) in [("x", 0), ("x", 1), ("y", 2), ("y", 3)] {
        node(&stage.client, name, &host.to_string(), json!({ "rack": rack }), room).await;
    }
    stage.kubelet = Some(FakeKubelet::start_for_scheduled(stage.client.clone(), KubeletTimings::default()));
    create_policy(&stage, recovery).await;
    let mut roles = json!([role("a", 2, "engine:1"), role("b", 2, "engine:1")]);
    roles.as_array_mut().unwrap().iter_mut().for_each(|role| select(role, name));
    let mut group = group(roles);
    let ladder = (keys::TOPOLOGY_LADDER.to_owned(), "node, rack=rack".to_owned());
    group.metadata.annotations = Some([ladder].into());
    let groups: Api<RoleBasedGroup> = stage.api();
    groups.create(&PostParams::default(), &group).await.unwrap();
    settled(&groups).await;
    nodes_are_recorded(&stage).await;
    let racks = racks(&stage).await;
    assert_eq!(racks.len(), 1, "the group is packed: {racks:?}");
    (stage, racks.into_iter().next().unwrap())
}

fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().unwrap().node_name.as_deref().unwrap()
}

/// Racks that the group's pods run in.
async fn racks(stage: &TestOperator) -> BTreeSet<String> {
    let rack = |pod: &Pod| if node_of(pod).ends_with(['0', '1']) { "x" } else { "y" };
    pods(&stage.client).await.iter().map(|pod| rack(pod).to_owned()).collect()
}

/// Deletes the node of a pod, and waits until the group has recovered. Returns the message.
async fn lose_node(stage: &TestOperator) -> String {
    let before = pods(&stage.client).await;
    let lost = node_of(&before[0]).to_owned();
    let nodes = Api::<Node>::all(stage.client.clone());
    nodes.delete(&lost, &DeleteParams::default()).await.unwrap();
    let message = recovered(&stage.api()).await;
    assert!(message.contains(&format!("lost node {lost}, which was deleted")), "{message}");
    let after = pods(&stage.client).await;
    assert_eq!(names(&after), names(&before));
    let kept = after.iter().filter(|pod| before.iter().any(|old| uid(old) == uid(pod)));
    assert_eq!(kept.count(), 0, "all instances of the domain were replaced");
    assert!(after.iter().all(|pod| node_of(pod) != lost));
    message
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_node_replaces_its_domain_where_it_was() {
    let recovery = json!({ "replacementDomain": "rack" });
    let (stage, rack) = packed("fault-same", 20, recovery).await;
    let message = lose_node(&stage).await;
    assert!(message.contains("g-a-0, g-a-1, g-b-0, g-b-1 are replaced by policy pd"), "{message}");
    assert_eq!(racks(&stage).await, [rack].into());
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_domain_is_left_together_for_another() {
    // A node has room for three of the four pods, so the rest of the rack does not suffice.
    let recovery = json!({ "replacementDomain": "rack", "placementSeconds": 2 });
    let (stage, rack) = packed("fault-full", 3, recovery).await;
    lose_node(&stage).await;
    let other = if rack == "x" { "y" } else { "x" };
    assert_eq!(racks(&stage).await, [other.to_owned()].into());
    stage.end().await;
}
