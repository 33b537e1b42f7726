//! Lifecycle of pods on their node.

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::{Binding, Pod};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Error, Result};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::container::{FakeContainer, changed_conditions, completed_status};
use super::{KubeletTimings, PodRuntime, log_error, read};

/// Maximum number of concurrent API requests.
const MAX_CONCURRENT_REQUESTS: usize = 8;
/// Delay before a failed operation is retried.
const RETRY: Duration = Duration::from_millis(200);

/// Context shared by all pods of a kubelet.
pub(super) struct KubeletContext<R> {
    pods: Api<Pod>,
    /// Node to which pods are bound; `None`: the scheduler binds them.
    node: Option<String>,
    timings: KubeletTimings,
    runtime: R,
    request_permits: Semaphore,
}

/// Runs each pod in its own task, which receives the pod's updates.
pub(super) async fn watch_pods(context: Arc<KubeletContext<impl PodRuntime>>) {
    let mut events = pin!(watcher(context.pods.clone(), Config::default()).default_backoff());
    let mut known: HashMap<String, watch::Sender<Pod>> = HashMap::new();
    let mut tasks = JoinSet::new();
    loop {
        match events.try_next().await {
            Ok(Some(Event::Apply(pod) | Event::InitApply(pod))) => {
                let uid = pod.metadata.uid.clone().unwrap_or_default();
                if let Some(sender) = known.get(&uid) {
                    sender.send_replace(pod);
                } else {
                    let (sender, receiver) = watch::channel(pod);
                    known.insert(uid, sender);
                    tasks.spawn(run(Arc::clone(&context), receiver));
                }
            }
            Ok(Some(Event::Delete(pod))) => {
                known.remove(&pod.metadata.uid.unwrap_or_default());
            }
            Ok(Some(Event::Init | Event::InitDone)) => {}
            Ok(None) => return,
            Err(error) => log_error(&error),
        }
        while tasks.try_join_next().is_some() {}
    }
}

/// When a pod is reconciled next.
enum PodWait {
    /// After the next change of the pod or its health.
    Change,
    /// At this time, or after a change.
    At(Instant),
    /// Never: the pod is done.
    Nothing,
}

/// State of a pod at its kubelet.
#[derive(Default)]
struct TrackedPod {
    bound_at: Option<Instant>,
    address: Option<String>,
    terminates_at: Option<Instant>,
    containers: BTreeMap<String, FakeContainer>,
}

impl TrackedPod {
    /// State recorded in the pod's status before this kubelet started.
    fn from_status(pod: &Pod) -> Self {
        let Some(status) = &pod.status else { return Self::default() };
        let containers = status.container_statuses.iter().flatten();
        let containers =
            containers.map(|status| (status.name.clone(), FakeContainer::from_status(status))).collect();
        Self { address: status.pod_ip.clone(), containers, ..Self::default() }
    }
}

async fn run(context: Arc<KubeletContext<impl PodRuntime>>, mut pods: watch::Receiver<Pod>) {
    let mut tracked = TrackedPod::from_status(&pods.borrow());
    loop {
        let pod = pods.borrow_and_update().clone();
        let next = match context.reconcile(&pod, &mut tracked).await {
            Ok(next) => next,
            Err(Error::Api(status)) if status.code == 404 => PodWait::Nothing,
            Err(Error::Api(status)) if status.code == 409 => PodWait::At(Instant::now() + RETRY),
            Err(error) => {
                log_error(&error);
                PodWait::At(Instant::now() + RETRY)
            }
        };
        let ended = match next {
            PodWait::Nothing => true,
            PodWait::Change => tokio::select! {
                ended = pods.changed() => ended.is_err(),
                () = context.runtime.changed(&pod) => false,
            },
            PodWait::At(time) => tokio::select! {
                ended = pods.changed() => ended.is_err(),
                () = tokio::time::sleep_until(time) => false,
            },
        };
        if ended {
            return;
        }
    }
}

impl<R: PodRuntime> KubeletContext<R> {
    pub(super) fn new(pods: Api<Pod>, node: Option<String>, timings: KubeletTimings, runtime: R) -> Self {
        Self { pods, node, timings, runtime, request_permits: Semaphore::new(MAX_CONCURRENT_REQUESTS) }
    }

