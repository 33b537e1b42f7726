//! The Helm chart: its templates with every example, its settings compared with those of the programs, its alerts and dashboards; and all
//! examples on a real control plane.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod access;
mod autoscaling;
mod engines;
mod install;
mod kubectl;
mod models;
mod multinode;
mod options;
mod planner;
mod rendered;
mod shards;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/moongate");
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts");

/// The pages with tables of metrics: of all programs, and of routers.
const METRICS: [&str; 2] = ["docs/metrics.md", "docs/master.md"];
/// What metrics' names begin with: ours, and those that the master has of Mooncake's.
const PREFIXES: [&str; 6] = ["moongate_", "moongate:", "master_", "mem_cache_", "file_cache_", "total_get_"];
/// What Prometheus adds to the names of histograms.
const SUFFIXES: [&str; 3] = ["_bucket", "_sum", "_count"];

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Runs one of `scripts/`, which must succeed, and returns its output.
fn script(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(format!("{SCRIPTS}/{name}")).args(arguments).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("scripts/{name}: {error}"));
    let told = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "scripts/{name} {}: {told}{said}", arguments.join(" "));
    said
}

/// Files of a folder of the chart with this end, sorted.
fn files(folder: &str, end: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(Path::new(CHART).join(folder)).unwrap();
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_str().unwrap().ends_with(end))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "{folder}/*{end}");
    paths
}

fn examples() -> Vec<PathBuf> {
    files("examples", ".yaml")
}

/// Flags of a command, from its help.
fn flags(command: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_moongate")).args([command, "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let named =
        help.lines().filter_map(|line| line.strip_prefix("      --").or_else(|| line.strip_prefix("  --")));
    named.map(|line| line.split([' ', '=']).next().unwrap().to_owned()).collect()
}

/// All words of a text that can be names of metrics.
fn metrics(text: &str) -> BTreeSet<String> {
    let is_in_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text.split(|c: char| !is_in_name(c));
    let is_name = |word: &&str| PREFIXES.iter().any(|prefix| word.starts_with(prefix));
    words.filter(is_name).map(|word| word.trim_end_matches(':').to_owned()).collect()
}

#[test]
fn templates_are_good_with_every_example() {
    let mut previous = String::new();
    for example in examples() {
        let values = format!("--values={}", example.display());
        script("helm", &["lint", "--strict", CHART, &values]);
        let rendered = rendered(&example);
        assert_ne!(rendered, previous, "{} says the same as the one before", example.display());
        previous = rendered;
    }
    script("chart-readme", &["--check"]);
}

/// A Service called moongate-store would set `MOONGATE_STORE_PORT`, which is a setting, to a URL.
#[test]
fn pods_get_no_variables_from_services() {
    for example in examples() {
        let rendered = rendered(&example);
        let count = |part: &str| rendered.lines().filter(|line| line.trim_start() == part).count();
        let pods = count("containers:");
        assert!(pods > 1, "{}", example.display());
        assert_eq!(count("enableServiceLinks: false"), pods, "{}", example.display());
    }
}

#[test]
fn namespaced_operator_needs_no_cluster_rights() {
    let only = "--set=operator.namespace=here,operator.webhooks=false,operator.clusterPermissions=false";
    let rendered = script("helm", &["template", "release", CHART, "--namespace=here", only]);
    let kinds: BTreeSet<&str> = rendered.lines().filter_map(|line| line.strip_prefix("kind: ")).collect();
    assert!(kinds.contains("Role") && !kinds.iter().any(|kind| kind.starts_with("Cluster")), "{kinds:?}");
}

#[test]
fn an_engine_that_other_values_name_can_be_left_out() {
    let values = format!("--values={CHART}/examples/simulated.yaml");
    let roles = |only: &str| {
        let rendered = script("helm", &["template", "release", CHART, &values, only]);
        let names = ["prefill", "decode"].map(|name| format!("\n      name: {name}\n"));
        names.map(|name| rendered.contains(&name))
    };
    assert_eq!(roles("--set=engines.decode=null"), [true, false]);
    assert_eq!(roles("--set=engines.nobody=null"), [true, true], "what was never named can be left out too");
}

