//! Takeover of objects that upstream's controller left on a real control plane: no pod is restarted or replaced, and an
//! in-place update continues.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use moongate_operator::{OperatorOptions, ResourceKind};
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::{eventually, install, is_settled, pods, restarts, run_with_operator};

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/recorded");
/// Some labels contain a hash of the name.
const NAMESPACE: &str = "default";
/// Owners before their dependents, except for dependents of StatefulSets: Kubernetes' own controller adopts existing
/// objects and would create missing ones.
const STEPS: [(ResourceKind, ResourceOwner); 10] = [
    (ResourceKind::Group, ResourceOwner::Us),
    (ResourceKind::ConfigMap, ResourceOwner::Us),
    (ResourceKind::Revision, ResourceOwner::StatefulSets),
    (ResourceKind::Pod, ResourceOwner::StatefulSets),
    (ResourceKind::StatefulSet, ResourceOwner::Us),
    (ResourceKind::Set, ResourceOwner::Us),
    (ResourceKind::Instance, ResourceOwner::Us),
    (ResourceKind::Revision, ResourceOwner::Us),
    (ResourceKind::Service, ResourceOwner::Us),
    (ResourceKind::Pod, ResourceOwner::Us),
];

/// Identity of an owner in the recording.
#[derive(Clone, Copy, PartialEq)]
enum ResourceOwner {
    Us,
    StatefulSets,
}

impl ResourceOwner {
    fn of_object(object: &Value) -> Self {
        let mut owners = object["metadata"]["ownerReferences"].as_array().into_iter().flatten();
        let is_one = owners.any(|owner| owner["kind"] == "StatefulSet" && owner["controller"] == true);
        if is_one { Self::StatefulSets } else { Self::Us }
    }
}

/// Stores recorded objects with new UIDs.
struct SnapshotRestorer {
    client: Client,
    /// New UIDs by recorded UID.
    uids: BTreeMap<String, String>,
}

impl SnapshotRestorer {
    async fn folder(&mut self, group: &str) {
        for (kind, of) in STEPS {
            let path = Path::new(RECORDED).join(group).join(format!("{}.yaml", kind.resource().plural));
            let Ok(text) = std::fs::read_to_string(path) else { continue };
            let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
            for object in objects.iter().filter(|object| ResourceOwner::of_object(object) == of) {
                self.object(kind, object).await;
            }
        }
    }

    async fn object(&mut self, kind: ResourceKind, recorded: &Value) {
        let mut text = recorded.to_string();
        for (old, new) in &self.uids {
            text = text.replace(old, new);
        }
        let mut object: Value = serde_json::from_str(&text).unwrap();
        object["apiVersion"] = kind.api_version().into();
        object["kind"] = kind.name().into();
        let metadata = object["metadata"].as_object_mut().unwrap();
        let old = metadata.remove("uid").unwrap();
        let generation = metadata.remove("generation");
        metadata.remove("resourceVersion");
        if ResourceOwner::of_object(recorded) == ResourceOwner::StatefulSets {
            metadata.remove("ownerReferences");
        }
        match kind {
            ResourceKind::Pod => object["spec"]["nodeName"] = format!("node-{NAMESPACE}").into(),
            ResourceKind::Service => drop(object["spec"].as_object_mut().unwrap().remove("clusterIPs")),
            _ => {}
        }
        let mut status = object["status"].take();
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), NAMESPACE, &kind.resource());
        let created: DynamicObject = serde_json::from_value(object).unwrap();
        let created = api.create(&PostParams::default(), &created).await.unwrap();
        self.uids.insert(old.as_str().unwrap().to_owned(), created.metadata.uid.unwrap());
        if status.is_null() || kind == ResourceKind::Service {
            return;
        }
        // Generations start at 1 again.
        if generation.is_some_and(|generation| status["observedGeneration"] == generation) {
            status["observedGeneration"] = created.metadata.generation.into();
        }
        let body = json!({ "status": status });
        let body = if kind.is_custom() { Patch::Merge(body) } else { Patch::Strategic(body) };
        let name = created.metadata.name.unwrap();
        api.patch_status(&name, &PatchParams::default(), &body).await.unwrap();
    }
}

