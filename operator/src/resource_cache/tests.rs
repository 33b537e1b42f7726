use serde_json::{Value, json};

use super::*;

/// Objects that the owner controls.
fn children(observed: &ResourceCache, owner: &str) -> Vec<Arc<ObservedResource>> {
    observed.index.children(owner).filter_map(|key| observed.get(key)).collect()
}

fn pod(uid: &str, version: u64) -> DynamicObject {
    serde_json::from_value(json!({ "apiVersion": "v1", "kind": "Pod", "metadata": {
        "namespace": "n", "name": "p", "uid": uid, "resourceVersion": version.to_string(),
        "ownerReferences": [{ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleInstance",
            "name": "i", "uid": "owner", "controller": true }],
    }}))
    .unwrap()
}

#[test]
fn outdated_events_are_ignored() {
    let mut observed = ResourceCache::default();
    let owner = ResourceKey { kind: ResourceKind::Instance, namespace: "n".into(), name: "i".into() };
    assert_eq!(observed.upsert(ResourceKind::Pod, pod("a", 5)), vec![owner.clone()]);
    assert!(observed.upsert(ResourceKind::Pod, pod("a", 4)).is_empty());
    let key = children(&observed, "owner")[0].key.clone();
    assert_eq!(observed.remove(&key, "a"), vec![owner.clone()]);
    assert!(observed.upsert(ResourceKind::Pod, pod("a", 6)).is_empty(), "a deleted UID does not come back");
    assert_eq!(observed.upsert(ResourceKind::Pod, pod("b", 7)), [owner]);
    assert!(observed.remove(&key, "a").is_empty(), "another object has the name now");
    assert_eq!(children(&observed, "owner").len(), 1);
}

#[test]
fn only_label_changes_of_nodes_trigger_warmups() {
    let object = |kind: &str, member: &str, value: Value, version: u64| -> DynamicObject {
        let meta = json!({ "name": "a", "uid": kind, "resourceVersion": version.to_string(), "labels": { "rack": "x" } });
        let mut object = json!({ "apiVersion": "v1", "kind": kind, "metadata": meta });
        object[member] = value;
        serde_json::from_value(object).unwrap()
    };
    let mut observed = ResourceCache::default();
    observed.upsert(ResourceKind::Warmup, object("RoleBasedGroupWarmup", "spec", json!({}), 1));
    let warmup = ResourceKey { kind: ResourceKind::Warmup, namespace: String::new(), name: "a".into() };
    let node = |heartbeat: u64, version: u64| object("Node", "status", json!({ "beat": heartbeat }), version);
    assert_eq!(observed.upsert(ResourceKind::Node, node(1, 2)), std::slice::from_ref(&warmup));
    assert!(observed.upsert(ResourceKind::Node, node(2, 3)).is_empty());
    let mut moved = node(3, 4);
    moved.metadata.labels = None;
    assert_eq!(observed.upsert(ResourceKind::Node, moved), [warmup]);
}

