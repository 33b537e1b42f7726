//! A kubelet without containers: binds pods, runs them, honours readiness gates, restarts a container whose image changes.

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Binding, Node, Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::ControlPlaneError;

/// Requests at a time.
const REQUESTS: usize = 8;
/// Between two signs of life. Without them the node's pods are marked after 40 s.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Before something that failed is tried again.
const RETRY: Duration = Duration::from_millis(200);

/// How long things take.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// From a pod's binding until its containers run.
    pub start: Duration,
    /// For which a container is down when its image changes.
    pub restart: Duration,
    /// From a pod's deletion until it is gone.
    pub stop: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        let little = Duration::from_millis(100);
        Self { start: little, restart: little, stop: little }
    }
}

/// Runs the pods of one namespace on a node of its own. It ends when it is dropped.
#[derive(Debug)]
pub struct Kubelet {
    _tasks: JoinSet<()>,
}

impl Kubelet {
    /// Starts it. The client looks into `namespace` unless told otherwise.
    ///
    /// # Errors
    /// The node cannot be made.
    pub async fn start(client: Client, namespace: &str, pace: Pace) -> Result<Self, ControlPlaneError> {
        let name = format!("node-{namespace}");
        let nodes = Api::<Node>::all(client.clone());
        let node: Node = read(json!({ "metadata": { "name": name } }))?;
        nodes.create(&PostParams::default(), &node).await?;
        // Without any resources, so that the scheduler leaves it alone.
        let status = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
        nodes.patch_status(&name, &PatchParams::default(), &Patch::Strategic(status)).await?;
        let leases = Api::<Lease>::namespaced(client.clone(), "kube-node-lease");
        let place = Arc::new(Place {
            pods: Api::default_namespaced(client),
            node: name.clone(),
            pace,
            turns: Semaphore::new(REQUESTS),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(live(leases, name));
        tasks.spawn(follow(place));
        Ok(Self { _tasks: tasks })
    }
}

fn read<T: serde::de::DeserializeOwned>(object: Value) -> Result<T, Error> {
    serde_json::from_value(object).map_err(Error::SerdeError)
}

/// Tells again and again that the node lives.
async fn live(leases: Api<Lease>, node: String) {
    loop {
        let spec = json!({ "holderIdentity": node, "leaseDurationSeconds": 40,
            "renewTime": format!("{:.6}", Timestamp::now()) });
        let lease = json!({ "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": { "name": node }, "spec": spec });
        let params = PatchParams::apply("kubelet").force();
        if let Err(error) = leases.patch(&node, &params, &Patch::Apply(lease)).await {
            complain(&error);
        }
        tokio::time::sleep(HEARTBEAT).await;
    }
}

/// Where pods run.
struct Place {
    pods: Api<Pod>,
    node: String,
    pace: Pace,
    turns: Semaphore,
}

/// Runs each pod in a task of its own, which gets whatever becomes known of it.
async fn follow(place: Arc<Place>) {
    let mut events = pin!(watcher(place.pods.clone(), Config::default()).default_backoff());
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
                    tasks.spawn(run(Arc::clone(&place), receiver));
                }
            }
            Ok(Some(Event::Delete(pod))) => {
                known.remove(&pod.metadata.uid.unwrap_or_default());
            }
            Ok(Some(Event::Init | Event::InitDone)) => {}
            Ok(None) => return,
            Err(error) => complain(&error),
        }
        while tasks.try_join_next().is_some() {}
    }
}

/// What a pod waits for.
enum Next {
    /// Something else to change it.
    Change,
    /// A time.
    At(Instant),
    /// Nothing more.
    Nothing,
}

#[derive(Default)]
struct Container {
    image: String,
    image_id: String,
    restarts: i32,
    /// From when on it runs.
    up: Option<Instant>,
}

/// A pod as its kubelet remembers it.
#[derive(Default)]
struct Memory {
    bound: Option<Instant>,
    ends: Option<Instant>,
    containers: BTreeMap<String, Container>,
}

