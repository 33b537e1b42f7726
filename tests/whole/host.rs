//! A host of the test's own: network, mounts and processes that end with it and that nobody else sees.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where pods reach the host.
pub(crate) const HOST: &str = "10.244.0.1";
/// Where names of Services are asked for.
pub(crate) const DNS: &str = "10.96.0.10";
/// Tells the process that it is the one on the host.
const INSIDE: &str = "MOONGATE_TEST_HOST";
const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Services' addresses are all the host's: what is sent there comes to whoever listens there.
const NETWORK: &str = "\
ip link set lo up
ip address add 10.96.0.0/16 dev lo
ip link add pods type bridge
ip address add 10.244.0.1/16 dev pods
ip link set pods up
";

/// Runs a test on such a host, which takes root's rights. The test is this one, so that it comes here twice.
pub(crate) fn run_isolated(test: &str, story: impl Future<Output = ()>) {
    if std::env::var_os(INSIDE).is_some() {
        run("sh", &["-ec", NETWORK]);
        tokio::runtime::Runtime::new().unwrap().block_on(story);
        return;
    }
    // What has to be fetched cannot be from there.
    for (script, argument) in
        [("scripts/helm", "version"), ("scripts/promtool", "--version"), ("scripts/prometheus", "--version")]
    {
        run(&format!("{ROOT}/{script}"), &[argument]);
    }
    run(&format!("{ROOT}/tests/gateway/sdk/setup"), &[sdk().to_str().unwrap()]);
    super::console::set_up();
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--ignored", "--nocapture"]);
    let ended = command.env(INSIDE, "1").stdin(Stdio::null()).status().unwrap();
    assert!(ended.success(), "{ended}");
}

/// Where the OpenAI SDK is installed.
pub(crate) fn sdk() -> PathBuf {
    target("sdk")
}

/// A folder beside the build's own.
pub(crate) fn target(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join(name)
}

/// Runs a program to its end, which must be good, and answers what it prints.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let told = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {}: {told}{said}", arguments.join(" "));
    said
}

/// From now on everything here asks the cluster's DNS, as pods of the namespace do.
pub(crate) fn resolve(folder: &Path, namespace: &str) {
    let file = folder.join("resolv.conf");
    std::fs::write(&file, resolv_conf(namespace)).unwrap();
    run("mount", &["--bind", file.to_str().unwrap(), "/etc/resolv.conf"]);
}

/// What a pod's `/etc/resolv.conf` says.
pub(crate) fn resolv_conf(namespace: &str) -> String {
    let search = format!("{namespace}.svc.cluster.local svc.cluster.local cluster.local");
    format!("nameserver {DNS}\nsearch {search}\noptions ndots:5 timeout:2\n")
}
