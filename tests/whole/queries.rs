//! Whether the queries of dashboards and alerts answer anything.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::prometheus::PrometheusServer;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/moongate");
/// What a query over the latest minute says; Grafana chooses it by the time between two readings.
const RATE: &str = "1m";

fn files(folder: &str, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(Path::new(CHART).join(folder)).unwrap();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.to_str().unwrap().ends_with(end));
    paths.sort();
    paths
}

/// Queries of all panels, as Grafana sends them when everything is selected.
fn panels() -> Vec<(String, String)> {
    let mut queries = Vec::new();
    for file in files("dashboards", ".json") {
        let dashboard: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let query = target["expr"].as_str().unwrap();
                let query = query.replace("$__rate_interval", RATE).replace("$__range", "1h");
                let query = query.replace("$namespace", ".*").replace("$job", ".*");
                queries.push((format!("{name}: {}", panel["title"].as_str().unwrap()), query));
            }
        }
    }
    queries
}

/// Names of metrics in a query.
fn metrics(query: &str) -> impl Iterator<Item = &str> {
    let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    words.filter(|word| ["moongate", "master_"].iter().any(|prefix| word.starts_with(prefix)))
}

/// What has no data, of the panels' queries, of what rules record, and of all that alerts look at. Whether an alert would fire is tested
/// elsewhere: here it must not.
pub(crate) async fn without_data(prometheus: &PrometheusServer) -> BTreeSet<String> {
    let mut empty = BTreeSet::new();
    for (panel, query) in panels() {
        if prometheus.query(&query).await.is_empty() {
            empty.insert(format!("{panel}: {query}"));
        }
    }
    for rule in prometheus.rules().await {
        let (name, query) = (rule["name"].as_str().unwrap(), rule["query"].as_str().unwrap());
        assert_eq!(rule["health"], "ok", "{rule}");
        assert_ne!(rule["state"], "firing", "{rule}");
        let asked: BTreeSet<&str> =
            if rule["type"] == "recording" { [name].into() } else { metrics(query).collect() };
        for metric in asked {
            if prometheus.query(metric).await.is_empty() {
                empty.insert(format!("rule {name}: {metric}"));
            }
        }
    }
    empty
}
