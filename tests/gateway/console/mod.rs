//! The console: its files, their build, the JSON document that they show, and the page in a browser.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::harness::commands::run_to_success;
use crate::harness::process::MoongateProcess;
use crate::harness::{TEST_TIMEOUT, client};

/// Time limit for installing compilers or a driver on a slow network.
const SETUP_LIMIT: Duration = Duration::from_secs(300);
/// Time limit for all checks in the browser.
const CHECK_LIMIT: Duration = Duration::from_secs(240);
const FILES: [&str; 3] = ["index.html", "console.js", "console.css"];
/// Maximum size of the whole page in bytes.
const MOST_BYTES: usize = 100_000;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder in the build's target directory.
fn target(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join(name)
}

/// `moongate up`, as the base URL for clients and the URL of the admin listener.
async fn up() -> (MoongateProcess, String, String) {
    let mut binary = MoongateProcess::start(&["up", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"]);
    let address = |line: &str| {
        let (_, rest) = line.split_once("http://").unwrap_or_else(|| panic!("no URL in {line:?}"));
        format!("http://{}", rest.split(['/', ' ']).next().unwrap_or_default())
    };
    let public = address(&binary.wait_for_line("Moongate is up").await);
    let admin = address(&binary.wait_for_line("Console:").await);
    (binary, format!("{public}/v1"), admin)
}

#[tokio::test]
async fn the_page_is_built_from_its_source() {
    let console = root().join("gateway/console");
    let into = tempfile::tempdir().unwrap();
    let build = console.join("build");
    run_to_success(SETUP_LIMIT, Command::new(build).arg(into.path()).arg(target("console"))).await;
    for file in FILES {
        let built = fs::read(into.path().join(file)).unwrap();
        let kept = fs::read(console.join("dist").join(file)).unwrap();
        assert!(
            built == kept,
            "gateway/console/dist/{file} is not what its source gives; run gateway/console/build"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_is_small_and_loads_nothing_from_other_servers() {
    let (_binary, _, admin) = up().await;
    let mut size = 0;
    for (path, kind) in [
        ("console", "text/html; charset=utf-8"),
        ("console/console.js", "text/javascript; charset=utf-8"),
        ("console/console.css", "text/css; charset=utf-8"),
    ] {
        let answer = client().get(format!("{admin}/{path}")).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        let header = |name| answer.headers()[name].to_str().unwrap();
        assert_eq!(header("content-type"), kind);
        assert_eq!(header("x-content-type-options"), "nosniff");
        let policy = header("content-security-policy");
        assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
        size += answer.bytes().await.unwrap().len();
    }
    assert!(size < MOST_BYTES, "the page has {size} bytes");
    let moved = client().get(format!("{admin}/console/")).send().await.unwrap();
    assert_eq!(moved.url().path(), "/console");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_is_open_and_its_data_needs_the_admin_token() {
    let (_binary, addresses) =
        MoongateProcess::gateway(&["--registration".to_owned(), "--admin-token=right".to_owned()]).await;
    let status = async |path: &str, token: Option<&str>| {
        let request = client().get(format!("http://{}/{path}", addresses.admin));
        let request = token.into_iter().fold(request, |request, token| request.bearer_auth(token));
        request.send().await.unwrap().status().as_u16()
    };
    for path in ["console", "console/console.js", "console/console.css"] {
        assert_eq!(status(path, None).await, 200, "{path}");
    }
    for path in ["debug/fleet", "debug/decisions"] {
        assert_eq!(status(path, None).await, 401, "{path}");
        assert_eq!(status(path, Some("wrong")).await, 401, "{path}");
        assert_eq!(status(path, Some("right")).await, 200, "{path}");
    }
}

/// The names of all members, as `gateway.ready` or `instances[].id`.
fn members(value: &Value, path: &str, names: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                members(value, &path, names);
                names.insert(path);
            }
        }
        Value::Array(array) => array.iter().for_each(|value| members(value, &format!("{path}[]"), names)),
        _ => {}
    }
}

/// The state once all engines have reported their load and all store nodes are listed.
async fn complete_state(admin: &str) -> Value {
    let complete = async {
        loop {
            let answer = client().get(format!("{admin}/debug/fleet")).send().await.unwrap();
            let state: Value = answer.json().await.unwrap();
            let has_load = |instance: &Value| instance["load"]["reported"].is_object();
            let nodes = state["store"]["nodes"].as_array().map_or(0, Vec::len);
            if nodes == 2 && state["instances"].as_array().unwrap().iter().all(has_load) {
                return state;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, complete).await.expect("engines and store nodes report their state")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documentation_lists_all_members_of_the_state() {
    let (_binary, _, admin) = up().await;
    let state = complete_state(&admin).await;
    let mut real = BTreeSet::new();
    members(&state, "", &mut real);
    // A row lists one or several members of an object: `gateway.ready`, `.draining`.
    let page = fs::read_to_string(root().join("docs/console.md")).unwrap();
    let mut described = BTreeSet::new();
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let cell = row.split(" | ").next().unwrap();
        let mut object = String::new();
        for name in cell.split('`').skip(1).step_by(2) {
            let path = match name.strip_prefix('.') {
                Some(name) => format!("{object}.{name}"),
                None => name.to_owned(),
            };
            object = path.rsplit_once('.').map_or(String::new(), |(object, _)| object.to_owned());
            described.insert(path);
        }
    }
    // Members that only contain others need no row.
    real.retain(|name| !real_parent(name, &state));
    assert_eq!(described, real, "docs/console.md on the left, the gateway on the right");
}

/// Whether a member is an object, or a list of objects.
fn real_parent(name: &str, state: &Value) -> bool {
    let pointer = format!("/{}", name.replace("[].", "/0/").replace('.', "/"));
    let value = state.pointer(&pointer).unwrap_or(&Value::Null);
    value.is_object() || value.get(0).is_some_and(Value::is_object)
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_browser() {
    let folder = root().join("tests/gateway/console");
    let installed = target("console-check");
    run_to_success(SETUP_LIMIT, Command::new(folder.join("setup")).arg(&installed)).await;
    let (_binary, base_url, admin) = up().await;
    let browser = std::env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
    let browser =
        run_to_success(SETUP_LIMIT, Command::new("sh").args(["-c", &format!("command -v {browser}")])).await;
    // To update the screenshots of the documentation: MOONGATE_SCREENSHOTS=docs/console
    let temporary = tempfile::tempdir().unwrap();
    let pictures =
        std::env::var("MOONGATE_SCREENSHOTS").map_or(temporary.path().to_owned(), |path| root().join(path));
    let mut check = Command::new("node");
    check
        .arg(folder.join("check.mjs"))
        .args([&installed, Path::new(browser.trim())])
        .args([&base_url, &admin, "moongate-sim"])
        .arg(&pictures)
        // The machine's proxy must not be used for loopback.
        .env("NO_PROXY", "*")
        .env("no_proxy", "*");
    let said = run_to_success(CHECK_LIMIT, &mut check).await;
    assert_eq!(said.matches("ok ").count(), 9, "{said}");
}
