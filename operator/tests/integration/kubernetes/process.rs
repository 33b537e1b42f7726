//! An operator in a process of its own that can be killed: this test program, started again.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use moongate_operator::OperatorOptions;
use moongate_operator::controllers::OperatorError;
use moongate_runtime::Supervisor;

const KUBECONFIG: &str = "MOONGATE_TEST_KUBECONFIG";
const NAMESPACE: &str = "MOONGATE_TEST_NAMESPACE";
const LEASE: &str = "MOONGATE_TEST_LEASE";
/// Duration of the Lease between replicas.
const LEASE_DURATION: Duration = Duration::from_secs(5);

/// The process is killed on drop.
pub(crate) struct OperatorProcess(Child);

impl OperatorProcess {
    pub(crate) fn start(kubeconfig: &Path, namespace: &str) -> Self {
        Self::spawn(Self::command(kubeconfig, namespace))
    }

    /// Starts a replica that elects a leader by this Lease. The Lease's holder begins with the replica's name.
    pub(crate) fn start_replica(kubeconfig: &Path, namespace: &str, lease: &str, name: &str) -> Self {
        let mut command = Self::command(kubeconfig, namespace);
        command.env(LEASE, lease).env("HOSTNAME", name);
        Self::spawn(command)
    }

    fn command(kubeconfig: &Path, namespace: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["kubernetes::process::operator", "--exact", "--ignored", "--nocapture"]);
        command.env(KUBECONFIG, kubeconfig).env(NAMESPACE, namespace);
        command
    }

    fn spawn(mut command: Command) -> Self {
        Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
    }

    /// Peak of its resident memory in bytes.
    pub(crate) fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// Kills the process as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for OperatorProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "other tests start it"]
async fn operator() {
    let Some(kubeconfig) = std::env::var_os(KUBECONFIG) else { return };
    let namespace = std::env::var(NAMESPACE).ok();
    let options = OperatorOptions {
        kubeconfig: Some(PathBuf::from(kubeconfig)),
        lease: namespace.clone().zip(std::env::var(LEASE).ok()),
        lease_duration: LEASE_DURATION,
        namespace,
        ..OperatorOptions::default()
    };
    // The parent process has exited.
    let orphaned = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    tokio::select! {
        () = restarted(options) => {}
        _ = orphaned => {}
    }
}

/// Runs an operator, and another one when it has lost its Lease, as a kubelet does.
async fn restarted(options: OperatorOptions) {
    loop {
        let supervisor = Supervisor::new();
        match moongate_operator::run(options.clone(), &supervisor).await {
            Err(OperatorError::Lease(lost)) => eprintln!("{lost}"),
            ended => return ended.unwrap(),
        }
        supervisor.shutdown(super::TEST_TIMEOUT).await.unwrap();
    }
}
