//! Names of the objects that groups consist of in upstream's controller: derived from manifests by its rules, and as
//! recorded.

use std::path::Path;

use kube::Client;
use kube::api::{Api, DynamicObject, ListParams};
use moongate_operator::ResourceKind;
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::keys;
use serde_json::{Value, json};

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/recorded");
/// Revisions are omitted, since their names are hashes.
const KINDS: [ResourceKind; 12] = [
    ResourceKind::Group,
    ResourceKind::Adapter,
    ResourceKind::Policy,
    ResourceKind::PodGroup,
    ResourceKind::ConfigMap,
    ResourceKind::Service,
    ResourceKind::Set,
    ResourceKind::StatefulSet,
    ResourceKind::Deployment,
    ResourceKind::LeaderWorkerSet,
    ResourceKind::Instance,
    ResourceKind::Pod,
];
/// In a v1alpha1 group's annotations after storage as v1alpha2.
const COORDINATION: &str = "conversion.workloads.x-k8s.io/v1alpha1-coordination";

/// `KIND NAME` of each object, sorted. Random parts of names are replaced by `*`.
pub(crate) type ManifestNames = Vec<String>;

/// Objects of all groups and sets of groups in a file.
pub(crate) fn expected(documents: &[Value]) -> ManifestNames {
    let mut objects = ManifestNames::new();
    for document in documents {
        if document["kind"] == "RoleBasedGroup" {
            of_group(&convert(document, ApiVersion::V1alpha2).unwrap(), &mut objects);
        } else if document["kind"] == "RoleBasedGroupSet" {
            let set = convert(document, ApiVersion::V1alpha2).unwrap();
            let template = &set["spec"]["groupTemplate"];
            for index in 0..number(&set["spec"]["replicas"]) {
                let name = format!("{}-{index}", text(&set["metadata"]["name"]));
                objects.push(format!("RoleBasedGroup {name}"));
                let metadata = json!({ "name": name, "annotations": template["annotations"] });
                of_group(&json!({ "metadata": metadata, "spec": template["spec"] }), &mut objects);
            }
        }
    }
    objects.sort();
    objects
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(1)
}

fn of_group(group: &Value, objects: &mut ManifestNames) {
    let (name, annotations) = (text(&group["metadata"]["name"]), &group["metadata"]["annotations"]);
    if annotations[keys::GANG_SCHEDULING] == "true" {
        objects.push(format!("PodGroup {name}"));
    }
    if !annotations[COORDINATION].is_null() {
        objects.push(format!("CoordinatedPolicy {name}"));
    }
    let roles = group["spec"]["roles"].as_array().unwrap();
    if roles.iter().any(|role| !is_stateless(role) && kind(role) != "Deployment") {
        objects.push(format!("ConfigMap {name}"));
    }
    for role in roles {
        let workload = format!("{name}-{}", text(&role["name"]));
        let kind = kind(role);
        objects.push(format!("{kind} {workload}"));
        if role["scalingAdapter"]["enable"] == true {
            objects.push(format!("RoleBasedGroupScalingAdapter {workload}"));
        }
        if matches!(kind, "RoleInstanceSet" | "StatefulSet") {
            objects.push(format!("Service s-{workload}"));
        }
        for index in 0..number(&role["replicas"]) {
            let ordered = format!("{workload}-{index}");
            match kind {
                "RoleInstanceSet" if is_stateless(role) => {
                    of_instance(role, &format!("{workload}-*"), objects);
                }
                "RoleInstanceSet" => of_instance(role, &ordered, objects),
                "StatefulSet" => objects.push(format!("Pod {ordered}")),
                "Deployment" => objects.push(format!("Pod {workload}-*")),
                // The LeaderWorkerSet controller does not run here.
                _ => {}
            }
        }
    }
}

fn kind(role: &Value) -> &str {
    let workload_type = role["annotations"][keys::ROLE_WORKLOAD_TYPE].as_str().unwrap_or_default();
    match workload_type.rsplit('/').next().unwrap_or_default() {
        "" | "InstanceSet" => "RoleInstanceSet",
        kind => kind,
    }
}

fn is_stateless(role: &Value) -> bool {
    let keys = [keys::ROLE_INSTANCE_PATTERN, keys::legacy::INSTANCE_PATTERN];
    keys.iter().any(|key| role["annotations"][*key] == "Stateless")
}

fn of_instance(role: &Value, name: &str, objects: &mut ManifestNames) {
    objects.push(format!("RoleInstance {name}"));
    if let Some(pattern) = role.get("leaderWorkerPattern") {
        objects.extend((0..number(&pattern["size"])).map(|index| format!("Pod {name}-{index}")));
    } else if let Some(pattern) = role.get("customComponentsPattern") {
        for component in pattern["components"].as_array().unwrap() {
            let pods = 0..number(&component["size"]);
            objects.extend(pods.map(|id| format!("Pod {name}-{}-{id}", text(&component["name"]))));
        }
    } else {
        objects.push(format!("Pod {name}"));
    }
}

/// Objects in a namespace that result from groups.
pub(crate) async fn found(client: &Client) -> ManifestNames {
    let mut objects = ManifestNames::new();
    for kind in KINDS {
        let api: Api<DynamicObject> = Api::default_namespaced_with(client.clone(), &kind.resource());
        for object in api.list(&ListParams::default()).await.unwrap() {
            let labels = object.metadata.labels.clone().unwrap_or_default();
            let is_theirs = match kind {
                // Files contain pods of other workloads, too.
                ResourceKind::Pod => labels.contains_key(keys::GROUP_NAME),
                _ => object.metadata.owner_references.is_some(),
            };
            if is_theirs {
                objects.push(named(kind, &serde_json::to_value(object).unwrap()));
            }
        }
    }
    objects.sort();
    objects
}

/// Names of unordered instances and of Deployments' pods are partly random.
fn named(kind: ResourceKind, object: &Value) -> String {
    let (metadata, name) = (&object["metadata"], text(&object["metadata"]["name"]));
    let set = format!(
        "{}-{}",
        text_or(&metadata["labels"], keys::GROUP_NAME),
        text_or(&metadata["labels"], keys::ROLE_NAME)
    );
    let owner = &metadata["ownerReferences"][0];
    let instance = match kind {
        ResourceKind::Instance if !metadata["labels"][keys::ROLE_INSTANCE_ID].is_null() => name,
        ResourceKind::Pod if owner["kind"] == "RoleInstance" && !is_ordered(object) => text(&owner["name"]),
        ResourceKind::Pod if owner["kind"] == "ReplicaSet" => name,
        _ => return format!("{} {name}", kind.name()),
    };
    format!("{} {}", kind.name(), name.replacen(instance, &format!("{set}-*"), 1))
}

fn text_or<'a>(labels: &'a Value, key: &str) -> &'a str {
    labels[key].as_str().unwrap_or_default()
}

/// Pods of unordered instances have no ordinal.
fn is_ordered(pod: &Value) -> bool {
    !pod["metadata"]["labels"][keys::ROLE_INSTANCE_INDEX].is_null()
}

/// Objects that upstream's controller created for a group.
pub(crate) fn recorded(folder: &str) -> ManifestNames {
    let mut objects = ManifestNames::new();
    for kind in KINDS.into_iter().filter(|kind| *kind != ResourceKind::Group) {
        let path = Path::new(RECORDED).join(folder).join(format!("{}.yaml", kind.resource().plural));
        let Ok(text) = std::fs::read_to_string(path) else { continue };
        let all: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        objects.extend(all.iter().map(|object| named(kind, object)));
    }
    objects.sort();
    objects
}
