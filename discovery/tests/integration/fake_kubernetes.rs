//! The part of the Kubernetes API that a pod watcher uses: list and watch with label selectors.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::stream;
use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

/// An API server with one namespace, `ns`.
#[derive(Clone)]
pub(crate) struct FakePodApi {
    port: u16,
    cluster: Arc<Mutex<FakePodApiState>>,
    failures: watch::Receiver<usize>,
}

struct FakePodApiState {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// All events, for a watch that starts at an earlier version.
    history: Vec<(u64, Value)>,
    watches: Vec<(String, mpsc::UnboundedSender<Value>)>,
    stalled: bool,
    failing: bool,
    lists: usize,
    failures: watch::Sender<usize>,
}

/// A running, Ready pod of group `g` whose engine listens on this machine.
pub(crate) fn pod(name: &str, uid: &str, role: &str, port: u16) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "ns", "uid": uid,
            "labels": {"rbg.workloads.x-k8s.io/group-name": "g", "rbg.workloads.x-k8s.io/role-name": role},
            "annotations": {"moongate.io/port": port.to_string()},
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "engine"}]},
        "status": {"phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

impl FakePodApi {
    pub(crate) async fn start(supervisor: &Supervisor) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (count, failures) = watch::channel(0);
        let cluster = Arc::new(Mutex::new(FakePodApiState {
            version: 100,
            pods: BTreeMap::new(),
            history: Vec::new(),
            watches: Vec::new(),
            stalled: false,
            failing: false,
            lists: 0,
            failures: count,
        }));
        let app = Router::new().route("/api/v1/namespaces/ns/pods", get(pods)).with_state(cluster.clone());
        supervisor.spawn("fake-kubernetes", async move { axum::serve(listener, app).await.unwrap() });
        Self { port, cluster, failures }
    }

    pub(crate) fn kubeconfig(&self) -> String {
        let server = format!("http://127.0.0.1:{}", self.port);
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        })
        .to_string()
    }

    pub(crate) fn put(&self, mut pod: Value) {
        let mut cluster = self.cluster.lock();
        cluster.version += 1;
        pod["metadata"]["resourceVersion"] = json!(cluster.version.to_string());
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        let kind = if cluster.pods.insert(name, pod.clone()).is_some() { "MODIFIED" } else { "ADDED" };
        cluster.notify_watches(kind, &pod);
    }

    pub(crate) fn delete(&self, name: &str) {
        let mut cluster = self.cluster.lock();
        cluster.version += 1;
        let mut pod = cluster.pods.remove(name).unwrap();
        pod["metadata"]["resourceVersion"] = json!(cluster.version.to_string());
        cluster.notify_watches("DELETED", &pod);
    }

    /// From now on watches stay open and deliver no events.
    pub(crate) fn stall_watches(&self) {
        self.cluster.lock().stalled = true;
    }

    /// Ends all watches and rejects every request, or accepts requests again.
    pub(crate) fn fail(&self, failing: bool) {
        let mut cluster = self.cluster.lock();
        cluster.failing = failing;
        cluster.watches.clear();
    }

    /// Waits until `count` requests were rejected.
    pub(crate) async fn failures(&self, count: usize) {
        self.failures.clone().wait_for(|failures| *failures >= count).await.unwrap();
    }

    pub(crate) fn lists(&self) -> usize {
        self.cluster.lock().lists
    }
}

impl FakePodApiState {
    fn notify_watches(&mut self, kind: &str, pod: &Value) {
        let event = json!({"type": kind, "object": pod});
        if !self.stalled {
            self.watches
                .retain(|(selector, watch)| !matches(selector, pod) || watch.send(event.clone()).is_ok());
        }
        self.history.push((self.version, event));
    }
}

/// `key=value`, `key` and `!key`, joined by commas.
fn matches(selector: &str, pod: &Value) -> bool {
    let labels = &pod["metadata"]["labels"];
    selector.split(',').filter(|term| !term.is_empty()).all(|term| {
        match (term.split_once('='), term.strip_prefix('!')) {
            (Some((key, value)), _) => labels[key] == value,
            (None, Some(key)) => labels[key].is_null(),
            (None, None) => !labels[term].is_null(),
        }
    })
}

async fn pods(
    State(cluster): State<Arc<Mutex<FakePodApiState>>>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    let mut cluster = cluster.lock();
    if cluster.failing {
        cluster.failures.send_modify(|count| *count += 1);
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "down", "code": 500});
        return (StatusCode::INTERNAL_SERVER_ERROR, status.to_string()).into_response();
    }
    let selector = query.get("labelSelector").cloned().unwrap_or_default();
    if query.get("watch").is_none_or(|watch| watch != "true") {
        cluster.lists += 1;
        let items: Vec<&Value> = cluster.pods.values().filter(|pod| matches(&selector, pod)).collect();
        let version = cluster.version.to_string();
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items});
        return list.to_string().into_response();
    }
    let since: u64 = query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
    let (send, receive) = mpsc::unbounded_channel();
    for (version, event) in &cluster.history {
        if *version > since && !cluster.stalled && matches(&selector, &event["object"]) {
            send.send(event.clone()).unwrap();
        }
    }
    cluster.watches.push((selector, send));
    let lines = stream::unfold(receive, |mut receive| async move {
        let event: Value = receive.recv().await?;
        Some((Ok::<_, Infallible>(Bytes::from(format!("{event}\n"))), receive))
    });
    Body::from_stream(lines).into_response()
}
