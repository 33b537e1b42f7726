//! The operator needs all permissions of `manifests/permissions.yaml`, and no others.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
    PostParams,
};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use moongate_operator::{GangScheduler, OperatorOptions, ResourceKind, SizeLimits, webhooks};
use moongate_runtime::{Supervisor, bind};
use moongate_testkit::{AuditEvent, ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use rbg_api::v1alpha2::{
    RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleBasedGroupSet, RoleBasedGroupWarmup,
};
use rbg_api::{keys, v1alpha2::RoleInstance};
use serde_json::{Value, json};

use super::external_kinds::define;
use super::rbac_rules::{RbacPermission, documents, granted, used, waiting_owners};
use super::{eventually, install, is_settled, role, run_with_operator};

const SYSTEM: &str = "moongate-system";
const ACCOUNT: &str = "moongate-operator";

/// Requested only if a group of a set exists that no watch has reported yet.
const BY_CHANCE: (&str, &str, &str) = ("workloads.x-k8s.io", "rolebasedgroups", "get");

struct PermissionsFixture {
    plane: ControlPlane,
    namespace: TestNamespace,
    /// A namespace with the operator's account.
    operator: PathBuf,
}

impl PermissionsFixture {
    async fn begin() -> Self {
        let plane = ControlPlane::start_audited().await.unwrap();
        let namespace = plane.namespace("permissions").await.unwrap();
        let client = namespace.client.clone();
        install(&client).await;
        for kind in [ResourceKind::LeaderWorkerSet, ResourceKind::PodGroup, ResourceKind::VolcanoPodGroup] {
            define(&client, kind).await;
        }
        for document in documents() {
            let text = |pointer: &str| document.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
            let (group, version) = text("/apiVersion").split_once('/').unwrap_or(("", text("/apiVersion")));
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, text("/kind")));
            let api: Api<DynamicObject> = match text("/metadata/namespace") {
                "" => Api::all_with(client.clone(), &resource),
                namespace => Api::namespaced_with(client.clone(), namespace, &resource),
            };
            let params = PatchParams::apply("test");
            api.patch(text("/metadata/name"), &params, &Patch::Apply(&document)).await.unwrap();
        }
        let service = json!({ "metadata": { "name": ACCOUNT },
            "spec": { "type": "ExternalName", "externalName": "localhost" } });
        let service: Service = serde_json::from_value(service).unwrap();
        let services = Api::namespaced(client, SYSTEM);
        services.create(&PostParams::default(), &service).await.unwrap();
        permissions_apply(&namespace.client).await;
        let operator = plane.kubeconfig_of(SYSTEM, ACCOUNT).await.unwrap();
        Self { plane, namespace, operator }
    }

    fn api<T>(&self) -> Api<T>
    where
        T: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::default_namespaced(self.namespace.client.clone())
    }

    /// Runs an operator with its webhooks while `act` runs.
    async fn run(&self, gang: GangScheduler, act: impl Future<Output = ()>) {
        let supervisor = Supervisor::new();
        let options = OperatorOptions {
            kubeconfig: Some(self.operator.clone()),
            lease: Some((SYSTEM.to_owned(), "rbg-controller".to_owned())),
            gang_scheduler: gang,
            ..OperatorOptions::default()
        };
        self.hook(gang, &supervisor).await;
        run_with_operator(options, act).await;
        supervisor.token().cancel();
    }

    async fn hook(&self, gang: GangScheduler, supervisor: &Supervisor) {
        let file = Kubeconfig::read_from(&self.operator).unwrap();
        let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let options = webhooks::WebhookOptions {
            namespace: SYSTEM.to_owned(),
            service: ACCOUNT.to_owned(),
            port: listener.local_addr().unwrap().port(),
            secret: "moongate-webhooks".to_owned(),
            size_limits: SizeLimits::default(),
            gang_scheduler: gang,
            ownership: webhooks::OwnershipTiming::default(),
        };
        let client = Client::try_from(config).unwrap();
        webhooks::start(listener, client, options, Arc::default(), supervisor).unwrap();
    }

    /// Creates an object as soon as its webhook responds.
    async fn create<T>(&self, object: Value)
    where
        T: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
        T: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
    {
        let (api, object) = (self.api::<T>(), serde_json::from_value(object).unwrap());
        eventually("the object is created", async || {
            match api.create(&PostParams::default(), &object).await {
                Ok(_) => Some(()),
                Err(kube::Error::Api(status)) if status.message.contains("webhook") => None,
                Err(other) => unreachable!("{other}"),
            }
        })
        .await;
    }

    /// All requests of the operator. None was forbidden.
    fn audited_requests(&self) -> Vec<AuditEvent> {
        let events = self.plane.audit().unwrap();
        let refused: Vec<_> = events.iter().filter(|event| event.is_denied()).collect();
        assert!(refused.is_empty(), "{refused:#?}");
        events
    }

    async fn patch(&self, group: &str, body: Value) {
        let groups = self.api::<RoleBasedGroup>();
        groups.patch(group, &PatchParams::default(), &Patch::Merge(body)).await.unwrap();
    }

    /// Waits until the operator has sent such a request.
    async fn asks(&self, verb: &str, resource: &str) {
        eventually(&format!("{verb} {resource}"), async || {
            let events = self.audited_requests();
            let is_it = |(_, of, what): &RbacPermission| (what.as_str(), of.as_str()) == (verb, resource);
            used(&events).iter().any(is_it).then_some(())
        })
        .await;
    }

    async fn settled(&self, group: &str) {
        let groups = self.api::<RoleBasedGroup>();
        eventually(&format!("{group} is settled"), async || {
            self.audited_requests();
            is_settled(&groups.get_opt(group).await.unwrap()?).then_some(())
        })
        .await;
    }
}

