//! A kubelet without containers: binds pods, runs them, evaluates readiness gates, restarts a container whose image changes. A
//! [`PodRuntime`] defines what runs in the pods.

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

/// Interval of lease renewals. Without them the node's pods are marked not ready after 40 s.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Durations of simulated operations, in addition to the runtime's.
#[derive(Debug, Clone, Copy)]
pub struct KubeletTimings {
    /// Time from a pod's binding until its containers run.
    pub start: Duration,
    /// Downtime of a container when its image changes.
    pub restart: Duration,
    /// Time from a pod's deletion until it is gone.
    pub stop: Duration,
}

impl Default for KubeletTimings {
    fn default() -> Self {
        let short = Duration::from_millis(100);
        Self { start: short, restart: short, stop: short }
    }
}

/// Runtime of pods that run indefinitely. Each pod has its own task, so calls for several pods are concurrent.
pub trait PodRuntime: Send + Sync + 'static {
    /// Starts a pod and returns its address. Called once per pod, unless another kubelet has started it.
    fn start(&self, pod: &Pod) -> impl Future<Output = String> + Send;

    /// Called when the image of a container has changed.
    fn restart(&self, pod: &Pod, container: &str) -> impl Future<Output = ()> + Send;

    /// Stops a deleted pod, which is gone when this returns. Called again if the deletion fails.
    fn stop(&self, _pod: &Pod) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Health of a started container.
    fn state(&self, _pod: &Pod, _container: &str) -> ContainerHealth {
        ContainerHealth::default()
    }

    /// Waits until the health of one of the pod's containers has changed since the last call of `state`.
    fn changed(&self, _pod: &Pod) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

/// Health of a container; by default it runs and is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContainerHealth {
    /// Whether its process is running.
    pub is_running: bool,
    /// Whether its readiness probe succeeds.
    pub is_ready: bool,
    /// How often it exited by itself and was restarted.
    pub exit_count: i32,
}

impl Default for ContainerHealth {
    fn default() -> Self {
        Self { is_running: true, is_ready: true, exit_count: 0 }
    }
}

/// A runtime that runs nothing.
#[derive(Debug, Clone, Copy)]
pub struct NoopRuntime;

impl PodRuntime for NoopRuntime {
    async fn start(&self, pod: &Pod) -> String {
        pod_address(pod, 10)
    }

    async fn restart(&self, _: &Pod, _: &str) {}
}

/// Runs the pods of one namespace until dropped.
#[derive(Debug)]
pub struct FakeKubelet {
    _tasks: JoinSet<()>,
}

impl FakeKubelet {
    /// Starts a kubelet with its own node, to which it binds all pods. The client's default namespace must be `namespace`.
    ///
    /// # Errors
    /// When the node cannot be created.
    pub async fn start(
        client: Client,
        namespace: &str,
        timings: KubeletTimings,
    ) -> Result<Self, ControlPlaneError> {
        Self::run(client, namespace, timings, NoopRuntime).await
    }

    /// As [`Self::start`], with a runtime.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn run(
        client: Client,
        namespace: &str,
        timings: KubeletTimings,
        runtime: impl PodRuntime,
    ) -> Result<Self, ControlPlaneError> {
        let name = format!("node-{namespace}");
        let nodes = Api::<Node>::all(client.clone());
        let node: Node = read(json!({ "metadata": { "name": name } }))?;
        nodes.create(&PostParams::default(), &node).await?;
        // Without resources, so the scheduler ignores the node.
        let status = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
        nodes.patch_status(&name, &PatchParams::default(), &Patch::Strategic(status)).await?;
        let leases = Api::<Lease>::namespaced(client.clone(), "kube-node-lease");
        let context =
            KubeletContext::new(Api::default_namespaced(client), Some(name.clone()), timings, runtime);
        let mut tasks = JoinSet::new();
        tasks.spawn(renew_node_lease(leases, name));
        tasks.spawn(pods::watch_pods(Arc::new(context)));
        Ok(Self { _tasks: tasks })
    }

    /// Starts a kubelet for all nodes to which the scheduler binds pods of the client's namespace.
    pub fn start_for_scheduled(client: Client, timings: KubeletTimings) -> Self {
        let context = KubeletContext::new(Api::default_namespaced(client), None, timings, NoopRuntime);
        let mut tasks = JoinSet::new();
        tasks.spawn(pods::watch_pods(Arc::new(context)));
        Self { _tasks: tasks }
    }
}

/// An address in `network`.0.0.0/8, derived from the pod's uid and unique in practice.
pub fn pod_address(pod: &Pod, network: u8) -> String {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let byte = |offset: usize| uid.get(offset..offset + 2).and_then(|text| u8::from_str_radix(text, 16).ok());
    let [a, b, c] = [0, 2, 4].map(|offset| byte(offset).unwrap_or_default());
    format!("{network}.{a}.{b}.{c}")
}

/// Renews the node's lease periodically.
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

#[expect(clippy::print_stderr, reason = "shown in the test's output")]
fn log_error(error: &dyn std::error::Error) {
    eprintln!("kubelet: {error}");
}
