//! Compares rendered objects with those that upstream's controller created for the same groups on a real control plane. The
//! crate's documentation lists the differences.

use std::collections::BTreeMap;
use std::path::Path;

use moongate_render::revision::SpecRevision;
use moongate_render::{
    GangScheduler, GroupContext, Manifest, PreservedFields, ResolvedRole, RoleTarget, RuntimeProfiles,
    discovery_config_map, headless_service, instance, pod, render_workload,
};
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleInstance, RoleInstanceSet};
use serde_json::Value;

const GROUPS: [&str; 3] = ["v1alpha1-ris", "v1alpha2-pd-mooncake", "v1alpha2-stateless-lw"];

fn recorded(group: &str, kind: &str) -> Vec<Value> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../testdata/recorded/{group}/{kind}.yaml"));
    match std::fs::read_to_string(&path) {
        Ok(text) => serde_saphyr::from_multiple(&text).unwrap(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

fn read_group(group: &str) -> RoleBasedGroup {
    serde_json::from_value(recorded(group, "rolebasedgroups").remove(0)).unwrap()
}

fn named<'a>(objects: &'a [Value], name: &str) -> &'a Value {
    let mut found = objects.iter().filter(|object| object["metadata"]["name"] == name);
    found.next().unwrap_or_else(|| panic!("{name} was not recorded"))
}

