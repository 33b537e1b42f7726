//! The console of the deployed gateway in a browser: the checks that its own test makes of `moongate up`.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::cluster::{EndToEndCluster, name};
use super::host::{self, run};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Those whose answer depends on what is deployed.
const CHECKS: [&str; 2] = ["topology", "prompt"];

/// Where what drives the browser is installed.
fn driver() -> PathBuf {
    host::target("console-check")
}

/// Fetches what the browser is driven with. Needs the network.
pub(crate) fn set_up() {
    run(&format!("{ROOT}/tests/gateway/console/setup"), &[driver().to_str().unwrap()]);
}

/// The page shows every engine by its pod's name, all pairs and store nodes, and where a prompt is cached.
pub(crate) async fn check(cluster: &EndToEndCluster, base: &str, model: &str) {
    let pods = cluster.pods().await;
    let of = |role: &str| pods.iter().filter(|pod| is_of(pod, role)).map(name).collect::<Vec<_>>();
    let [prefill, decode, store] = ["prefill", "decode", "mooncake-store"].map(of);
    let [prefills, decodes, stores] = [&prefill, &decode, &store].map(Vec::len);
    let engines = [prefill, decode].concat();
    let fleet = json!({ "prefill": prefills, "decode": decodes, "store": stores, "engines": engines });
    let browser = std::env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
    let browser = run("sh", &["-c", &format!("command -v {browser}")]);
    let admin = format!("http://{}:9000", cluster.address_of("gateway").await);
    let pictures = cluster.folder.join("console");
    let given = [
        "NO_PROXY=*",
        "no_proxy=*",
        "node",
        &format!("{ROOT}/tests/gateway/console/check.mjs"),
        driver().to_str().unwrap(),
        browser.trim(),
        &format!("{base}/v1"),
        &admin,
        model,
        pictures.to_str().unwrap(),
        &fleet.to_string(),
    ]
    .map(str::to_owned);
    let checked = move || {
        let given = given.iter().map(String::as_str).chain(CHECKS);
        run("env", &given.collect::<Vec<_>>())
    };
    let said = tokio::task::spawn_blocking(checked).await.unwrap();
    assert_eq!(said.matches("ok ").count(), CHECKS.len(), "{said}");
}

fn is_of(pod: &Pod, role: &str) -> bool {
    pod.metadata.labels.as_ref().and_then(|labels| labels.get(rbg_api::keys::ROLE_NAME)).map(String::as_str)
        == Some(role)
}
