//! A kubelet without containers: binds pods, runs them, honours readiness gates, restarts a container whose image changes.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Binding, Node, Pod};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, Error};
use serde_json::{Value, json};

/// Between two looks at all pods.
const PAUSE: Duration = Duration::from_millis(100);

/// What runs in pods.
pub(crate) trait Runtime: Send + 'static {
    /// A pod begins. Answers where it is.
    fn start(&mut self, pod: &Pod) -> impl Future<Output = String> + Send;

    /// A container of the pod has been given another image.
    fn restart(&mut self, pod: &Pod) -> impl Future<Output = ()> + Send;
}

/// Pods in which nothing runs.
pub(crate) struct Empty;

impl Runtime for Empty {
    async fn start(&mut self, pod: &Pod) -> String {
        address(pod.metadata.uid.as_deref().unwrap(), 10)
    }

    async fn restart(&mut self, _: &Pod) {}
}

/// Runs the pods of one namespace. It ends when it is dropped.
pub(crate) struct Kubelet(tokio::task::JoinHandle<()>);

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Default)]
struct Container {
    image: String,
    restarts: i32,
    /// Whether it was seen down since its image changed: a restart takes two looks.
    is_up: bool,
    image_id: String,
}

impl Kubelet {
    /// Starts it with a node of its own.
    pub(crate) async fn start(client: Client, namespace: &str) -> Self {
        Self::run(client, namespace, Empty).await
    }

    /// The same, with something that runs in pods.
    pub(crate) async fn run(client: Client, namespace: &str, runtime: impl Runtime) -> Self {
        let node = format!("node-{namespace}");
        let object: Node = serde_json::from_value(json!({ "metadata": { "name": node } })).unwrap();
        Api::all(client.clone()).create(&PostParams::default(), &object).await.unwrap();
        Self::look_after(client, Some(node), runtime)
    }

    /// Starts one for whatever nodes the scheduler binds pods to.
    pub(crate) fn of_all_nodes(client: Client) -> Self {
        Self::look_after(client, None, Empty)
    }

    fn look_after(client: Client, node: Option<String>, mut runtime: impl Runtime) -> Self {
        Self(tokio::spawn(async move {
            let mut containers = BTreeMap::new();
            loop {
                if let Err(error) = look(&client, node.as_deref(), &mut containers, &mut runtime).await {
                    eprintln!("kubelet: {error}");
                }
                tokio::time::sleep(PAUSE).await;
            }
        }))
    }
}

/// A node that has room for so many pods, if they select it by the label `stage`: no test's pods go to another's nodes.
pub(crate) async fn node(client: &Client, stage: &str, name: &str, mut labels: Value, pods: u32) {
    let name = format!("{stage}-{name}");
    labels["stage"] = stage.into();
    labels["kubernetes.io/hostname"] = name.as_str().into();
    let spec = json!({ "taints": [{ "key": "stage", "effect": "NoSchedule" }] });
    let object = json!({ "metadata": { "name": name, "labels": labels }, "spec": spec });
    let nodes = Api::<Node>::all(client.clone());
    nodes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    let room = json!({ "cpu": "8", "memory": "8Gi", "pods": pods.to_string() });
    let conditions = json!([{ "type": "Ready", "status": "True" }]);
    let status = json!({ "status": { "allocatable": room, "capacity": room, "conditions": conditions } });
    nodes.patch_status(&name, &PatchParams::default(), &Patch::Strategic(status)).await.unwrap();
}

/// Sends a role's pods to the nodes of a stage.
pub(crate) fn select(role: &mut Value, stage: &str) {
    let spec = &mut role["standalonePattern"]["template"]["spec"];
    spec["tolerations"] = json!([{ "operator": "Exists" }]);
    spec["nodeSelector"] = json!({ "stage": stage });
}

type Containers = BTreeMap<(String, String), Container>;

