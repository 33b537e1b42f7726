//! docs/openapi.yaml lists exactly the gateway's paths, and docs/troubleshooting.md exactly the chart's alerts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use reqwest::Method;
use serde_json::Value;

use crate::harness;
use crate::harness::process::MoongateProcess;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Methods of each path in the document, with the listeners that have them.
fn described() -> BTreeMap<String, Vec<(Method, BTreeSet<String>)>> {
    let document: Value = serde_saphyr::from_str(&read("docs/openapi.yaml")).unwrap();
    let operations = |path: &Value| {
        let operations = path.as_object().unwrap().iter().map(|(method, operation)| {
            let tags = operation["tags"].as_array().unwrap();
            let listeners = tags.iter().map(|tag| tag.as_str().unwrap().to_owned()).collect();
            (method.to_uppercase().parse().unwrap(), listeners)
        });
        operations.collect()
    };
    document["paths"].as_object().unwrap().iter().map(|(path, of)| (path.clone(), operations(of))).collect()
}

#[tokio::test]
async fn every_documented_path_exists() {
    let (_gateway, addresses) = MoongateProcess::gateway(&["--registration".to_owned()]).await;
    let client = harness::client();
    let mut asked = 0;
    for (path, operations) in described() {
        // A placeholder name: a 404 for the object still shows that the path exists.
        let path: String = path
            .split('/')
            .map(|part| if part.starts_with('{') { "nobody" } else { part })
            .collect::<Vec<_>>()
            .join("/");
        for (method, listeners) in operations {
            for (listener, address) in [("clients", &addresses.public), ("admin", &addresses.admin)] {
                if !listeners.contains(listener) {
                    continue;
                }
                let request = client.request(method.clone(), format!("http://{address}{path}"));
                let answer = request.body("{}").send().await.unwrap();
                let status = answer.status();
                let text = answer.text().await.unwrap();
                assert!(
                    status != 405 && !text.contains("no such path"),
                    "{method} {path} at {listener}: {status} {text}"
                );
                asked += 1;
            }
        }
    }
    assert!(asked > 15, "{asked}");
}

#[test]
fn every_path_is_documented() {
    let described: BTreeSet<String> = described().into_keys().collect();
    let mut there = BTreeSet::new();
    for file in fs::read_dir(root().join("gateway/src/ingress")).unwrap() {
        let text = read(file.unwrap().path());
        let routes = text.split(".route(").skip(1).filter_map(|rest| rest.trim_start().strip_prefix('"'));
        there.extend(routes.map(|rest| rest.split('"').next().unwrap().replace("{*", "{")));
    }
    let table = read("gateway/src/ingress/inference_paths.rs");
    let passed = table.split_once("INFERENCE_PATHS").unwrap().1.split_once("];").unwrap().0;
    there.extend(passed.split('"').skip(1).step_by(2).map(str::to_owned));
    assert_eq!(described, there, "docs/openapi.yaml on the left, gateway/src/ingress on the right");
}

#[test]
fn every_alert_is_in_the_troubleshooting_page() {
    let page = read("docs/troubleshooting.md");
    let anchors: BTreeSet<&str> =
        page.split("<a id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let mut alerts = BTreeSet::new();
    let texts: Vec<String> =
        ["gateway", "operator", "store"].map(|of| read(format!("charts/moongate/alerts/{of}.yaml"))).into();
    for text in &texts {
        alerts.extend(text.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")));
    }
    assert_eq!(anchors, alerts, "docs/troubleshooting.md on the left, charts/moongate/alerts on the right");
}
