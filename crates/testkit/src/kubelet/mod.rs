//! A kubelet without containers: binds pods, runs them, honours readiness gates, restarts a container whose image changes.
//! What runs in pods is a [`PodRuntime`]'s.

mod container;
mod pods;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::ControlPlaneError;
use pods::KubeletContext;

/// Between two signs of life. Without them the node's pods are marked after 40 s.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// How long things take, beside what the runtime takes.
#[derive(Debug, Clone, Copy)]
pub struct KubeletTimings {
    /// From a pod's binding until its containers run.
    pub start: Duration,
    /// For which a container is down when its image changes.
    pub restart: Duration,
    /// From a pod's deletion until it is gone.
    pub stop: Duration,
}

impl Default for KubeletTimings {
    fn default() -> Self {
        let little = Duration::from_millis(100);
        Self { start: little, restart: little, stop: little }
    }
}

/// What runs in pods that do not end by themselves. Each pod is looked after by itself, so that calls for several come at a time.
pub trait PodRuntime: Send + Sync + 'static {
    /// A pod begins. Answers its address. It is asked once for each pod, unless another kubelet has begun it.
    fn start(&self, pod: &Pod) -> impl Future<Output = String> + Send;

    /// A container of the pod has been given another image.
    fn restart(&self, pod: &Pod, container: &str) -> impl Future<Output = ()> + Send;

    /// The pod is deleted, and is gone when this is done. It is asked again if that is not heard.
    fn stop(&self, _pod: &Pod) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// How a container is that was started.
    fn state(&self, _pod: &Pod, _container: &str) -> ContainerHealth {
        ContainerHealth::default()
    }

    /// Waits until the state of one of the pod's containers has changed since it was last asked for.
    fn changed(&self, _pod: &Pod) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

/// What a runtime knows of a container. By itself it runs and is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContainerHealth {
    /// Whether its process is there.
    pub is_running: bool,
    /// Whether its probes say that it can be used.
    pub is_ready: bool,
    /// How often it has ended by itself and was started again.
    pub exit_count: i32,
}

impl Default for ContainerHealth {
    fn default() -> Self {
        Self { is_running: true, is_ready: true, exit_count: 0 }
    }
}

/// The runtime of pods in which nothing runs.
#[derive(Debug, Clone, Copy)]
pub struct NoopRuntime;

impl PodRuntime for NoopRuntime {
    async fn start(&self, pod: &Pod) -> String {
        pod_address(pod, 10)
    }

    async fn restart(&self, _: &Pod, _: &str) {}
}

/// Runs the pods of one namespace. It ends when it is dropped.
#[derive(Debug)]
pub struct FakeKubelet {
    _tasks: JoinSet<()>,
}

impl FakeKubelet {
    /// Starts it with a node of its own, to which it binds all pods. The client looks into `namespace` unless told otherwise.
    ///
    /// # Errors
    /// The node cannot be made.
    pub async fn start(
        client: Client,
        namespace: &str,
        pace: KubeletTimings,
    ) -> Result<Self, ControlPlaneError> {
        Self::run(client, namespace, pace, NoopRuntime).await
    }

    /// The same, with something that runs in pods.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn run(
        client: Client,
        namespace: &str,
        pace: KubeletTimings,
        runtime: impl PodRuntime,
    ) -> Result<Self, ControlPlaneError> {
        let name = format!("node-{namespace}");
        let nodes = Api::<Node>::all(client.clone());
        let node: Node = read(json!({ "metadata": { "name": name } }))?;
        nodes.create(&PostParams::default(), &node).await?;
        // Without any resources, so that the scheduler leaves it alone.
        let status = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
        nodes.patch_status(&name, &PatchParams::default(), &Patch::Strategic(status)).await?;
        let leases = Api::<Lease>::namespaced(client.clone(), "kube-node-lease");
        let place = KubeletContext::new(Api::default_namespaced(client), Some(name.clone()), pace, runtime);
        let mut tasks = JoinSet::new();
        tasks.spawn(renew_node_lease(leases, name));
        tasks.spawn(pods::watch_pods(Arc::new(place)));
        Ok(Self { _tasks: tasks })
    }

    /// Starts one for whatever nodes the scheduler binds the pods of the client's namespace to.
    pub fn start_for_scheduled(client: Client, pace: KubeletTimings) -> Self {
        let place = KubeletContext::new(Api::default_namespaced(client), None, pace, NoopRuntime);
        let mut tasks = JoinSet::new();
        tasks.spawn(pods::watch_pods(Arc::new(place)));
        Self { _tasks: tasks }
    }
}

/// An address in `network`.0.0.0/8: another one for each pod, as far as a test has pods.
pub fn pod_address(pod: &Pod, network: u8) -> String {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let byte = |at: usize| uid.get(at..at + 2).and_then(|text| u8::from_str_radix(text, 16).ok());
    let [a, b, c] = [0, 2, 4].map(|at| byte(at).unwrap_or_default());
    format!("{network}.{a}.{b}.{c}")
}

/// Tells again and again that the node lives.
async fn renew_node_lease(leases: Api<Lease>, node: String) {
    loop {
        let spec = json!({ "holderIdentity": node, "leaseDurationSeconds": 40,
            "renewTime": format!("{:.6}", Timestamp::now()) });
        let lease = json!({ "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": { "name": node }, "spec": spec });
        let params = PatchParams::apply("kubelet").force();
        if let Err(error) = leases.patch(&node, &params, &Patch::Apply(lease)).await {
            log_error(&error);
        }
        tokio::time::sleep(HEARTBEAT).await;
    }
}

fn read<T: serde::de::DeserializeOwned>(object: Value) -> Result<T, Error> {
    serde_json::from_value(object).map_err(Error::SerdeError)
}

#[expect(clippy::print_stderr, reason = "for whoever reads a test's output")]
fn log_error(error: &dyn std::error::Error) {
    eprintln!("kubelet: {error}");
}
