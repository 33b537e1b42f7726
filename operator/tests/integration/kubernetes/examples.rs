//! Every file of upstream's examples, of both versions, and of ours is applied unchanged; every group and set in it becomes ready and
//! has the objects that upstream's controller creates.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{
    Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams,
};
use moongate_operator::{OperatorOptions, ResourceKind};
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use rbg_api::keys;
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::external_kinds::define;
use super::published_manifests::{converts, webhooks};
use super::test_operator::TestOperator;
use super::{condition_is, eventually, install, objects, pods, run_with_operator};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/examples");
const OWN_EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
/// Number of files to apply concurrently.
const FILES: usize = 4;
/// The example whose objects were recorded.
const RECORDED: (&str, &str) = ("pd-disagg-kvcache-reuse-with-mooncake.yaml", "v1alpha2-pd-mooncake");
/// Timeout for one file, while others run.
const TEST_TIMEOUT: Duration = Duration::from_secs(300);

fn files(folder: &str) -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from(folder)];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "yaml") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

fn documents(path: &Path) -> Vec<Value> {
    let documents: Vec<Option<Value>> =
        serde_saphyr::from_multiple(&std::fs::read_to_string(path).unwrap()).unwrap();
    documents.into_iter().flatten().filter(|document| document["kind"].is_string()).collect()
}

fn resource(object: &Value) -> ApiResource {
    let version = object["apiVersion"].as_str().unwrap();
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let kind = GroupVersionKind::gvk(group, version, object["kind"].as_str().unwrap());
    // English plurals, which are right for all kinds but this one.
    match kind.kind.as_str() {
        "CoordinatedPolicy" => ApiResource::from_gvk_with_plural(&kind, "coordinatedpolicies"),
        _ => ApiResource::from_gvk(&kind),
    }
}

/// Applies a file to a namespace, as `kubectl apply` does.
async fn apply(client: &Client, namespace: &str, file: &Path) {
    for mut object in documents(file) {
        object["metadata"].as_object_mut().unwrap().remove("namespace");
        let resource = resource(&object);
        let is_global = matches!(resource.kind.as_str(), "ClusterEngineRuntimeProfile" | "PersistentVolume");
        let api: Api<DynamicObject> = match is_global {
            true => Api::all_with(client.clone(), &resource),
            false => Api::namespaced_with(client.clone(), namespace, &resource),
        };
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        eventually(&format!("{} is stored", file.display()), async || {
            match api.create(&PostParams::default(), &object).await {
                Ok(_) => Some(()),
                // A kind of another project, or an object that several files contain.
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Some(()),
                Err(kube::Error::Api(status)) if status.message.contains("webhook") => None,
                Err(other) => unreachable!("{}: {other}", file.display()),
            }
        })
        .await;
    }
}

/// Sets the status that the LeaderWorkerSet controller would set.
async fn lead(namespace: &TestNamespace) {
    let sets: Api<DynamicObject> =
        Api::default_namespaced_with(namespace.client.clone(), &ResourceKind::LeaderWorkerSet.resource());
    for set in sets.list(&ListParams::default()).await.unwrap() {
        let replicas = &set.data["spec"]["replicas"];
        let status = json!({ "status": { "replicas": replicas, "readyReplicas": replicas, "updatedReplicas": replicas } });
        let name = set.metadata.name.unwrap();
        if set.data["status"] != status["status"] {
            sets.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
        }
    }
}

/// Groups that are not ready, with their conditions, and the number of all groups.
async fn unready(namespace: &TestNamespace) -> (BTreeMap<String, String>, usize) {
    let groups: Api<RoleBasedGroup> = Api::default_namespaced(namespace.client.clone());
    let groups = groups.list(&ListParams::default()).await.unwrap().items;
    let (mut unready, count) = (BTreeMap::new(), groups.len());
    for group in groups {
        if !condition_is(&group, &[("Ready", "True"), ("Progressing", "False")]) {
            let conditions = group.status.unwrap_or_default().conditions;
            unready.insert(group.metadata.name.unwrap(), format!("{conditions:?}"));
        }
    }
    (unready, count)
}

/// Number of groups in a file.
fn expected_groups(file: &Path) -> usize {
    let count = |object: &Value| match object["kind"].as_str() {
        Some("RoleBasedGroup") => 1,
        Some("RoleBasedGroupSet") => object["spec"]["replicas"].as_u64().unwrap_or(1).try_into().unwrap(),
        _ => 0,
    };
    documents(file).iter().map(count).sum()
}

