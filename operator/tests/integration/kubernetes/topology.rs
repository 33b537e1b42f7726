//! Topology levels of a group with the real scheduler.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Api, Patch, PatchParams, PostParams};
use moongate_testkit::{FakeKubelet, KubeletTimings};
use rbg_api::v1alpha2::RoleBasedGroup;
use rbg_api::{DiscoveryFile, keys};
use serde_json::{Value, json};

use super::nodes::{node, select};
use super::test_operator::TestOperator;
use super::{eventually, group, pods, role, settled};

const LADDER: &str = "node, rack=rack, zone=zone";

/// Two zones of two racks of two nodes: `1a0` is in zone 1 and rack a. Only the scheduler binds pods to them.
async fn nodes(name: &str, room: u32) -> TestOperator {
    let mut stage = TestOperator::begin(name).await;
    stage.kubelet = None;
    for (zone, rack) in [("1", "a"), ("1", "b"), ("2", "c"), ("2", "d")] {
        for host in ["0", "1"] {
            let labels = json!({ "zone": zone, "rack": rack });
            node(&stage.client, name, &format!("{zone}{rack}{host}"), labels, room).await;
        }
    }
    stage.kubelet = Some(FakeKubelet::start_for_scheduled(stage.client.clone(), KubeletTimings::default()));
    stage
}

fn with_ladder(roles: Value) -> RoleBasedGroup {
    let mut group = group(roles);
    group.metadata.annotations = Some([(keys::TOPOLOGY_LADDER.to_owned(), LADDER.to_owned())].into());
    group
}

fn roles(stage: &str, replicas: i32) -> Value {
    let mut roles = json!(["prefill", "decode", "kv-store"].map(|name| role(name, replicas, "engine:1")));
    roles.as_array_mut().unwrap().iter_mut().for_each(|role| select(role, stage));
    roles
}

/// Roles of the pods on each node, by node name without the stage prefix.
fn places(stage: &str, pods: &[Pod]) -> BTreeMap<String, Vec<String>> {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for pod in pods {
        let node = pod.spec.as_ref().unwrap().node_name.as_ref().unwrap();
        let node = node.strip_prefix(stage).unwrap().trim_start_matches('-').to_owned();
        places.entry(node).or_default().push(pod.metadata.labels.as_ref().unwrap()[keys::ROLE_NAME].clone());
    }
    places.values_mut().for_each(|roles| roles.sort());
    places
}

