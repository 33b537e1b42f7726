//! Upgrade hooks before and after an in-place restart.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use moongate_testkit::{ControlPlane, PodRuntime, pod_address};
use parking_lot::Mutex;
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupScalingAdapter};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::test_operator::TestOperator;
use super::{events, eventually, group, pods, restarts, role, settled};

/// Minimum number of calls that return 202.
const TEST_TIMEOUT: usize = 2;

/// The hooks of all pods, which differ by their addresses. Records calls and restarts.
#[derive(Clone, Default)]
struct RecordingHooks {
    log: Arc<Mutex<Vec<String>>>,
    names: Arc<Mutex<HashMap<String, String>>>,
    /// Pods that drain until they restart or the drain is cancelled.
    draining: Arc<Mutex<HashSet<String>>>,
    /// Hooks that return 202 until they are removed from here.
    blocked: Arc<Mutex<HashSet<&'static str>>>,
    unresponsive: Arc<AtomicBool>,
    /// What the removal of each pod costs.
    removal_costs: Arc<Mutex<HashMap<String, i32>>>,
}

impl PodRuntime for RecordingHooks {
    async fn start(&self, pod: &Pod) -> String {
        let ip = pod_address(pod, 127);
        self.names.lock().insert(ip.clone(), pod.metadata.name.clone().unwrap());
        ip
    }

    async fn restart(&self, pod: &Pod, _: &str) {
        let name = pod.metadata.name.as_deref().unwrap();
        self.draining.lock().remove(name);
        self.note(format!("restart {name}"));
    }
}

impl RecordingHooks {
    fn note(&self, what: String) {
        self.log.lock().push(what);
    }

    async fn serve(self, listener: TcpListener) {
        while let Ok((stream, _)) = listener.accept().await {
            if !self.unresponsive.load(Ordering::Relaxed) {
                tokio::spawn(self.clone().answer(stream));
            }
        }
    }