async fn settled(client: &Client, group: &str) {
    let groups: Api<RoleBasedGroup> = Api::namespaced(client.clone(), NAMESPACE);
    eventually(&format!("{group} is settled"), async || {
        is_settled(&groups.get(group).await.unwrap()).then_some(())
    })
    .await;
}

/// UID, restart count and image of each pod.
fn states(pods: &[Pod]) -> BTreeMap<String, (String, i32, String)> {
    let state = |pod: &Pod| {
        let image = pod.spec.as_ref().unwrap().containers[0].image.clone().unwrap();
        (pod.metadata.name.clone().unwrap(), (pod.metadata.uid.clone().unwrap(), restarts(pod), image))
    };
    pods.iter().map(state).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn upstreams_objects_keep_running_and_update_in_place() {
    // A control plane of its own: the objects are in its default namespace.
    let plane = ControlPlane::start().await.unwrap();
    let client = Client::try_from(plane.config(NAMESPACE).await.unwrap()).unwrap();
    install(&client).await;
    let mut restored = SnapshotRestorer { client: client.clone(), uids: BTreeMap::new() };
    for folder in ["v1alpha1-ris", "v1alpha2-pd-mooncake", "v1alpha2-stateless-lw"] {
        restored.folder(folder).await;
    }
    let before = states(&pods(&client).await);
    assert_eq!(before.len(), 21);
    let _kubelet = FakeKubelet::start(client.clone(), NAMESPACE, KubeletTimings::default()).await.unwrap();
    let options = OperatorOptions { kubeconfig: Some(plane.kubeconfig()), ..OperatorOptions::default() };
    let story = async {
        let groups = [
            ("sglang-pd-with-mooncake-demo", "mooncake-store"),
            ("sglang-pd-with-mooncake", "mooncake-store"),
            ("sl", "store"),
        ];
        for (group, _) in groups {
            settled(&client, group).await;
        }
        assert_eq!(states(&pods(&client).await), before);
        for (group, role) in groups {
            update(&client, group, role).await;
        }
        for (group, _) in groups {
            settled(&client, group).await;
        }
        for (name, (uid, restarts, image)) in states(&pods(&client).await) {
            let (old_uid, old_restarts, old_image) = &before[&name];
            let is_updated = name.contains("-store-");
            let expected =
                if is_updated { (1 + old_restarts, "new:2") } else { (*old_restarts, &**old_image) };
            assert_eq!((&uid, (restarts, image.as_str())), (old_uid, expected), "{name}");
        }
    };
    run_with_operator(options, story).await;
}

async fn update(client: &Client, group: &str, role: &str) {
    let groups: Api<RoleBasedGroup> = Api::namespaced(client.clone(), NAMESPACE);
    let live = serde_json::to_value(groups.get(group).await.unwrap()).unwrap();
    let mut roles = live["spec"]["roles"].clone();
    let role = roles.as_array_mut().unwrap().iter_mut().find(|one| one["name"] == role).unwrap();
    // Avoids the default grace period of half a minute per pod.
    role["rolloutStrategy"]["rollingUpdate"]["inPlaceUpdateStrategy"] = json!({ "gracePeriodSeconds": 1 });
    role["rolloutStrategy"]["type"] = "RollingUpdate".into();
    let pattern = &mut role["standalonePattern"];
    let template = match pattern.get("template") {
        Some(_) => &mut pattern["template"],
        None => &mut pattern["templateRef"]["patch"],
    };
    template["spec"]["containers"][0]["image"] = "new:2".into();
    let body = Patch::Merge(json!({ "spec": { "roles": roles } }));
    groups.patch(group, &PatchParams::default(), &body).await.unwrap();
}