async fn converges(plane: &ControlPlane, file: &Path) {
    let group_count = expected_groups(file);
    let namespace = plane.namespace("example").await.unwrap();
    let _kubelet = FakeKubelet::start(namespace.client.clone(), &namespace.name, KubeletTimings::default())
        .await
        .unwrap();
    apply(&namespace.client, &namespace.name, file).await;
    let mut last = BTreeMap::new();
    let ready = async {
        loop {
            lead(&namespace).await;
            // Of one list: a group that is created between two would count as ready.
            let created;
            (last, created) = unready(&namespace).await;
            if last.is_empty() && created == group_count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let result = tokio::time::timeout(TEST_TIMEOUT, ready).await;
    assert!(result.is_ok(), "{}: {group_count} groups, not ready: {last:#?}", file.display());
    let expected = objects::expected(&documents(file));
    if file.ends_with(RECORDED.0) {
        assert_eq!(expected, objects::recorded(RECORDED.1));
    }
    assert_eq!(objects::found(&namespace.client).await, expected, "{}", file.display());
    namespace.delete().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_example_converges_to_upstreams_objects() {
    // A control plane of its own: the webhooks and the operator watch all namespaces.
    let plane = ControlPlane::start().await.unwrap();
    let system = plane.namespace("system").await.unwrap();
    install(&system.client).await;
    for kind in [ResourceKind::LeaderWorkerSet, ResourceKind::PodGroup, ResourceKind::VolcanoPodGroup] {
        define(&system.client, kind).await;
    }
    let webhooks = webhooks(&system).await;
    let options = OperatorOptions { kubeconfig: Some(plane.kubeconfig()), ..OperatorOptions::default() };
    let mut files = files(EXAMPLES);
    assert!(files.len() > 60, "only {}", files.len());
    files.extend(self::files(OWN_EXAMPLES));
    let story = async {
        converts(&system).await;
        // Files use profiles from other files.
        let has_profile = |file: &&PathBuf| {
            documents(file).iter().any(|object| object["kind"] == ResourceKind::Profile.name())
        };
        let (first, others): (Vec<_>, Vec<_>) = files.iter().partition(has_profile);
        for some in [first, others] {
            stream::iter(some).for_each_concurrent(FILES, |file| converges(&plane, file)).await;
        }
    };
    run_with_operator(options, story).await;
    webhooks.token().cancel();
}

/// A pod has what the template claims from DRA drivers, also if the template is one of the group's.
#[tokio::test(flavor = "multi_thread")]
async fn our_examples_run_and_keep_resource_claims() {
    let stage = TestOperator::begin("own-examples").await;
    let names = |file: &PathBuf| file.file_stem().unwrap().to_str().unwrap().to_owned();
    let files = files(OWN_EXAMPLES);
    assert_eq!(
        files.iter().map(names).collect::<Vec<_>>(),
        ["attention-ffn-vllm", "expert-parallel-sglang", "expert-parallel-vllm", "nvlink-compute-domain"]
    );
    for file in &files {
        apply(&stage.client, &stage.namespace.name, file).await;
    }
    eventually("all groups are ready", async || {
        let (unready, count) = unready(&stage.namespace).await;
        (unready.is_empty() && count == files.len()).then_some(())
    })
    .await;
    let pods = pods(&stage.client).await;
    let of_group = |group: &str| {
        let is_of = |pod: &&Pod| pod.metadata.labels.as_ref().unwrap()[keys::GROUP_NAME] == group;
        pods.iter().filter(is_of).collect::<Vec<_>>()
    };
    assert_eq!(["afd", "wide-ep", "vllm-ep", "pair"].map(|group| of_group(group).len()), [2, 6, 2, 3]);
    for pod in of_group("pair") {
        let spec = pod.spec.as_ref().unwrap();
        let claim = &spec.resource_claims.as_ref().unwrap()[0];
        assert_eq!(
            (claim.name.as_str(), claim.resource_claim_template_name.as_deref()),
            ("channel", Some("pair-channel"))
        );
        let resources = spec.containers[0].resources.as_ref().unwrap();
        assert_eq!(resources.claims.as_ref().unwrap()[0].name, "channel");
    }
    let arguments = of_group("afd").into_iter().map(|pod| {
        let role = pod.metadata.annotations.as_ref().unwrap()["moongate.io/role"].clone();
        (role, pod.spec.as_ref().unwrap().containers[0].args.as_ref().unwrap().last().unwrap().clone())
    });
    for (role, config) in arguments {
        // Only the attention pod gets requests.
        assert!(config.contains(if role == "plain" { r#""role":"attention""# } else { r#""role":"ffn""# }));
        assert!(config.contains(r#""host":"$(RBG_ROLE_INSTANCE_NAME)-ffn-0.s-afd-worker""#), "{config}");
    }
    stage.end().await;
}