/// First letters of the nodes' names: zones, or zones and racks.
fn domains(places: &BTreeMap<String, Vec<String>>, letters: usize) -> BTreeSet<&str> {
    places.keys().map(|node| &node[..letters]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn group_packs_into_a_rack_and_roles_spread_over_nodes() {
    let stage = nodes("packed", 20).await;
    let groups: Api<RoleBasedGroup> = stage.api();
    groups.create(&PostParams::default(), &with_ladder(roles("packed", 2))).await.unwrap();
    settled(&groups).await;
    let places = places("packed", &pods(&stage.client).await);
    assert_eq!(domains(&places, 2).len(), 1, "one rack: {places:?}");
    let one_of_each = ["decode", "kv-store", "prefill"];
    assert_eq!(places.values().collect::<Vec<_>>(), [&one_of_each, &one_of_each], "{places:?}");
    is_told(&stage).await;
    stage.end().await;
}

/// Waits until the discovery file and the pods contain their locations.
async fn is_told(stage: &TestOperator) {
    let files: Api<ConfigMap> = stage.api();
    let file = eventually("the file has every location", async || {
        let text = files.get("g").await.unwrap().data.unwrap()["config.yaml"].clone();
        let file = serde_saphyr::from_str::<DiscoveryFile>(&text).unwrap().resolve().unwrap();
        let mut all = file.roles.iter().flat_map(|role| &role.instances);
        all.all(|instance| instance.location.node.is_some()).then_some(file)
    })
    .await;
    let pods = pods(&stage.client).await;
    for instance in file.roles.iter().flat_map(|role| &role.instances) {
        let name = instance.address.split('.').next();
        let pod = pods.iter().find(|pod| pod.metadata.name.as_deref() == name).unwrap();
        assert_eq!(pod.spec.as_ref().unwrap().node_name, instance.location.node);
        let annotations = pod.metadata.annotations.as_ref().unwrap();
        assert_eq!(annotations.get(keys::RACK), instance.location.rack.as_ref());
        assert_eq!(annotations.get(keys::ZONE), instance.location.zone.as_ref());
        assert!(instance.location.zone.is_some() && instance.location.nvlink_domain.is_none());
    }
}

/// Two racks of two NVLink domains of two nodes, with the labels of NVIDIA's tools.
#[tokio::test(flavor = "multi_thread")]
async fn levels_come_from_the_labels_of_nodes() {
    let mut stage = TestOperator::begin("labels").await;
    stage.kubelet = None;
    for (rack, clique) in [("1", "a"), ("1", "b"), ("2", "c"), ("2", "d")] {
        for host in ["0", "1"] {
            let labels = json!({ "nvidia.com/gpu.clique": format!("{clique}.0"),
                "fabric.topograph.run/tier-0": rack, "topology.kubernetes.io/zone": "z" });
            node(&stage.client, "labels", &format!("{rack}{clique}{host}"), labels, 20).await;
        }
    }
    stage.kubelet = Some(FakeKubelet::start_for_scheduled(stage.client.clone(), KubeletTimings::default()));
    let groups: Api<RoleBasedGroup> = stage.api();
    groups.create(&PostParams::default(), &group(roles("labels", 2))).await.unwrap();
    let settled = settled(&groups).await;
    let conditions = settled.status.unwrap().conditions;
    let levels = conditions.iter().find(|condition| condition.kind == "TopologyLevels").unwrap();
    assert_eq!(
        levels.message,
        "node=kubernetes.io/hostname, nvlink-domain=nvidia.com/gpu.clique, rack=fabric.topograph.run/tier-0, \
         zone=topology.kubernetes.io/zone"
    );
    let places = places("labels", &pods(&stage.client).await);
    assert_eq!(domains(&places, 2).len(), 1, "one NVLink domain: {places:?}");
    assert_eq!(places.len(), 2, "roles are spread over its nodes: {places:?}");
    let files: Api<ConfigMap> = stage.api();
    let text = eventually("the file has every location", async || {
        let text = files.get("g").await.unwrap().data.unwrap()["config.yaml"].clone();
        (text.matches("nvlink_domain").count() == 6).then_some(text)
    })
    .await;
    assert!(text.contains("label: nvidia.com/gpu.clique"), "{text}");
    let (rack, clique) = domains(&places, 2).first().unwrap().split_at(1);
    for pod in pods(&stage.client).await {
        let annotations = pod.metadata.annotations.unwrap();
        assert_eq!(annotations[keys::NVLINK_DOMAIN], format!("{clique}.0"));
        assert_eq!((annotations[keys::RACK].as_str(), annotations[keys::ZONE].as_str()), (rack, "z"));
    }
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_uses_the_next_best_domain_if_the_best_is_full() {
    let stage = nodes("full", 2).await;
    let groups: Api<RoleBasedGroup> = stage.api();
    groups.create(&PostParams::default(), &with_ladder(roles("full", 2))).await.unwrap();
    settled(&groups).await;
    let first = places("full", &pods(&stage.client).await);
    assert_eq!(
        domains(&first, 1).len(),
        1,
        "more pods than a rack has capacity for, all in one zone: {first:?}"
    );
    let body = json!({ "spec": { "roles": roles("full", 4) } });
    groups.patch("g", &PatchParams::default(), &Patch::Merge(body)).await.unwrap();
    let all = eventually("all pods have a node", async || {
        let pods = pods(&stage.client).await;
        let has_node = |pod: &Pod| pod.spec.as_ref().unwrap().node_name.is_some();
        (pods.len() == 12 && pods.iter().all(has_node)).then_some(pods)
    })
    .await;
    let all = places("full", &all);
    let in_first = |node: &&String| node.starts_with(*domains(&first, 1).first().unwrap());
    let zone: Vec<usize> =
        all.iter().filter(|(node, _)| in_first(node)).map(|(_, pods)| pods.len()).collect();
    assert_eq!(zone, [2, 2, 2, 2], "the zone is full: {all:?}");
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_follow_their_leader_in_the_exclusive_domain() {
    let stage = nodes("leaders", 20).await;
    let mut wanted = roles("leaders", 1);
    let template = wanted[0]["standalonePattern"]["template"].clone();
    wanted.as_array_mut().unwrap().push(json!({
        "name": "lws", "replicas": 2,
        "annotations": { keys::ROLE_WORKLOAD_TYPE: "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet" },
        "leaderWorkerPattern": { "size": 3, "template": template },
    }));
    let mut object = with_ladder(wanted);
    let annotations = object.metadata.annotations.as_mut().unwrap();
    annotations.insert(keys::GROUP_EXCLUSIVE_TOPOLOGY.to_owned(), "zone".to_owned());
    annotations.insert(keys::TOPOLOGY_NEAR.to_owned(), "lws:decode".to_owned());
    object.metadata.namespace = Some(stage.namespace.name.clone());
    // The LeaderWorkerSet controller does not run here: the test creates the pods as it would.
    let profiles = moongate_render::RuntimeProfiles::new();
    let group = moongate_render::GroupContext::new(&object, &profiles, Default::default()).unwrap();
    let role = moongate_render::ResolvedRole::new(group, &object.spec.roles[3]).unwrap();
    let target = moongate_render::RoleTarget::of(&object.spec.roles[3]);
    let set =
        serde_json::to_value(moongate_render::render_workload(&role, &target, &Default::default()).unwrap())
            .unwrap();
    let pods_of: Api<Pod> = stage.api();
    for (instance, worker) in (0..2).flat_map(|instance| (0..3).map(move |worker| (instance, worker))) {
        let template = if worker == 0 { "leaderTemplate" } else { "workerTemplate" };
        let mut pod = set["spec"]["leaderWorkerTemplate"][template].clone();
        pod["metadata"]["name"] = format!("g-lws-{instance}-{worker}").into();
        pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = worker.to_string().into();
        pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-key"] = format!("key-{instance}").into();
        pods_of.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    }
    object.spec.roles.truncate(3);
    object.metadata.namespace = None;
    object.metadata.annotations.as_mut().unwrap().remove(keys::TOPOLOGY_NEAR);
    stage.api::<RoleBasedGroup>().create(&PostParams::default(), &object).await.unwrap();
    let all = eventually("all pods have a node", async || {
        let pods = pods(&stage.client).await;
        let has_node = |pod: &Pod| pod.spec.as_ref().unwrap().node_name.is_some();
        (pods.len() == 9 && pods.iter().all(has_node)).then_some(pods)
    })
    .await;
    assert_eq!(domains(&places("leaders", &all), 1).len(), 1, "one zone for all: {all:?}");
    for instance in ["g-lws-0", "g-lws-1"] {
        let own: Vec<Pod> = all
            .iter()
            .filter(|pod| pod.metadata.name.as_ref().unwrap().starts_with(instance))
            .cloned()
            .collect();
        assert_eq!(places("leaders", &own).len(), 1, "{instance} is on one node");
    }
    stage.end().await;
}
