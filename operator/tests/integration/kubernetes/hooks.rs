//! Upgrade hooks before and after an in-place restart.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use moongate_testkit::{ControlPlane, PodRuntime, pod_address};
use parking_lot::Mutex;
use rbg_api::keys;
use rbg_api::v1alpha2::RoleBasedGroup;
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
    /// Hooks that return 202 until they are removed from here.
    blocked: Arc<Mutex<HashSet<&'static str>>>,
    unresponsive: Arc<AtomicBool>,
}

impl PodRuntime for RecordingHooks {
    async fn start(&self, pod: &Pod) -> String {
        let ip = pod_address(pod, 127);
        self.names.lock().insert(ip.clone(), pod.metadata.name.clone().unwrap());
        ip
    }

    async fn restart(&self, pod: &Pod, _: &str) {
        self.note(format!("restart {}", pod.metadata.name.as_deref().unwrap()));
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
            "GET /settled" => format!("settle {name}"),
            other => format!("{other} {name}"),
        };
        let before = self.log.lock().iter().rev().take_while(|entry| **entry == request).count();
        let waits = before < TEST_TIMEOUT || self.blocked.lock().contains(request.as_str());
        self.note(request);
        let (status, body) = match waits {
            true => ("202 Accepted", r#"{"waiting_for": "uploads"}"#),
            false => ("200 OK", "{}"),
        };
        let length = body.len();
        let answer =
            format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
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