#[test]
fn an_admin_listener_with_tls_is_asked_over_tls() {
    let values = format!("--values={CHART}/examples/guarded.yaml");
    let scraped = "--set=monitoring.podMonitors=true,monitoring.annotations=true";
    let secured = script("helm", &["template", "release", CHART, &values, scraped]);
    let count = |rendered: &str, part: &str| rendered.matches(part).count();
    assert_eq!(count(&secured, "scheme: HTTPS\n"), 2, "probes");
    assert!(secured.contains("scheme: https\n      tlsConfig:\n        serverName: release-gateway\n"));
    assert!(secured.contains("\"prometheus.io/scheme\":\"https\""));
    assert!(secured.contains("admin-tls-key = \"/etc/moongate-admin-tls/tls.key\""));
    assert!(secured.contains("queue-peer = [\"https://release-gateway-peers:9000\"]"));
    assert!(secured.contains("queue-peer-tls-name = \"release-gateway\""));
    assert!(secured.contains("name: MOONGATE_QUEUE_PEER_TOKEN"));
    let open = "--set=gateway.adminTls.secret=";
    let plain = script("helm", &["template", "release", CHART, &values, scraped, open]);
    assert!(plain.contains("queue-peer = [\"http://release-gateway-peers:9000\"]"));
    assert_eq!([count(&plain, "admin-tls"), count(&plain, "https\n"), count(&plain, "HTTPS")], [0, 0, 0]);
}

#[test]
fn an_authenticated_store_has_certificates_in_all_its_programs() {
    let values = format!("--values={CHART}/examples/simulated.yaml");
    let scraped = "--set=monitoring.podMonitors=true";
    let secret = "--set=store.authentication.secretName=store-tls";
    let secured = script("helm", &["template", "release", CHART, &values, scraped, secret]);
    let count = |rendered: &str, part: &str| rendered.matches(part).count();
    assert_eq!(
        count(&secured, "secretName: store-tls\n"),
        4,
        "volumes of master, store nodes, gateway and engine"
    );
    assert_eq!(count(&secured, "mountPath: /etc/moongate-store-tls\n"), 4);
    assert_eq!(count(&secured, "scheme: HTTPS\n"), 3, "probes of the master and of store nodes");
    assert_eq!(count(&secured, "serverName: moongate-store\n"), 2, "PodMonitors of the same");
    for flag in ["--store_tls_cert", "--store-tls-cert"] {
        assert!(secured.contains(&format!("{flag}=/etc/moongate-store-tls/tls.crt")), "{flag}");
    }
    assert!(secured.contains("store-tls-ca = \"/etc/moongate-store-tls/ca.crt\""));
    let hooks = "moongate.io/upgrade-hooks: \"8080\"";
    assert!(!secured.contains(hooks), "of store nodes, for which the operator has no certificate");

    let plain = script("helm", &["template", "release", CHART, &values, scraped]);
    assert_eq!([count(&plain, "store-tls"), count(&plain, "store_tls"), count(&plain, "HTTPS")], [0, 0, 0]);
    assert!(plain.contains(hooks));

    let engines = format!("--values={CHART}/examples/vllm-store.yaml");
    let refused = Command::new(format!("{SCRIPTS}/helm"))
        .args(["template", "release", CHART, &engines, secret])
        .output();
    let told = String::from_utf8_lossy(&refused.unwrap().stderr).into_owned();
    assert!(told.contains("leave store.authentication.secretName empty"), "{told}");
}

