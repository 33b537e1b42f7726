//! The control plane, the operator's account, and the operator's requests.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Sub;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::PostParams;
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use serde_json::json;

const ACCOUNT: &str = "operator";
/// Settings of the recorded runs of upstream's controller manager.
const PACE: KubeletTimings = KubeletTimings {
    start: Duration::from_millis(300),
    restart: Duration::from_millis(500),
    stop: Duration::from_millis(200),
};

pub(crate) struct BenchCluster {
    plane: ControlPlane,
    _kubelet: FakeKubelet,
    pub(crate) namespace: TestNamespace,
    /// Client configuration of the operator.
    pub(crate) operator: PathBuf,
}

impl BenchCluster {
    pub(crate) async fn start(crds: Option<&Path>) -> Self {
        let plane = ControlPlane::start_audited().await.unwrap();
        let namespace = plane.namespace("scale").await.unwrap();
        let client = &namespace.client;
        let definitions = Api::<CustomResourceDefinition>::all(client.clone());
        for crd in crds.map_or_else(rbg_api::crds::all, definitions_in) {
            definitions.create(&PostParams::default(), &crd).await.unwrap();
        }
        let is_established = |crd: &CustomResourceDefinition| {
            let conditions = crd.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.into_iter().any(|one| one.type_ == "Established" && one.status == "True")
        };
        while !definitions.list(&Default::default()).await.unwrap().iter().all(is_established) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let account: ServiceAccount =
            serde_json::from_value(json!({ "metadata": { "name": ACCOUNT } })).unwrap();
        Api::default_namespaced(client.clone()).create(&PostParams::default(), &account).await.unwrap();
        let binding: ClusterRoleBinding = serde_json::from_value(json!({ "metadata": { "name": ACCOUNT },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin" },
            "subjects": [{ "kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace.name }] }))
        .unwrap();
        Api::all(client.clone()).create(&PostParams::default(), &binding).await.unwrap();
        let operator = plane.kubeconfig_of(&namespace.name, ACCOUNT).await.unwrap();
        let kubelet = FakeKubelet::start(client.clone(), &namespace.name, PACE).await.unwrap();
        Self { plane, _kubelet: kubelet, namespace, operator }
    }

    /// Length of the audit log, which grows with every request of the operator.
    pub(crate) fn audit_log_length(&self) -> u64 {
        self.plane.audit_log().metadata().unwrap().len()
    }

    /// Requests of the operator so far.
    pub(crate) fn requests(&self) -> MethodCounts {
        let mut requests = BTreeMap::new();
        for asked in self.plane.audit().unwrap() {
            let method = match asked.verb.as_str() {
                "create" => "POST",
                "update" => "PUT",
                "patch" => "PATCH",
                "delete" | "deletecollection" => "DELETE",
                _ => "GET",
            };
            *requests.entry(method).or_default() += 1;
        }
        MethodCounts(requests)
    }
}

fn definitions_in(folder: &Path) -> Vec<CustomResourceDefinition> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let texts = files.map(|file| std::fs::read_to_string(file).unwrap());
    let all = texts.map(|text| serde_saphyr::from_str::<CustomResourceDefinition>(&text).unwrap());
    all.map(|mut crd| {
        crd.spec.conversion = None;
        crd
    })
    .collect()
}

/// Number of requests by method.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MethodCounts(BTreeMap<&'static str, u64>);

impl MethodCounts {
    pub(crate) fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

impl Sub for MethodCounts {
    type Output = Self;

    fn sub(mut self, before: Self) -> Self {
        for (method, requests) in before.0 {
            *self.0.entry(method).or_default() -= requests;
        }
        self
    }
}

impl fmt::Display for MethodCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> =
            self.0.iter().map(|(method, requests)| format!("{method} {requests}")).collect();
        f.write_str(&all.join(", "))
    }
}