#[test]
fn cached_pod_has_planned_fields_and_ignores_other_changes() {
    let with = |version: u64, ready: bool, heartbeat: u64| {
        let mut object = pod("a", version);
        object.data = json!({
            "spec": { "nodeName": "node", "volumes": [{ "name": "v" }], "readinessGates": [{ "conditionType": "G" }],
                "containers": [{ "name": "c", "image": "i", "env": [{ "name": "E" }] }] },
            "status": { "phase": "Running", "podIP": "10.0.0.1", "hostIP": heartbeat.to_string(),
                "containerStatuses": [{ "name": "c", "ready": ready }] },
        });
        object
    };
    let mut observed = ResourceCache::default();
    let owner = ResourceKey { kind: ResourceKind::Instance, namespace: "n".into(), name: "i".into() };
    assert_eq!(observed.upsert(ResourceKind::Pod, with(1, false, 1)), std::slice::from_ref(&owner));
    assert!(observed.upsert(ResourceKind::Pod, with(2, false, 2)).is_empty());
    assert_eq!(observed.upsert(ResourceKind::Pod, with(3, true, 3)), [owner]);
    assert!(observed.upsert(ResourceKind::Pod, with(2, false, 4)).is_empty(), "the event is older");
    let cached: Value = children(&observed, "owner")[0].read().unwrap();
    assert_eq!(
        cached["spec"],
        json!({ "nodeName": "node", "readinessGates": [{ "conditionType": "G" }],
        "containers": [{ "name": "c", "image": "i" }] })
    );
    let status = json!({ "phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [{ "name": "c", "ready": true }] });
    assert_eq!(cached["status"], status);
}

#[test]
fn relist_removes_absent_objects_but_not_newer_writes() {
    let mut observed = ResourceCache::default();
    observed.upsert(ResourceKind::Pod, pod("a", 5));
    let era = observed.begin_list();
    observed.upsert(ResourceKind::Pod, pod("a", 5));
    assert!(observed.end_list(ResourceKind::Pod, era).is_empty());
    let era = observed.begin_list();
    assert_eq!(observed.end_list(ResourceKind::Pod, era).len(), 1);
    assert!(children(&observed, "owner").is_empty());
}

/// Reserves a port as a plan does, from the table at that moment.
fn reserve(observed: &mut ResourceCache, name: &str, annotation: &str, now: Timestamp) -> Option<u16> {
    let object = ResourceKey { kind: ResourceKind::Instance, namespace: "n".into(), name: name.into() };
    PortTable::expire(&mut observed.ports, now);
    let ports = Arc::clone(&observed.ports);
    let reserved = ports.reservation(&object, annotation);
    reserved.or_else(|| {
        let port = ports.find_free(&object, annotation, |_| false).ok()??;
        let choice = PortChoice { object, annotation: annotation.to_owned(), port };
        assert!(observed.reserve_ports(std::slice::from_ref(&choice), now));
        assert!(!observed.reserve_ports(&[choice], now), "another plan has taken it");
        Some(port)
    })
}

#[test]
fn ports_are_unique_and_reservations_expire() {
    let now = Timestamp::from_second(1_790_000_000).unwrap();
    let mut observed = ResourceCache::with_ports(Some(40..42));
    let first = reserve(&mut observed, "a", "a.http", now);
    assert_eq!(reserve(&mut observed, "a", "a.http", now), first);
    let second = reserve(&mut observed, "b", "b.http", now);
    assert!(first != second && first.is_some() && second.is_some());
    assert_eq!(reserve(&mut observed, "b", "b.grpc", now), None, "all ports are taken");
    // The first port is written, the second one is not.
    let annotations = json!({ "a.http": first.unwrap().to_string(), "other/key.x": "41", "plain": "41" });
    let meta = json!({ "name": "a", "namespace": "n", "uid": "a", "resourceVersion": "1", "annotations": annotations });
    let kind = ResourceKind::Instance;
    let object = json!({ "apiVersion": kind.api_version(), "kind": kind.name(), "metadata": meta });
    observed.upsert(kind, serde_json::from_value(object).unwrap());
    let later = crate::time::add_duration(now, std::time::Duration::from_secs(61));
    assert_eq!(reserve(&mut observed, "b", "b.grpc", later), second);
    assert_eq!(reserve(&mut observed, "b", "b.http", later), None);
    let key = ResourceKey { kind, namespace: "n".into(), name: "a".into() };
    observed.remove(&key, "a");
    assert_eq!(reserve(&mut observed, "b", "b.http", later), first);
    assert_eq!(reserve(&mut ResourceCache::default(), "a", "a.http", now), None);
}

#[test]
fn a_snapshot_does_not_change_with_the_cache() {
    let now = Timestamp::UNIX_EPOCH;
    let mut observed = ResourceCache::with_ports(Some(40..41));
    let meta = json!({ "namespace": "n", "name": "i", "uid": "owner", "resourceVersion": "1" });
    let instance = json!({ "apiVersion": "v1", "kind": "RoleInstance", "metadata": meta });
    observed.upsert(ResourceKind::Instance, serde_json::from_value(instance).unwrap());
    observed.upsert(ResourceKind::Pod, pod("a", 5));
    let key = ResourceKey { kind: ResourceKind::Instance, namespace: "n".into(), name: "i".into() };
    let before = observed.snapshot(&key, now).unwrap();
    let choice = PortChoice { object: key.clone(), annotation: "p.http".to_owned(), port: 40 };
    assert!(observed.reserve_ports(&[choice], now));
    let pod = before.children("owner", ResourceKind::Pod).next().unwrap();
    observed.remove(&pod.key, "a");
    assert_eq!(observed.snapshot(&key, now).unwrap().children("owner", ResourceKind::Pod).count(), 0);
    assert_eq!(before.children("owner", ResourceKind::Pod).count(), 1);
    assert_eq!(before.ports().reservation(&key, "p.http"), None);
}