#[test]
fn settings_of_the_schema_are_those_of_the_programs() {
    let schema: Value = serde_json::from_str(&read("charts/moongate/values.schema.json")).unwrap();
    // The chart sets the paths of files, and passes secrets in variables.
    let elsewhere = [
        "config",
        "kubeconfig",
        "engine-api-key",
        "registration-token",
        "admin-token",
        "queue-peer-token",
        "config_path",
        "flagfile",
        "fromenv",
        "tryfromenv",
        "undefok",
        "help",
        "version",
    ];
    for (command, definition) in [("gateway", "gatewayConfig"), ("master", "masterConfig")] {
        let names = schema["$defs"][definition]["propertyNames"]["enum"].as_array().unwrap();
        let listed: BTreeSet<String> = names.iter().map(|name| name.as_str().unwrap().to_owned()).collect();
        let mut real = flags(command);
        real.retain(|flag| !elsewhere.contains(&flag.as_str()));
        let differ: Vec<_> = listed.symmetric_difference(&real).collect();
        assert!(
            differ.is_empty(),
            "in {definition} of values.schema.json or in `moongate {command} --help`, but not in both: {differ:?}"
        );
    }
}

/// What helm makes of the chart with an example.
fn rendered(example: &Path) -> String {
    script("helm", &["template", "release", CHART, &format!("--values={}", example.display())])
}

#[test]
fn flags_in_templates_are_those_of_the_programs() {
    let rendered: String = examples().iter().map(|example| rendered(example)).collect();
    let mut checked = BTreeSet::new();
    let mut lines = rendered.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let Some(command) = line
            .strip_prefix("- ")
            .filter(|it| ["operator", "planner", "store", "store-holder", "store-router"].contains(it))
        else {
            continue;
        };
        let known = flags(command);
        while let Some(argument) = lines.next_if(|line| line.starts_with("- --")) {
            let flag = argument.trim_start_matches("- --").split('=').next().unwrap();
            assert!(known.contains(flag), "moongate {command} has no --{flag}");
            checked.insert(format!("{command} --{flag}"));
        }
    }
    assert!(checked.len() > 12, "{checked:?}");
}

#[test]
fn the_gateway_understands_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    for example in examples() {
        let rendered = rendered(&example);
        let after = rendered.split_once("gateway.toml: |\n").unwrap().1;
        let lines: Vec<&str> = after.lines().map_while(|line| line.strip_prefix("    ")).collect();
        assert!(lines.len() > 5, "{lines:?}");
        let file = folder.path().join("gateway.toml");
        fs::write(&file, lines.join("\n")).unwrap();
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_moongate"));
        let output =
            doctor.arg("doctor").arg("--config").arg(&file).env("KUBECONFIG", "none").output().unwrap();
        // 1: there is no cluster. 2 would be a mistake in the file.
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{}: {told}", example.display());
    }
}

#[test]
fn alerts_fire_when_they_should() {
    for file in files("alerts", ".yaml") {
        let file = file.to_str().unwrap();
        let kind: &[&str] =
            if file.ends_with(".test.yaml") { &["test", "rules"] } else { &["check", "rules"] };
        script("promtool", &[kind, &[file]].concat());
    }
}

#[test]
fn queries_are_about_metrics_that_exist() {
    let pages = METRICS.map(read).concat();
    let cells = pages.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let described: BTreeSet<&str> = cells.collect();
    let rules =
        files("alerts", ".yaml").into_iter().filter(|file| !file.to_str().unwrap().ends_with(".test.yaml"));
    let rules: String = rules.map(read).collect();
    let recorded: BTreeSet<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- record: ")).collect();
    let dashboards: String = files("dashboards", ".json").into_iter().map(read).collect();
    let asked = metrics(&format!("{rules}{dashboards}"));
    assert!(asked.len() > 50, "{asked:?}");
    for name in &asked {
        let base = SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        let is_known =
            [name.as_str(), base].iter().any(|name| described.contains(name) || recorded.contains(name));
        assert!(is_known, "{name} is in no table of {METRICS:?}, and no rule records it");
    }
}