/// Waits until the API server, which applies new roles a moment after it has stored them, allows the account something of every
/// rule.
async fn permissions_apply(client: &Client) {
    let reviews = Api::all(client.clone());
    let list = |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).unwrap_or_default() };
    for document in documents() {
        for rule in document["rules"].as_array().into_iter().flatten() {
            let (groups, resources, verbs) = (&rule["apiGroups"], &rule["resources"], &rule["verbs"]);
            let (resource, verb) = (&list(resources)[0], &list(verbs)[0]);
            let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
            let review: SubjectAccessReview = serde_json::from_value(json!({ "spec": {
                "user": format!("system:serviceaccount:{SYSTEM}:{ACCOUNT}"),
                "resourceAttributes": { "namespace": SYSTEM, "group": list(groups)[0], "resource": resource,
                    "subresource": subresource, "verb": verb,
                    "name": list(&rule["resourceNames"]).first() },
            }}))
            .unwrap();
            eventually(&format!("{verb} {resource} is allowed"), async || {
                let answer = reviews.create(&PostParams::default(), &review).await.unwrap();
                answer.status.is_some_and(|status| status.allowed).then_some(())
            })
            .await;
        }
    }
}

fn new_group(name: &str, roles: Value) -> Value {
    json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
        "metadata": { "name": name }, "spec": { "roles": roles } })
}

fn of_type(mut role: Value, workload: &str) -> Value {
    role["annotations"] = json!({ keys::ROLE_WORKLOAD_TYPE: workload });
    role
}

#[tokio::test(flavor = "multi_thread")]
async fn operator_permissions_are_necessary_and_sufficient() {
    let scene = PermissionsFixture::begin().await;
    let client = scene.namespace.client.clone();
    let _kubelet =
        FakeKubelet::start(client.clone(), &scene.namespace.name, KubeletTimings::default()).await.unwrap();
    let mut finalizers = BTreeSet::new();
    scene
        .run(GangScheduler::SchedulerPlugins, async {
            finalizers = every_workload(&scene).await;
            revisions(&scene).await;
            names_that_are_taken(&scene).await;
            existing_service(&scene).await;
            sets(&scene).await;
            finalizers.extend(warmup(&scene).await);
            coordination(&scene).await;
            registration(&scene).await;
            finalizers.extend(waiting_owners(&client).await);
        })
        .await;
    scene.run(GangScheduler::Volcano, gang(&scene, "v", ResourceKind::VolcanoPodGroup)).await;

    let (group, resource, verb) = BY_CHANCE;
    let by_chance = [(group.to_owned(), resource.to_owned(), verb.to_owned())];
    let used: BTreeSet<_> =
        used(&scene.audited_requests()).into_iter().chain(by_chance).chain(finalizers).collect();
    let unused: Vec<_> = granted().difference(&used).cloned().collect();
    assert!(unused.is_empty(), "granted, but not used: {unused:#?}");
}

