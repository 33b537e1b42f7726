//! A Prometheus that reads what the chart's PodMonitors name and keeps the chart's rules, as the Prometheus operator would set it up.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::cluster::{EndToEndCluster, wait_until};

const PROMETHEUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/prometheus");
/// Nobody else is on this host.
const ADDRESS: &str = "127.0.0.1:9090";
/// Between two looks at which pods there are.
const PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct PrometheusServer {
    _child: Child,
    client: reqwest::Client,
}

fn monitoring(cluster: &EndToEndCluster, kind: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("monitoring.coreos.com", "v1", kind);
    Api::default_namespaced_with(cluster.namespace.client.clone(), &ApiResource::from_gvk(&kind))
}

/// Where the pods of a PodMonitor are to be read, as Prometheus reads it in a file. Debian's cannot ask an API server.
async fn targets(cluster: &EndToEndCluster, monitor: &DynamicObject) -> Value {
    let selector = monitor.data["spec"]["selector"]["matchLabels"].as_object().unwrap();
    let mut targets = Vec::new();
    for pod in cluster.pods().await {
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let is_selected =
            selector.iter().all(|(name, value)| labels.get(name).map(String::as_str) == value.as_str());
        let Some(address) = pod.status.as_ref().and_then(|status| status.pod_ip.clone()) else { continue };
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers).filter(|_| is_selected);
        for container in containers {
            for endpoint in monitor.data["spec"]["podMetricsEndpoints"].as_array().unwrap() {
                let mut ports = container.ports.iter().flatten();
                let Some(port) = ports.find(|port| port.name.as_deref() == endpoint["port"].as_str()) else {
                    continue;
                };
                let mut labels = json!({ "namespace": pod.metadata.namespace, "pod": pod.metadata.name,
                    "container": container.name });
                for given in endpoint["relabelings"].as_array().into_iter().flatten() {
                    labels[given["targetLabel"].as_str().unwrap()] = given["replacement"].clone();
                }
                targets.push(
                    json!({ "targets": [format!("{address}:{}", port.container_port)], "labels": labels }),
                );
            }
        }
    }
    json!(targets)
}

/// Writes which pods there are, again and again.
async fn follow(cluster: Arc<EndToEndCluster>, monitors: Vec<DynamicObject>, folder: PathBuf) {
    loop {
        for monitor in &monitors {
            let file = folder.join(format!("{}.json", monitor.metadata.name.as_ref().unwrap()));
            let unfinished = file.with_extension("new");
            std::fs::write(&unfinished, targets(&cluster, monitor).await.to_string()).unwrap();
            std::fs::rename(unfinished, file).unwrap();
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// What a PodMonitor means.
fn job(monitor: &DynamicObject) -> Value {
    let name = monitor.metadata.name.as_ref().unwrap();
    let interval = &monitor.data["spec"]["podMetricsEndpoints"][0]["interval"];
    json!({ "job_name": name, "scrape_interval": interval, "file_sd_configs": [{ "files": [format!("{name}.json")] }] })
}

impl PrometheusServer {
    pub(crate) async fn start(cluster: &Arc<EndToEndCluster>) -> Self {
        let all = ListParams::default();
        let monitors = monitoring(cluster, "PodMonitor").list(&all).await.unwrap().items;
        assert!(!monitors.is_empty(), "the release has no PodMonitors");
        let jobs: Vec<Value> = monitors.iter().map(job).collect();
        let rules = monitoring(cluster, "PrometheusRule").list(&all).await.unwrap().items;
        let folder = cluster.folder.join("prometheus");
        std::fs::create_dir_all(&folder).unwrap();
        // YAML reads JSON.
        let write = |name: &str, value: &Value| std::fs::write(folder.join(name), value.to_string()).unwrap();
        write("rules.yml", &rules[0].data["spec"]);
        write(
            "prometheus.yml",
            &json!({ "global": { "evaluation_interval": "5s" }, "rule_files": ["rules.yml"],
            "scrape_configs": jobs }),
        );
        tokio::spawn(follow(Arc::clone(cluster), monitors, folder.clone()));
        let prometheus =
            Self { _child: spawn(&folder), client: reqwest::Client::builder().no_proxy().build().unwrap() };
        wait_until("Prometheus reads all pods", async || {
            let targets = prometheus.get("targets?state=active", &[]).await?;
            let targets = targets["activeTargets"].as_array().cloned().unwrap_or_default();
            let ill: Vec<&Value> =
                targets.iter().filter(|one| one["health"] != "up").map(|one| &one["lastError"]).collect();
            if targets.len() >= jobs.len() && ill.is_empty() {
                Ok(())
            } else {
                Err(format!("{} of {targets:?}: {ill:?}", targets.len()))
            }
        })
        .await;
        prometheus
    }

    async fn get(&self, path: &str, query: &[(&str, &str)]) -> Result<Value, String> {
        let url = reqwest::Url::parse_with_params(&format!("http://{ADDRESS}/api/v1/{path}"), query).unwrap();
        let answer = self.client.get(url).send().await.map_err(|error| error.to_string())?;
        let body: Value = answer.json().await.map_err(|error| error.to_string())?;
        if body["status"] == "success" { Ok(body["data"].clone()) } else { Err(body.to_string()) }
    }

    /// All rules, and how they are.
    pub(crate) async fn rules(&self) -> Vec<Value> {
        let groups = self.get("rules", &[]).await.unwrap()["groups"].as_array().unwrap().clone();
        groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
    }

    /// What a query answers now.
    pub(crate) async fn query(&self, query: &str) -> Vec<Value> {
        let data = self.get("query", &[("query", query)]).await;
        data.unwrap_or_else(|error| panic!("{query}: {error}"))["result"].as_array().unwrap().clone()
    }
}

fn spawn(folder: &Path) -> Child {
    let log = std::fs::File::create(folder.join("log")).unwrap();
    let mut command = Command::new(PROMETHEUS);
    command
        .arg(format!("--web.listen-address={ADDRESS}"))
        .arg("--config.file")
        .arg(folder.join("prometheus.yml"));
    command.arg("--storage.tsdb.path").arg(folder.join("data"));
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}