fn with_roles(group: &str, mut check: impl FnMut(&ResolvedRole<'_>)) {
    let (object, profiles) = (read_group(group), RuntimeProfiles::new());
    let group = GroupContext::new(&object, &profiles, GangScheduler::default()).unwrap();
    for role in &object.spec.roles {
        check(&ResolvedRole::new(group, role).unwrap());
    }
}

fn target(role: &ResolvedRole<'_>) -> RoleTarget {
    RoleTarget { replicas: role.replicas(), partition: None, max_unavailable: None }
}

/// Removes our own hashes, which need not equal upstream's.
fn without_role_revision(mut manifest: Manifest) -> Manifest {
    let labels = manifest.0["metadata"]["labels"].as_object_mut().unwrap();
    labels.retain(|key, _| !key.starts_with(keys::ROLE_REVISION_PREFIX));
    manifest
}

#[track_caller]
fn assert_in(manifest: &Manifest, live: &Value) {
    let rendered = Value::Object(manifest.0.clone());
    assert!(
        manifest.is_subset_of(live),
        "rendered:\n{}\nrecorded:\n{}",
        serde_saphyr::to_string(&rendered).unwrap(),
        serde_saphyr::to_string(live).unwrap()
    );
}

/// Adds the kind to recorded objects of core kinds, whose lists omit it.
fn typed(live: &Value, manifest: &Manifest) -> Value {
    let mut live = live.clone();
    for member in ["apiVersion", "kind"] {
        live[member] = manifest.0[member].clone();
    }
    live
}

#[test]
fn role_instance_sets_have_exactly_upstreams_spec() {
    let mut compared = 0;
    for group in &GROUPS[1..] {
        let live = recorded(group, "roleinstancesets");
        with_roles(group, |role| {
            let manifest = render_workload(role, &target(role), &PreservedFields::default()).unwrap();
            let live = named(&live, manifest.name());
            assert_eq!(manifest.0["spec"], live["spec"]);
            assert_in(&without_role_revision(manifest), live);
            compared += 1;
        });
    }
    assert_eq!(compared, 7);
}

#[test]
fn v1alpha1_instance_set_roles_are_stateless() {
    with_roles("v1alpha1-ris", |role| {
        if role.kind() == moongate_render::WorkloadKind::RoleInstanceSet {
            let manifest = render_workload(role, &target(role), &PreservedFields::default()).unwrap();
            let live = &recorded("v1alpha1-ris", "roleinstancesets")[0];
            assert_eq!(manifest.name(), live["metadata"]["name"]);
            assert_eq!(
                live["metadata"]["annotations"][keys::ROLE_INSTANCE_PATTERN],
                "Stateful",
                "upstream ignores it"
            );
            assert_eq!(manifest.0["metadata"]["annotations"][keys::ROLE_INSTANCE_PATTERN], "Stateless");
            assert!(!role.is_ordered());
        }
    });
}

#[test]
fn stateful_sets_match_their_manifests() {
    let live = recorded("v1alpha1-ris", "statefulsets");
    let mut compared = 0;
    with_roles("v1alpha1-ris", |role| {
        if role.kind() == moongate_render::WorkloadKind::StatefulSet {
            let preserved = PreservedFields { legacy: Some(false), ..PreservedFields::default() };
            let manifest = render_workload(role, &target(role), &preserved).unwrap();
            let live = typed(named(&live, manifest.name()), &manifest);
            assert_in(&without_role_revision(manifest), &live);
            compared += 1;
        }
    });
    assert_eq!(compared, 4);
}

#[test]
fn services_match_their_manifests() {
    for group in GROUPS {
        let live = recorded(group, "services");
        with_roles(group, |role| {
            let uid = |service: &Value| {
                service["metadata"]["ownerReferences"][0]["uid"].as_str().unwrap().to_owned()
            };
            let live = named(&live, &role.names().service);
            let manifest = headless_service(role, &target(role), &uid(live)).unwrap();
            assert_in(&manifest, &typed(live, &manifest));
        });
    }
}

#[test]
fn discovery_file_is_upstreams_without_its_defects() {
    let text = |group: &str| {
        let (object, profiles) = (read_group(group), RuntimeProfiles::new());
        let group = GroupContext::new(&object, &profiles, GangScheduler::default()).unwrap();
        let manifest = discovery_config_map(group, &BTreeMap::new(), &BTreeMap::new()).unwrap().unwrap();
        manifest.0["data"]["config.yaml"].as_str().unwrap().to_owned()
    };
    let live =
        |group: &str| recorded(group, "configmaps")[0]["data"]["config.yaml"].as_str().unwrap().to_owned();
    assert_eq!(
        text("v1alpha2-pd-mooncake"),
        live("v1alpha2-pd-mooncake").replace("\n  size: 5\n", "\n  size: 7\n"),
        "counts pods, not roles"
    );
    assert_eq!(
        text("v1alpha2-stateless-lw"),
        live("v1alpha2-stateless-lw")
            .replace("\n  size: 1\n", "\n  size: 7\n")
            .replace("sl-lw-0.", "sl-lw-0-0.")
            .replace("sl-lw-1.", "sl-lw-1-0."),
        "names of leader pods"
    );
}

#[test]
fn instances_differ_only_in_their_ordinals() {
    for group in &GROUPS[1..] {
        for live_set in recorded(group, "roleinstancesets") {
            let set: RoleInstanceSet = serde_json::from_value(live_set).unwrap();
            let set_name = set.metadata.name.clone().unwrap();
            let instances = recorded(group, "roleinstances");
            let own =
                instances.iter().filter(|live| live["metadata"]["ownerReferences"][0]["name"] == *set_name);
            let mut count = 0;
            for live in own {
                let labels = &live["metadata"]["labels"];
                let revision = labels[keys::CONTROLLER_REVISION_HASH].as_str().unwrap();
                let manifest = match labels[keys::ROLE_INSTANCE_ID].as_str() {
                    Some(id) => {
                        let now =
                            live["metadata"]["annotations"][keys::LIFECYCLE_TIMESTAMP].as_str().unwrap();
                        instance::unordered(&set, id, revision, now).unwrap()
                    }
                    None => {
                        let name = live["metadata"]["name"].as_str().unwrap();
                        let ordinal = name.rsplit_once('-').unwrap().1.parse().unwrap();
                        instance::ordered(&set, ordinal, revision).unwrap()
                    }
                };
                // Upstream writes the ordinal of the last instance into all of them.
                let mut live = live.clone();
                for component in live["spec"]["components"].as_array_mut().unwrap() {
                    let labels = component["template"]["metadata"]["labels"].as_object_mut().unwrap();
                    labels.remove(keys::ROLE_INSTANCE_INDEX);
                    labels.remove(keys::POD_NAME);
                }
                assert_eq!(manifest.0["spec"], live["spec"]);
                assert_in(&manifest, &live);
                count += 1;
            }
            assert_eq!(Some(count), set.spec.replicas, "{set_name}");
        }
    }
}

#[test]
fn pods_match_their_manifests() {
    let mut compared = 0;
    for group in &GROUPS[1..] {
        let live = recorded(group, "pods");
        for object in recorded(group, "roleinstances") {
            let instance: RoleInstance = serde_json::from_value(object).unwrap();
            let revision = instance.status.as_ref().unwrap().current_revision.clone().unwrap();
            let hash = revision.rsplit_once('-').unwrap().1.to_owned();
            for component in &instance.spec.components {
                for id in 0..component.size() {
                    let manifest =
                        pod::pod(&instance, component, id, &hash, &pod::NodePlacement::default()).unwrap();
                    let mut live = typed(named(&live, manifest.name()), &manifest);
                    // Wrong in the recording: all pods have the last ordinal.
                    for key in [keys::ROLE_INSTANCE_INDEX, keys::POD_NAME] {
                        if let Some(right) = instance.metadata.labels.as_ref().unwrap().get(key) {
                            live["metadata"]["labels"][key] = right.clone().into();
                        }
                    }
                    assert_in(&manifest, &live);
                    compared += 1;
                }
            }
        }
    }
    assert_eq!(compared, 14);
}

#[test]
fn revisions_have_upstreams_names() {
    for group in GROUPS {
        let revisions = recorded(group, "controllerrevisions");
        let live = |name: &str| named(&revisions, name)["data"].clone();
        let object = read_group(group);
        let revision = SpecRevision::for_group(object.metadata.name.as_deref().unwrap(), &object.spec, 1);
        assert!(revision.is_same(&live(&revision.name)), "{}", revision.name);
        for live_set in recorded(group, "roleinstancesets") {
            let name = live_set["metadata"]["name"].as_str().unwrap();
            let revision = SpecRevision::for_set(name, &live_set["spec"]["roleInstanceTemplate"], 0);
            assert_eq!(live_set["status"]["updateRevision"], *revision.name);
            assert!(revision.is_same(&live(&revision.name)));
        }
        for object in recorded(group, "roleinstances") {
            let instance: RoleInstance = serde_json::from_value(object).unwrap();
            let name = instance.metadata.name.as_deref().unwrap();
            let revision = SpecRevision::for_instance(name, &instance.spec.components, 0);
            assert_eq!(instance.status.unwrap().update_revision.as_ref(), Some(&revision.name));
            assert!(revision.is_same(&live(&revision.name)), "{name}");
        }
    }
}