/// Returns permissions whose need depends on the finalizers of others.
async fn every_workload(scene: &PermissionsFixture) -> BTreeSet<RbacPermission> {
    let mut scaled = role("ris", 1, "engine:1");
    scaled["scalingAdapter"] = json!({ "enable": true });
    let template = role("lws", 1, "engine:1")["standalonePattern"]["template"].clone();
    let leader =
        json!({ "name": "lws", "replicas": 1, "leaderWorkerPattern": { "size": 2, "template": template } });
    let roles = json!([
        scaled,
        of_type(role("sts", 1, "engine:1"), "apps/v1/StatefulSet"),
        of_type(role("deploy", 1, "engine:1"), "apps/v1/Deployment"),
        of_type(leader, "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet"),
    ]);
    scene.create::<RoleBasedGroup>(new_group("g", roles.clone())).await;
    scene.asks("create", "leaderworkersets").await;
    let sets: Api<DynamicObject> = Api::default_namespaced_with(
        scene.namespace.client.clone(),
        &ResourceKind::LeaderWorkerSet.resource(),
    );
    let status = json!({ "status": { "replicas": 1, "readyReplicas": 1, "updatedReplicas": 1, "hpaPodSelector": "a=b" } });
    sets.patch_status("g-lws", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    scene.settled("g").await;
    let finalizers = waiting_owners(&scene.namespace.client).await;

    let adapters = scene.api::<RoleBasedGroupScalingAdapter>();
    scene.asks("patch", "rolebasedgroupscalingadapters/status").await;
    let scale = Patch::Merge(json!({ "spec": { "replicas": 2 } }));
    adapters.patch_scale("g-ris", &PatchParams::default(), &scale).await.unwrap();
    scene.asks("update", "rolebasedgroups").await;
    scene.settled("g").await;

    // The webhook also reads the adapter that scales the role.
    let mut fewer = json!([roles[0]]);
    fewer[0]["replicas"] = 2.into();
    scene.patch("g", json!({ "spec": { "roles": fewer } })).await;
    for workload in ["statefulsets", "deployments", "leaderworkersets"] {
        scene.asks("delete", workload).await;
    }
    fewer[0]["replicas"] = 1.into();
    fewer[0]["scalingAdapter"] = json!({ "enable": false });
    scene.patch("g", json!({ "spec": { "roles": fewer } })).await;
    scene.asks("delete", "rolebasedgroupscalingadapters").await;
    scene.asks("delete", "roleinstances").await;
    scene.patch("g", json!({ "spec": { "roles": [role("other", 1, "engine:1")] } })).await;
    scene.asks("delete", "roleinstancesets").await;
    scene.settled("g").await;
    scene.patch("g", json!({ "metadata": { "annotations": { keys::TOPOLOGY_LADDER: "node" } } })).await;
    scene.asks("patch", "roleinstances").await;
    finalizers
}

/// Creates more revisions than are kept, restores one, and forces a recreation of pods.
async fn revisions(scene: &PermissionsFixture) {
    for image in ["engine:1", "engine:2", "engine:1", "engine:3", "engine:4", "engine:5", "engine:6"] {
        scene.patch("g", json!({ "spec": { "roles": [role("other", 1, image)] } })).await;
        scene.settled("g").await;
    }
    let mut other = role("other", 1, "engine:6");
    other["standalonePattern"]["template"]["spec"]["hostNetwork"] = true.into();
    scene.patch("g", json!({ "spec": { "roles": [other] } })).await;
    scene.settled("g").await;
}

/// Objects of other owners have the names of ours: they are read and not changed.
async fn names_that_are_taken(scene: &PermissionsFixture) {
    let group = new_group("taken", json!([role("a", 1, "engine:1")]));
    scene.create::<RoleBasedGroup>(group.clone()).await;
    scene.settled("taken").await;
    let of_group = ListParams::default().labels(&format!("{}=taken", keys::GROUP_NAME));
    let revision = scene.api::<ControllerRevision>().list(&of_group).await.unwrap().items;
    let revision = revision.iter().find(|one| one.metadata.owner_references.is_some()).unwrap();
    let revision = json!({ "metadata": { "name": revision.metadata.name }, "revision": 1, "data": {} });
    scene.api::<RoleBasedGroup>().delete("taken", &DeleteParams::background()).await.unwrap();
    eventually("the group's pods are deleted", async || {
        scene.api::<Pod>().get_opt("taken-a-0").await.unwrap().is_none().then_some(())
    })
    .await;
    let name = revision["metadata"]["name"].as_str().unwrap().to_owned();
    eventually("the revision is deleted", async || {
        scene.api::<ControllerRevision>().get_opt(&name).await.unwrap().is_none().then_some(())
    })
    .await;

    let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    scene.create::<ControllerRevision>(revision).await;
    let instance = json!({ "metadata": { "name": "taken-a-0" }, "spec": { "components": [] } });
    scene.create::<RoleInstance>(instance).await;
    let pod = json!({ "metadata": { "name": "taken-a-0" },
        "spec": { "containers": [{ "name": "a", "image": "a" }] } });
    scene.create::<Pod>(pod).await;
    scene.create::<RoleBasedGroup>(group).await;
    scene.asks("get", "controllerrevisions").await;
    scene.api::<ControllerRevision>().delete(&name, &at_once).await.unwrap();
    scene.asks("get", "roleinstances").await;
    scene.api::<RoleInstance>().delete("taken-a-0", &at_once).await.unwrap();
    scene.asks("get", "pods").await;
    scene.api::<Pod>().delete("taken-a-0", &at_once).await.unwrap();
    scene.settled("taken").await;
}

/// A Service that the user created before the group, as in upstream's `custom-components-ordered-discovery.yaml`.
async fn existing_service(scene: &PermissionsFixture) {
    let service = json!({ "metadata": { "name": "s-e-a" }, "spec": { "clusterIP": "None",
        "selector": { "app": "e" }, "ports": [{ "name": "placeholder", "port": 1 }] } });
    scene.create::<Service>(service).await;
    scene.create::<RoleBasedGroup>(new_group("e", json!([role("a", 1, "engine:1")]))).await;
    scene.settled("e").await;
    let service = scene.api::<Service>().get("s-e-a").await.unwrap();
    assert_eq!(service.metadata.owner_references.unwrap()[0].kind, "RoleInstanceSet");
}

async fn sets(scene: &PermissionsFixture) {
    let template = |image: &str| json!({ "spec": { "roles": [role("a", 1, image)] } });
    let set = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroupSet",
        "metadata": { "name": "s" }, "spec": { "replicas": 2, "groupTemplate": template("engine:1") } });
    scene.create::<RoleBasedGroupSet>(set).await;
    scene.settled("s-1").await;
    let body = json!({ "spec": { "replicas": 1, "groupTemplate": template("engine:2") } });
    scene.api::<RoleBasedGroupSet>().patch("s", &PatchParams::default(), &Patch::Merge(body)).await.unwrap();
    scene.asks("delete", "rolebasedgroups").await;
    scene.settled("s-0").await;
}