impl Memory {
    /// What the pod's status says ran before this kubelet.
    fn of(pod: &Pod) -> Self {
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        let containers = statuses.map(|status| {
            let container = Container {
                image: status.image.clone(),
                image_id: status.image_id.clone(),
                restarts: status.restart_count,
                up: None,
            };
            (status.name.clone(), container)
        });
        Self { containers: containers.collect(), ..Self::default() }
    }
}

async fn run(place: Arc<Place>, mut pods: watch::Receiver<Pod>) {
    let mut memory = Memory::of(&pods.borrow());
    loop {
        let pod = pods.borrow_and_update().clone();
        let next = match place.tend(&pod, &mut memory).await {
            Ok(next) => next,
            Err(Error::Api(status)) if status.code == 404 => Next::Nothing,
            Err(Error::Api(status)) if status.code == 409 => Next::At(Instant::now() + RETRY),
            Err(error) => {
                complain(&error);
                Next::At(Instant::now() + RETRY)
            }
        };
        let ended = match next {
            Next::Nothing => true,
            Next::Change => pods.changed().await.is_err(),
            Next::At(time) => tokio::select! {
                ended = pods.changed() => ended.is_err(),
                () = tokio::time::sleep_until(time) => false,
            },
        };
        if ended {
            return;
        }
    }
}

impl Place {
    async fn tend(&self, pod: &Pod, memory: &mut Memory) -> Result<Next, Error> {
        let now = Instant::now();
        let (Some(name), Some(spec)) = (&pod.metadata.name, &pod.spec) else { return Ok(Next::Nothing) };
        if pod.metadata.deletion_timestamp.is_some() {
            let ends = *memory.ends.get_or_insert(now + self.pace.stop);
            return if ends > now { Ok(Next::At(ends)) } else { self.end(pod, name).await };
        }
        if spec.node_name.is_none() {
            return self.bind(name).await;
        }
        let starts = *memory.bound.get_or_insert(now) + self.pace.start;
        if starts > now {
            return Ok(Next::At(starts));
        }
        if spec.restart_policy.as_deref() == Some("Never") {
            return self.finish(pod, name).await;
        }
        let mut statuses = Vec::new();
        let mut next = Next::Change;
        for one in &spec.containers {
            let container = memory.containers.entry(one.name.clone()).or_default();
            if let Some(up) = container.advance(one.image.as_deref().unwrap_or_default(), now, self.pace) {
                next = Next::At(up);
            }
            statuses.push(container.status(&one.name));
        }
        if let Some(status) = changed(pod.status.as_ref(), &statuses, spec.readiness_gates.iter().flatten()) {
            let mut body = json!({ "phase": "Running", "containerStatuses": statuses, "conditions": status });
            if pod.status.as_ref().is_none_or(|status| status.pod_ip.is_none()) {
                let ip = address(pod.metadata.uid.as_deref().unwrap_or_default());
                body["podIPs"] = json!([{ "ip": ip }]);
                body["podIP"] = ip.into();
            }
            let _turn = self.turns.acquire().await;
            let body = Patch::Strategic(json!({ "status": body }));
            self.pods.patch_status(name, &PatchParams::default(), &body).await?;
        }
        Ok(next)
    }

    async fn bind(&self, name: &str) -> Result<Next, Error> {
        let target = json!({ "kind": "Node", "name": self.node });
        let binding: Binding = read(json!({ "metadata": { "name": name }, "target": target }))?;
        let _turn = self.turns.acquire().await;
        let _: Value =
            self.pods.create_subresource("binding", name, &PostParams::default(), &binding).await?;
        Ok(Next::Change)
    }