async fn look(
    client: &Client,
    node: Option<&str>,
    containers: &mut Containers,
    runtime: &mut impl Runtime,
) -> Result<(), Error> {
    let api: Api<Pod> = Api::default_namespaced(client.clone());
    for pod in api.list(&ListParams::default()).await? {
        let outcome = tend(&api, &pod, node, containers, runtime).await;
        match outcome {
            // It has changed, or is gone: the next look sees to it.
            Err(Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            other => other?,
        }
    }
    Ok(())
}

async fn tend(
    api: &Api<Pod>,
    pod: &Pod,
    node: Option<&str>,
    containers: &mut Containers,
    runtime: &mut impl Runtime,
) -> Result<(), Error> {
    let (name, uid) = (pod.metadata.name.clone().unwrap(), pod.metadata.uid.clone().unwrap());
    if pod.metadata.deletion_timestamp.is_some() {
        let same = Preconditions { uid: Some(uid), resource_version: None };
        let now = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(same),
            ..DeleteParams::default()
        };
        api.delete(&name, &now).await?;
        return Ok(());
    }
    let spec = pod.spec.as_ref().unwrap();
    if spec.node_name.is_none() {
        let Some(node) = node else { return Ok(()) };
        let binding: Binding = serde_json::from_value(
            json!({ "metadata": { "name": name }, "target": { "kind": "Node", "name": node } }),
        )
        .unwrap();
        let _: Value = api.create_subresource("binding", &name, &PostParams::default(), &binding).await?;
        return Ok(());
    }
    if spec.restart_policy.as_deref() == Some("Never") {
        return end(api, pod).await;
    }
    let known = pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    let ip = match known {
        Some(ip) => ip,
        None => runtime.start(pod).await,
    };
    let mut statuses = Vec::new();
    let mut all_up = true;
    for one in &spec.containers {
        let image = one.image.clone().unwrap_or_default();
        let state = containers.entry((uid.clone(), one.name.clone())).or_default();
        if state.image.is_empty() {
            state.image.clone_from(&image);
            state.is_up = true;
        } else if state.image != image {
            runtime.restart(pod).await;
            state.image.clone_from(&image);
            state.restarts += 1;
            state.is_up = false;
        } else {
            state.is_up = true;
        }
        all_up &= state.is_up;
        if state.is_up {
            state.image_id = format!("sha256:{image}");
        }
        let running = if state.is_up {
            json!({ "running": {} })
        } else {
            json!({ "waiting": { "reason": "ContainerCreating" } })
        };
        statuses
            .push(json!({ "name": one.name, "image": image, "imageID": state.image_id, "ready": state.is_up,
            "started": state.is_up, "restartCount": state.restarts, "state": running }));
    }
    let live = serde_json::to_value(&pod.status).unwrap();
    let has = |kind: &str| {
        let conditions = live["conditions"].as_array().into_iter().flatten();
        conditions.filter(|one| one["type"] == kind).any(|one| one["status"] == "True")
    };
    let gates = spec.readiness_gates.iter().flatten().all(|gate| has(&gate.condition_type));
    let conditions = [
        ("PodScheduled", true),
        ("Initialized", true),
        ("ContainersReady", all_up),
        ("Ready", all_up && gates),
    ];
    let ours = live["containerStatuses"].as_array().is_some_and(|live| {
        live.iter().zip(&statuses).all(|(live, ours)| {
            live["ready"] == ours["ready"]
                && live["imageID"] == ours["imageID"]
                && live["restartCount"] == ours["restartCount"]
        })
    });
    if ours && conditions.iter().all(|(kind, truth)| has(kind) == *truth) {
        return Ok(());
    }
    let conditions = conditions
        .map(|(kind, truth)| json!({ "type": kind, "status": if truth { "True" } else { "False" } }));
    let status = json!({ "status": { "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }],
        "conditions": conditions, "containerStatuses": statuses } });
    api.patch_status(&name, &PatchParams::default(), &Patch::Strategic(status)).await?;
    Ok(())
}

/// The containers of a pod that ends by itself have done so at once, or could not begin for want of a shell.
async fn end(api: &Api<Pod>, pod: &Pod) -> Result<(), Error> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Ok(());
    }
    let mut phase = "Succeeded";
    let mut statuses = Vec::new();
    for one in &pod.spec.as_ref().unwrap().containers {
        let image = one.image.as_deref().unwrap_or_default();
        let (reason, code) =
            if image.starts_with("shell-less") { ("StartError", 128) } else { ("Completed", 0) };
        if code != 0 {
            phase = "Failed";
        }
        statuses.push(
            json!({ "name": one.name, "image": image, "imageID": format!("sha256:{image}"), "ready": false,
            "restartCount": 0, "state": { "terminated": { "reason": reason, "exitCode": code } } }),
        );
    }
    let status = json!({ "status": { "phase": phase, "containerStatuses": statuses } });
    api.patch_status(
        pod.metadata.name.as_deref().unwrap(),
        &PatchParams::default(),
        &Patch::Strategic(status),
    )
    .await?;
    Ok(())
}

/// Another one for each pod, as far as a test has pods.
pub(crate) fn address(uid: &str, network: u8) -> String {
    let byte = |at: usize| u8::from_str_radix(&uid[at..at + 2], 16).unwrap();
    format!("{network}.{}.{}.{}", byte(0), byte(2), byte(4))
}