/// Returns permissions whose need depends on the finalizers of others.
async fn warmup(scene: &PermissionsFixture) -> BTreeSet<RbacPermission> {
    let target = json!({ "nodeNames": [format!("node-{}", scene.namespace.name)],
        "imagePreload": { "images": ["engine:1"] } });
    let warmup = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroupWarmup",
        "metadata": { "name": "w" }, "spec": { "targetNodes": target } });
    scene.create::<RoleBasedGroupWarmup>(warmup).await;
    let warmups = scene.api::<RoleBasedGroupWarmup>();
    eventually("the node is warmed up", async || {
        let status = warmups.get("w").await.unwrap().status?;
        (status.phase == "Completed").then_some(())
    })
    .await;
    let finalizers = waiting_owners(&scene.namespace.client).await;
    let end = Patch::Merge(json!({ "spec": { "policies": { "ttlSecondsAfterFinished": 0 } } }));
    warmups.patch("w", &PatchParams::default(), &end).await.unwrap();
    scene.asks("delete", "rolebasedgroupwarmups").await;
    finalizers
}

/// Roles that are scaled together, as in v1alpha1, and pods that are scheduled together.
async fn coordination(scene: &PermissionsFixture) {
    let rule =
        json!([{ "name": "both", "roles": ["a", "b"], "strategy": { "scaling": { "maxSkew": "50%" } } }]);
    let mut group = new_group("c", json!([role("a", 1, "engine:1"), role("b", 1, "engine:1")]));
    group["metadata"]["annotations"] = json!({ rbg_api::conversion::COORDINATION: rule.to_string() });
    scene.create::<RoleBasedGroup>(group).await;
    scene.settled("c").await;
    gang(scene, "k", ResourceKind::PodGroup).await;
}

async fn gang(scene: &PermissionsFixture, name: &str, kind: ResourceKind) {
    let mut group = new_group(name, json!([role("a", 1, "engine:1")]));
    group["metadata"]["annotations"] = json!({ keys::GANG_SCHEDULING: "true" });
    scene.create::<RoleBasedGroup>(group).await;
    let pod_groups: Api<DynamicObject> =
        Api::default_namespaced_with(scene.namespace.client.clone(), &kind.resource());
    eventually("the PodGroup exists", async || pod_groups.get_opt(name).await.unwrap()).await;
    let body = json!({ "metadata": { "annotations": { keys::GANG_SCHEDULING: null } } });
    scene.patch(name, body).await;
    eventually("the PodGroup is deleted", async || {
        pod_groups.get_opt(name).await.unwrap().is_none().then_some(())
    })
    .await;
}

/// Changes by others are reverted.
async fn registration(scene: &PermissionsFixture) {
    let client = &scene.namespace.client;
    let spoil = Patch::Merge(json!({ "data": { "tls.crt": "" } }));
    let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM);
    secrets.patch("moongate-webhooks", &PatchParams::default(), &spoil).await.unwrap();
    scene.asks("update", "secrets").await;
    let name = "rbgs-validating-webhook-configuration";
    let configurations: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let mut live = configurations.get(name).await.unwrap();
    live.webhooks.as_mut().unwrap().truncate(1);
    // The operator may revert it at the same moment.
    let _ = configurations.replace(name, &PostParams::default(), &live).await;
    scene.asks("update", "validatingwebhookconfigurations").await;
}