    /// The containers of a pod that ends by itself have done so at once, or could not begin for want of a shell.
    async fn finish(&self, pod: &Pod, name: &str) -> Result<Next, Error> {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            return Ok(Next::Change);
        }
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        let ends = |image: &str| {
            if image.starts_with("shell-less") { ("StartError", 128) } else { ("Completed", 0) }
        };
        let statuses = containers.map(|one| {
            let image = one.image.as_deref().unwrap_or_default();
            let (reason, code) = ends(image);
            json!({ "name": one.name, "image": image, "imageID": format!("sha256:{image}"), "ready": false,
                "restartCount": 0, "state": { "terminated": { "reason": reason, "exitCode": code } } })
        });
        let statuses: Vec<Value> = statuses.collect();
        let failed = statuses.iter().any(|status| status["state"]["terminated"]["exitCode"] != 0);
        let phase = if failed { "Failed" } else { "Succeeded" };
        let status = json!({ "status": { "phase": phase, "containerStatuses": statuses } });
        let _turn = self.turns.acquire().await;
        self.pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(status)).await?;
        Ok(Next::Change)
    }

    async fn end(&self, pod: &Pod, name: &str) -> Result<Next, Error> {
        let same = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
        let at_once = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(same),
            ..DeleteParams::default()
        };
        let _turn = self.turns.acquire().await;
        self.pods.delete(name, &at_once).await?;
        Ok(Next::Nothing)
    }
}

impl Container {
    /// Starts it, or starts it again if its image has changed. Answers when it will be up, if it is not.
    fn advance(&mut self, image: &str, now: Instant, pace: Pace) -> Option<Instant> {
        if self.image != image {
            self.up = Some(now);
            if !self.image.is_empty() {
                self.up = Some(now + pace.restart);
                self.restarts += 1;
            }
            image.clone_into(&mut self.image);
        }
        if let Some(up) = self.up
            && up <= now
        {
            self.up = None;
            self.image_id = format!("sha256:{image}");
        }
        self.up
    }

    fn status(&self, name: &str) -> Value {
        let is_up = self.up.is_none();
        let waiting = json!({ "waiting": { "reason": "ContainerCreating" } });
        let state = if is_up { json!({ "running": {} }) } else { waiting };
        json!({ "name": name, "image": self.image, "imageID": self.image_id, "ready": is_up, "started": is_up,
            "restartCount": self.restarts, "state": state })
    }
}

/// The pod's conditions, if these or its containers are not what its status says.
fn changed<'a>(
    live: Option<&PodStatus>,
    containers: &[Value],
    mut gates: impl Iterator<Item = &'a k8s_openapi::api::core::v1::PodReadinessGate>,
) -> Option<Vec<Value>> {
    let is = |kind: &str| {
        let mut conditions = live.iter().flat_map(|live| live.conditions.iter().flatten());
        conditions.find(|one| one.type_ == kind).map(|one| one.status == "True")
    };
    let up = containers.iter().all(|container| container["ready"] == true);
    let ready = up && gates.all(|gate| is(&gate.condition_type) == Some(true));
    let all = [("PodScheduled", true), ("Initialized", true), ("ContainersReady", up), ("Ready", ready)];
    let new = all.into_iter().filter(|(kind, truth)| is(kind) != Some(*truth)).map(|(kind, truth)| {
        json!({ "type": kind, "status": if truth { "True" } else { "False" },
            "lastTransitionTime": format!("{:.0}", Timestamp::now()) })
    });
    let new: Vec<Value> = new.collect();
    let said = live.and_then(|live| live.container_statuses.as_deref()).unwrap_or_default();
    let is_said = said.len() == containers.len()
        && said.iter().zip(containers).all(|(said, container)| {
            container["ready"] == said.ready
                && container["imageID"] == said.image_id.as_str()
                && container["restartCount"] == said.restart_count
        });
    (!is_said || !new.is_empty()).then_some(new)
}

/// Another one for each pod, as far as a test has pods.
fn address(uid: &str) -> String {
    let byte = |at: usize| uid.get(at..at + 2).and_then(|text| u8::from_str_radix(text, 16).ok());
    let [a, b, c] = [0, 2, 4].map(|at| byte(at).unwrap_or_default());
    format!("10.{a}.{b}.{c}")
}

#[expect(clippy::print_stderr, reason = "for whoever reads a test's output")]
fn complain(error: &dyn std::error::Error) {
    eprintln!("kubelet: {error}");
}
