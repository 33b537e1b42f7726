//! The control plane with a node, and our release on it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams, PostParams};
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::json;

use super::host::{self, run};
use super::pods::{ProcessPodRuntime, program};
use super::services::ServiceProxy;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/moongate");
const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/moongate/examples/simulated.yaml");
const VALUES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/whole");
const HELM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/helm");
const FOLDER: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/whole");
/// Long, because it only says when something hangs.
const TEST_TIMEOUT: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) struct EndToEndCluster {
    plane: ControlPlane,
    pub(crate) namespace: TestNamespace,
    /// Of what programs write down, which stays for a look.
    pub(crate) folder: PathBuf,
    runtime: ProcessPodRuntime,
    _kubelet: FakeKubelet,
}

/// Waits until there is an answer.
pub(crate) async fn wait_until<T>(what: &str, mut ask: impl AsyncFnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(last) => assert!(begun.elapsed() < TEST_TIMEOUT, "not in time: {what}: {last}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

impl EndToEndCluster {
    /// Starts everything but the release.
    pub(crate) async fn start() -> Self {
        let plane = ControlPlane::start().await.unwrap();
        let namespace = plane.namespace("whole").await.unwrap();
        let config = plane.config(&namespace.name).await.unwrap();
        let port = config.cluster_url.port_u16().unwrap();
        ServiceProxy::start(&namespace.client, ([127, 0, 0, 1], port).into()).await;
        let folder = PathBuf::from(FOLDER);
        // That of the run before.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        host::resolve(&folder, &namespace.name);
        let pods = ProcessPodRuntime::new(namespace.client.clone(), folder.join("pods"));
        let pace = KubeletTimings::default();
        let kubelet =
            FakeKubelet::run(namespace.client.clone(), &namespace.name, pace, pods.clone()).await.unwrap();
        let cluster = Self { plane, namespace, folder, runtime: pods, _kubelet: kubelet };
        cluster.monitoring_kinds().await;
        cluster
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.plane.kubeconfig()
    }

    /// Runs helm for the release, with the simulated example and what a file of this folder changes of it.
    pub(crate) async fn helm(&self, command: &str, values: &str, settings: &[String]) {
        let kubeconfig = self.kubeconfig();
        let place = ["--namespace", &self.namespace.name, "--kubeconfig", kubeconfig.to_str().unwrap()];
        let values = format!("{VALUES}/{values}.yaml");
        let chart = [command, super::RELEASE, CHART, "--values", EXAMPLE, "--values", &values];
        let mut given: Vec<String> =
            chart.iter().chain(&place).map(|&argument| argument.to_owned()).collect();
        given.extend(settings.iter().map(|setting| format!("--set={setting}")));
        let helm = move || run(HELM, &given.iter().map(String::as_str).collect::<Vec<_>>());
        tokio::task::spawn_blocking(helm).await.unwrap();
    }

    /// Gives containers of the group another image, as a person does.
    pub(crate) async fn upgrade(&self, containers: &[&str], image: &str) {
        let mut given: Vec<String> = ["kubectl", "upgrade", super::RELEASE].map(str::to_owned).into();
        given.extend(containers.iter().map(|container| format!("--image={container}={image}")));
        given.push(format!("--kubeconfig={}", self.kubeconfig().display()));
        given.push(format!("--namespace={}", self.namespace.name));
        let upgrade = move || run(&program(), &given.iter().map(String::as_str).collect::<Vec<_>>());
        tokio::task::spawn_blocking(upgrade).await.unwrap();
    }

    /// Kills the process of a pod's container.
    pub(crate) async fn kill(&self, pod: &str, container: &str) {
        let pods = self.pods().await;
        let pod = pods.iter().find(|one| name(one) == pod).unwrap();
        self.runtime.kill(pod, container).await;
    }

    /// Kinds of the Prometheus operator, as far as it takes to make objects of them.
    async fn monitoring_kinds(&self) {
        let definitions: Api<CustomResourceDefinition> = Api::all(self.namespace.client.clone());
        for (kind, plural) in [("PodMonitor", "podmonitors"), ("PrometheusRule", "prometheusrules")] {
            let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
            let version = json!({ "name": "v1", "served": true, "storage": true,
                "schema": { "openAPIV3Schema": schema } });
            let definition = json!({
                "metadata": { "name": format!("{plural}.monitoring.coreos.com") },
                "spec": { "group": "monitoring.coreos.com", "scope": "Namespaced", "versions": [version],
                    "names": { "kind": kind, "plural": plural, "singular": plural.trim_end_matches('s') } },
            });
            let definition = serde_json::from_value(definition).unwrap();
            definitions.create(&PostParams::default(), &definition).await.unwrap();
        }
    }

    /// Waits until every pod is ready and the group says of its present spec that nothing is left to do.
    pub(crate) async fn settled(&self) {
        let groups: Api<RoleBasedGroup> = Api::default_namespaced(self.namespace.client.clone());
        wait_until("the release is ready", async || {
            let group = groups.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
            let group = group.items.into_iter().next().ok_or("there is no group")?;
            let status = group.status.unwrap_or_default();
            let has = |kind: &str, value: &str| {
                status.conditions.iter().any(|one| one.kind == kind && one.status == value)
            };
            let current = status.observed_generation == group.metadata.generation;
            if !(current && has("Ready", "True") && has("RollingUpdateInProgress", "False")) {
                return Err(format!("{:?}", status.conditions));
            }
            let deployments = Api::<Deployment>::default_namespaced(self.namespace.client.clone());
            let deployments = deployments.list(&ListParams::default()).await.unwrap().items;
            if !deployments.iter().all(is_rolled_out) {
                return Err("a Deployment is being rolled out".to_owned());
            }
            let waiting: Vec<String> =
                self.pods().await.iter().filter(|pod| !is_ready(pod)).map(name).collect();
            if waiting.is_empty() { Ok(()) } else { Err(format!("{waiting:?} are not ready")) }
        })
        .await;
    }

    /// Where the first pod of a component of the chart is.
    pub(crate) async fn address_of(&self, component: &str) -> String {
        let is_one = |pod: &&Pod| {
            let mut labels = pod.metadata.labels.iter().flatten();
            labels.any(|(key, value)| key == "app.kubernetes.io/component" && value == component)
        };
        self.pods().await.iter().find(is_one).and_then(|pod| pod.status.clone()?.pod_ip).unwrap()
    }

    pub(crate) async fn pods(&self) -> Vec<Pod> {
        let pods = Api::<Pod>::default_namespaced(self.namespace.client.clone());
        pods.list(&ListParams::default()).await.unwrap().items
    }
}

pub(crate) fn name(pod: &Pod) -> String {
    pod.metadata.name.clone().unwrap()
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.clone().any(|one| one.type_ == "Ready" && one.status == "True")
}

fn is_rolled_out(deployment: &Deployment) -> bool {
    let status = deployment.status.clone().unwrap_or_default();
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
    status.observed_generation == deployment.metadata.generation
        && [status.replicas, status.updated_replicas, status.ready_replicas]
            .iter()
            .all(|count| *count == wanted)
}