    async fn reconcile(&self, pod: &Pod, tracked: &mut TrackedPod) -> Result<PodWait> {
        let now = Instant::now();
        let (Some(name), Some(spec)) = (&pod.metadata.name, &pod.spec) else { return Ok(PodWait::Nothing) };
        if pod.metadata.deletion_timestamp.is_some() {
            let ends = *tracked.terminates_at.get_or_insert(now + self.timings.stop);
            return if ends > now { Ok(PodWait::At(ends)) } else { self.terminate(pod, name, tracked).await };
        }
        if spec.node_name.is_none() {
            return self.bind(name).await;
        }
        let starts = *tracked.bound_at.get_or_insert(now) + self.timings.start;
        if starts > now {
            return Ok(PodWait::At(starts));
        }
        match spec.restart_policy.as_deref() {
            Some("Never") => self.complete(pod, name).await,
            _ => self.run_containers(pod, name, tracked).await,
        }
    }

    async fn bind(&self, name: &str) -> Result<PodWait> {
        let Some(node) = &self.node else { return Ok(PodWait::Change) };
        let target = json!({ "kind": "Node", "name": node });
        let binding: Binding = read(json!({ "metadata": { "name": name }, "target": target }))?;
        let _permit = self.request_permits.acquire().await;
        let _: Value =
            self.pods.create_subresource("binding", name, &PostParams::default(), &binding).await?;
        Ok(PodWait::Change)
    }

    /// Starts or restarts the pod's containers as specified, and updates its status.
    async fn run_containers(&self, pod: &Pod, name: &str, tracked: &mut TrackedPod) -> Result<PodWait> {
        let Some(spec) = &pod.spec else { return Ok(PodWait::Nothing) };
        let address = match &tracked.address {
            Some(address) => address.clone(),
            None => tracked.address.insert(self.runtime.start(pod).await).clone(),
        };
        let mut statuses = Vec::new();
        let mut next = PodWait::Change;
        for spec in &spec.containers {
            let container = tracked.containers.entry(spec.name.clone()).or_default();
            let image = spec.image.as_deref().unwrap_or_default();
            if container.is_outdated(image) {
                self.runtime.restart(pod, &spec.name).await;
            }
            if let Some(up) = container.reconcile(image, Instant::now(), self.timings) {
                next = PodWait::At(up);
            }
            statuses.push(container.status(&spec.name, self.runtime.state(pod, &spec.name)));
        }
        if let Some(status) =
            changed_conditions(pod.status.as_ref(), &statuses, spec.readiness_gates.iter().flatten())
        {
            let body = json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
                "containerStatuses": statuses, "conditions": status });
            self.patch_status(name, body).await?;
        }
        Ok(next)
    }

    async fn complete(&self, pod: &Pod, name: &str) -> Result<PodWait> {
        if pod.status.as_ref().is_some_and(|status| status.container_statuses.is_some()) {
            return Ok(PodWait::Change);
        }
        let statuses: Vec<Value> =
            pod.spec.iter().flat_map(|spec| &spec.containers).map(completed_status).collect();
        let is = |matches: fn(&Value) -> bool| statuses.iter().any(|status| matches(&status["state"]));
        let phase = match () {
            () if is(|state| state.get("waiting").is_some()) => "Pending",
            () if is(|state| state["terminated"]["exitCode"] != 0) => "Failed",
            () => "Succeeded",
        };
        self.patch_status(name, json!({ "phase": phase, "containerStatuses": statuses })).await?;
        Ok(PodWait::Change)
    }

    async fn terminate(&self, pod: &Pod, name: &str, tracked: &TrackedPod) -> Result<PodWait> {
        if tracked.address.is_some() {
            self.runtime.stop(pod).await;
        }
        let same_uid = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(same_uid),
            ..DeleteParams::default()
        };
        let _permit = self.request_permits.acquire().await;
        self.pods.delete(name, &params).await?;
        Ok(PodWait::Nothing)
    }

    async fn patch_status(&self, name: &str, status: Value) -> Result<()> {
        let _permit = self.request_permits.acquire().await;
        let body = Patch::Strategic(json!({ "status": status }));
        self.pods.patch_status(name, &PatchParams::default(), &body).await?;
        Ok(())
    }
}