    async fn answer(self, mut stream: TcpStream) {
        let name = self.names.lock()[&stream.local_addr().unwrap().ip().to_string()].clone();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        let request = match head.split_once(" HTTP/1.1").unwrap().0 {
            "POST /drain" => format!("drain {name}"),
            "POST /drain?reason=removal" => format!("remove {name}"),
            "GET /settled" => format!("settle {name}"),
            "DELETE /drain" => format!("cancel {name}"),
            "GET /removal-cost" => {
                let body = json!({ "cost": self.removal_costs.lock().get(&name) }).to_string();
                return respond(&mut stream, "200 OK", &body).await;
            }
            other => format!("{other} {name}"),
        };
        let before = self.log.lock().iter().rev().take_while(|entry| **entry == request).count();
        let waits = before < TEST_TIMEOUT || self.blocked.lock().contains(request.as_str());
        let is_drained = request.starts_with("settle") && self.draining.lock().contains(&name);
        if request.starts_with("drain") || request.starts_with("remove") {
            self.draining.lock().insert(name);
        } else if request.starts_with("cancel") {
            self.draining.lock().remove(&name);
        }
        self.note(request);
        let (status, body) = match (is_drained, waits) {
            (true, _) => ("202 Accepted", r#"{"waiting_for": "its restart", "drained": true}"#),
            (false, true) => ("202 Accepted", r#"{"waiting_for": "uploads"}"#),
            (false, false) => ("200 OK", "{}"),
        };
        respond(&mut stream, status, body).await;
    }
}

async fn respond(stream: &mut TcpStream, status: &str, body: &str) {
    let length = body.len();
    let response =
        format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
    stream.write_all(response.as_bytes()).await.unwrap();
}

fn roles(image: &str, port: u16, timeout: &str) -> Value {
    let mut role = role("a", 2, image);
    role["annotations"] = json!({ keys::UPGRADE_HOOKS: port.to_string(), keys::UPGRADE_TIMEOUT: timeout });
    json!([role])
}

async fn update(groups: &Api<RoleBasedGroup>, roles: Value) {
    let body = Patch::Merge(json!({ "spec": { "roles": roles } }));
    groups.patch("g", &PatchParams::default(), &body).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_pod_drains_and_settles_before_the_next() {
    let hooks = RecordingHooks::default();
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(hooks.clone().serve(listener));
    let stage =
        TestOperator::begin_with(&ControlPlane::shared().await.unwrap(), "hooks", hooks.clone()).await;
    let groups: Api<RoleBasedGroup> = stage.api();
    groups.create(&PostParams::default(), &group(roles("engine:1", port, "60s"))).await.unwrap();
    settled(&groups).await;
    assert!(hooks.log.lock().is_empty(), "hooks of new pods are not called");

    // The condition stays while a pod is waited for, so polling observes it.
    hooks.blocked.lock().extend(["drain g-a-1", "settle g-a-1"]);
    update(&groups, roles("engine:2", port, "60s")).await;
    let waiting = async |request: &str, text: &str| {
        eventually(text, async || {
            let status = groups.get("g").await.unwrap().status.unwrap_or_default();
            let condition = status.conditions.into_iter().find(|one| one.kind == "WaitingForHooks")?;
            (condition.status == "True" && condition.message == text).then_some(())
        })
        .await;
        hooks.blocked.lock().remove(request);
    };
    waiting("drain g-a-1", "g-a-1 has yet to drain: uploads").await;
    waiting("settle g-a-1", "g-a-1 has yet to settle: uploads").await;
    settled(&groups).await;
    let mut log = hooks.log.lock().clone();
    for what in ["drain g-a-1", "settle g-a-1", "drain g-a-0", "settle g-a-0"] {
        assert!(log.iter().filter(|entry| *entry == what).count() > TEST_TIMEOUT, "{what}: {log:?}");
    }
    log.dedup();
    let order =
        ["g-a-1", "g-a-0"].map(|pod| ["drain", "restart", "settle"].map(|what| format!("{what} {pod}")));
    assert_eq!(log, order.concat());

    hooks.unresponsive.store(true, Ordering::Relaxed);
    update(&groups, roles("engine:3", port, "2s")).await;
    let event = events::event(&stage, "RoleInstance", "g-a-1", "TimedOut").await;
    assert_eq!(event.type_.as_deref(), Some("Warning"));
    let note = event.note.unwrap();
    assert!(note.starts_with("g-a-1 did not drain within 2s: calling its hook failed: "), "{note}");
    settled(&groups).await;
    assert_eq!(pods(&stage.client).await.iter().map(restarts).collect::<Vec<_>>(), [2, 2]);
    stage.end().await;
}

/// The requests that pods got, without repetitions.
fn requests(hooks: &RecordingHooks) -> Vec<String> {
    let mut log = hooks.log.lock().clone();
    log.dedup();
    log
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cheapest_instance_drains_before_it_is_removed() {
    let hooks = RecordingHooks::default();
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(hooks.clone().serve(listener));
    let stage =
        TestOperator::begin_with(&ControlPlane::shared().await.unwrap(), "scale-in", hooks.clone()).await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let mut engines = role("a", 3, "engine:1");
    engines["scalingAdapter"] = json!({ "enable": true });
    engines["annotations"] = json!({ keys::UPGRADE_HOOKS: port.to_string(), keys::UPGRADE_TIMEOUT: "60s",
        keys::ROLE_INSTANCE_PATTERN: "Stateless" });
    groups.create(&PostParams::default(), &group(json!([engines]))).await.unwrap();
    settled(&groups).await;
    let before = pods(&stage.client).await;
    let name = |at: usize| before[at].metadata.name.clone().unwrap();
    // The annotation of a pod takes precedence over what its hook reports. The hooks of the others report more than that.
    let body = Patch::Merge(json!({ "metadata": { "annotations": { keys::POD_DELETION_COST: "10" } } }));
    stage.api::<Pod>().patch(&name(1), &PatchParams::default(), &body).await.unwrap();
    hooks.removal_costs.lock().extend([(name(0), 30), (name(1), 40), (name(2), 20)]);
    let cheapest = name(1);
    let adapters: Api<RoleBasedGroupScalingAdapter> = stage.api();
    let scale = async |replicas: i32| {
        let body = Patch::Merge(json!({ "spec": { "replicas": replicas } }));
        eventually("the adapter has replicas", async || adapters.get("g-a").await.unwrap().spec.replicas)
            .await;
        adapters.patch_scale("g-a", &PatchParams::default(), &body).await.unwrap();
    };

    // A drain that is cancelled returns the instance to service.
    let removal: &'static str = format!("remove {cheapest}").leak();
    hooks.blocked.lock().insert(removal);
    scale(2).await;
    eventually("the group names the draining instance", async || {
        let status = groups.get("g").await.unwrap().status.unwrap_or_default();
        let condition = status.conditions.into_iter().find(|one| one.kind == "ScalingIn")?;
        (condition.status == "True" && condition.message.starts_with("draining 1 instance: g-a-"))
            .then_some(())
    })
    .await;
    eventually("the pod drains", async || requests(&hooks).contains(&removal.to_owned()).then_some(())).await;
    scale(3).await;
    settled(&groups).await;
    eventually("it settles", async || {
        let done = format!("settle {cheapest}");
        (hooks.log.lock().iter().filter(|entry| **entry == done).count() > TEST_TIMEOUT).then_some(())
    })
    .await;
    settled(&groups).await;
    assert_eq!(hooks.draining.lock().len(), 0);
    let uids = |pods: &[Pod]| pods.iter().map(|pod| pod.metadata.uid.clone()).collect::<Vec<_>>();
    assert_eq!(uids(&pods(&stage.client).await), uids(&before));
    let returned = requests(&hooks);
    let expected = [
        removal.to_owned(),
        format!("settle {cheapest}"),
        format!("cancel {cheapest}"),
        format!("settle {cheapest}"),
    ];
    assert_eq!(returned, expected);

    hooks.blocked.lock().clear();
    hooks.log.lock().clear();
    scale(2).await;
    let left = eventually("one pod is deleted", async || {
        let left = pods(&stage.client).await;
        (left.len() == 2).then_some(left)
    })
    .await;
    assert_eq!(uids(&left), [before[0].metadata.uid.clone(), before[2].metadata.uid.clone()]);
    settled(&groups).await;
    assert_eq!(requests(&hooks), [removal], "only this pod was called");
    assert!(hooks.log.lock().len() > TEST_TIMEOUT);
    let event = events::event(&stage, "RoleInstanceSet", "g-a", "Draining").await;
    let note = event.note.unwrap();
    assert!(note.contains("drains: the instance is beyond the set's replicas"), "{note}");
    stage.end().await;
}
