//! Every example on a real control plane, with our operator under the chart's own permissions and a kubelet that runs no containers.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, PostParams};
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use serde_json::json;

use super::{CHART, examples};

/// Generous, because it only detects a test that hangs.
const TEST_TIMEOUT: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(300);

/// The operator with the chart's permissions, killed when dropped.
struct ChartOperatorProcess(Child);

impl Drop for ChartOperatorProcess {
    fn drop(&mut self) {
        // Already gone is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_example_runs() {
    let plane = ControlPlane::start().await.unwrap();
    let everywhere = plane.namespace("chart").await.unwrap();
    others_kinds(&everywhere.client).await;
    let mut releases = Vec::new();
    let mut operator = None;
    for example in examples() {
        let name = example.file_stem().unwrap().to_str().unwrap().to_owned();
        let namespace = plane.namespace("chart").await.unwrap();
        let values = ["--namespace", &namespace.name, "--values", example.to_str().unwrap()];
        helm(&plane, &[&["install", &name, CHART], &values[..]].concat());
        // The first one's looks after all namespaces.
        if operator.is_none() {
            operator = Some(start_operator(&plane, &namespace, &format!("{name}-operator")).await);
        }
        let pace = KubeletTimings::default();
        let _kubelet = FakeKubelet::start(namespace.client.clone(), &namespace.name, pace).await.unwrap();
        let groups = groups(&namespace);
        becomes_ready(&groups, &name).await;
        let before = groups.get(&name).await.unwrap();
        helm(&plane, &[&["upgrade", &name, CHART], &values[..]].concat());
        let after = groups.get(&name).await.unwrap();
        assert_eq!(after.metadata.generation, before.metadata.generation, "{name}: the same again differs");
        releases.push((name, namespace));
    }
    drop(operator);
    for (name, namespace) in &releases {
        helm(&plane, &["uninstall", name, "--namespace", &namespace.name]);
    }
}

fn helm(plane: &ControlPlane, arguments: &[&str]) {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/helm"));
    let output =
        command.args(arguments).env("KUBECONFIG", plane.kubeconfig()).stdin(Stdio::null()).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "helm {}: {told}", arguments.join(" "));
}

fn groups(namespace: &TestNamespace) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("workloads.x-k8s.io", "v1alpha2", "RoleBasedGroup");
    Api::default_namespaced_with(namespace.client.clone(), &ApiResource::from_gvk(&kind))
}

/// Kinds of the Prometheus operator, as far as it takes to make objects of them.
async fn others_kinds(client: &Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for (kind, plural) in [("PodMonitor", "podmonitors"), ("PrometheusRule", "prometheusrules")] {
        let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
        let version =
            json!({ "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": schema } });
        let definition = json!({
            "metadata": { "name": format!("{plural}.monitoring.coreos.com") },
            "spec": {
                "group": "monitoring.coreos.com",
                "scope": "Namespaced",
                "names": { "kind": kind, "plural": plural, "singular": plural.trim_end_matches('s') },
                "versions": [version],
            },
        });
        definitions
            .create(&PostParams::default(), &serde_json::from_value(definition).unwrap())
            .await
            .unwrap();
    }
}

/// Our operator, as the service account of that name.
async fn start_operator(
    plane: &ControlPlane,
    namespace: &TestNamespace,
    account: &str,
) -> ChartOperatorProcess {
    let accounts: Api<ServiceAccount> = Api::default_namespaced(namespace.client.clone());
    let (parameters, request) = (PostParams::default(), TokenRequest::default());
    let asked = accounts.create_token_request(account, &parameters, &request);
    let token = asked.await.unwrap().status.unwrap().token;
    let (before, after) = fs::read_to_string(plane.kubeconfig())
        .unwrap()
        .split_once("token: \"")
        .map(|(before, after)| (before.to_owned(), after.split_once('"').unwrap().1.to_owned()))
        .unwrap();
    let kubeconfig: PathBuf = plane.logs().join("operator.kubeconfig");
    fs::write(&kubeconfig, format!("{before}token: \"{token}\"{after}")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
    command
        .args(["operator", "--leader-elect", "--admin-listen=127.0.0.1:0"])
        .arg("--kubeconfig")
        .arg(kubeconfig);
    command.env("POD_NAMESPACE", &namespace.name).stdin(Stdio::null());
    ChartOperatorProcess(command.spawn().unwrap())
}

/// Waits until the group is ready.
async fn becomes_ready(groups: &Api<DynamicObject>, name: &str) {
    let begun = Instant::now();
    loop {
        let group = groups.get(name).await.unwrap();
        let conditions = group.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
        if conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True") {
            return;
        }
        assert!(begun.elapsed() < TEST_TIMEOUT, "{name}: {}", group.data["status"]);
        tokio::time::sleep(PAUSE).await;
    }
}
