//! Pods in which store nodes run, each at an address of its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use moongate_testkit::{PodRuntime, free_port, pod_address};
use parking_lot::Mutex;
use serde_json::Value;

use crate::harness::process::MoongateProcess;
use crate::harness::{client, wait_until};

/// A node is back only after this, although the kubelet calls its container ready before.
const ABSENCE: Duration = Duration::from_secs(1);

/// What the kubelet has seen.
#[derive(Clone, Default)]
pub(crate) struct ObservedReplacements {
    /// Pods in the order in which they were restarted.
    pub(crate) replaced: Vec<String>,
    /// Violations of the order of the upgrade.
    pub(crate) violations: Vec<String>,
}

#[derive(Clone)]
pub(crate) struct StoreNodePods {
    /// Where all of them serve HTTP.
    pub(crate) port: u16,
    pub(crate) seen: Arc<Mutex<ObservedReplacements>>,
    master: String,
    /// The URL of the master's admin server.
    admin: String,
    folder: Arc<tempfile::TempDir>,
    /// The running nodes, by IP address.
    running: Arc<Mutex<HashMap<String, MoongateProcess>>>,
    holders: Arc<Mutex<Vec<MoongateProcess>>>,
}

impl StoreNodePods {
    pub(crate) fn new(master: &str, admin: &str) -> Self {
        Self {
            port: free_port(),
            seen: Arc::default(),
            master: master.to_owned(),
            admin: admin.to_owned(),
            folder: Arc::new(tempfile::tempdir().unwrap()),
            running: Arc::default(),
            holders: Arc::default(),
        }
    }

    fn run(&self, ip: &str) {
        let socket = self.folder.path().join(ip);
        let memory = format!("--memory=holder:{}", socket.display());
        let (host, port) = (format!("-Dlocal_hostname={ip}"), format!("--port={}", self.port));
        let master = format!("-Dmaster_server_address={}", self.master);
        let metadata = "-Dmetadata_server=P2PHANDSHAKE";
        let size = "-Dglobal_segment_size=64mb";
        let node = MoongateProcess::start(&["store", &port, &host, &master, metadata, size, &memory]);
        self.running.lock().insert(ip.to_owned(), node);
    }

    async fn wait_until_settled(&self, ip: &str) -> (u16, Value) {
        let asked = client().get(format!("http://{ip}:{}/settled", self.port)).send().await;
        match asked {
            Ok(answer) => (answer.status().as_u16(), answer.json().await.unwrap_or_default()),
            Err(_) => (0, Value::Null),
        }
    }

    /// Whether the master still places new objects on the node.
    async fn receives_new_objects(&self, ip: &str, other: &str) -> bool {
        for number in 0..20 {
            let key = format!("beside-{ip}-{number}");
            let put = client().put(format!("http://{other}:{}/api/put", self.port));
            let body = serde_json::json!({ "key": key, "value": "x".repeat(1000) }).to_string();
            assert_eq!(put.body(body).send().await.unwrap().status(), 200);
            let place = client().get(format!("http://{}/query_key?key={key}", self.admin)).send().await;
            let place = place.unwrap().text().await.unwrap();
            assert!(place.contains("127."), "{place}");
            if place.contains(&format!("{ip}:")) {
                return true;
            }
        }
        false
    }

    fn record_violation(&self, what: String) {
        self.seen.lock().violations.push(what);
    }
}

impl PodRuntime for StoreNodePods {
    async fn start(&self, pod: &Pod) -> String {
        let ip = pod_address(pod, 127);
        let socket = self.folder.path().join(&ip);
        self.holders.lock().push(MoongateProcess::start(&[
            "store-holder",
            "--socket",
            socket.to_str().unwrap(),
        ]));
        wait_until("the holder is there", || socket.exists()).await;
        self.run(&ip);
        while self.wait_until_settled(&ip).await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        ip
    }

    /// Nobody but this node may be away, and it must have been drained.
    async fn restart(&self, pod: &Pod, _: &str) {
        let name = pod.metadata.name.clone().unwrap();
        let status = pod.status.as_ref().unwrap();
        let ip = status.pod_ip.clone().unwrap();
        let mut conditions = status.conditions.iter().flatten();
        if conditions.any(|one| one.type_ == "InPlaceUpdateReady" && one.status == "True") {
            self.record_violation(format!("{name} is restarted with an open gate"));
        }
        let (code, body) = self.wait_until_settled(&ip).await;
        if code != 202 || body["drained"] != true {
            self.record_violation(format!("{name} is restarted before it has drained: {code} {body}"));
        }
        let others: Vec<String> = self.running.lock().keys().filter(|other| **other != ip).cloned().collect();
        for passthrough in others {
            if self.wait_until_settled(&passthrough).await.0 != 200 {
                self.record_violation(format!("{name} is restarted before {passthrough} has settled"));
            } else if self.receives_new_objects(&ip, &passthrough).await {
                self.record_violation(format!("{name} is given objects although it has drained"));
            }
        }
        self.seen.lock().replaced.push(name);
        let old = self.running.lock().remove(&ip).unwrap();
        old.signal("TERM").await;
        assert!(old.wait().await.status.success());
        let nodes = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(ABSENCE).await;
            nodes.run(&ip);
        });
    }
}
