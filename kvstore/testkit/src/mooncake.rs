//! Mooncake's own masters, clients and store nodes. The first use installs them.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use moongate_master_client::admin::{self, AdminClient};
use moongate_master_client::rpc::{self, MasterClient};
use moongate_runtime::Supervisor;
use moongate_testkit::free_port;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::LIMIT;

/// Python programs, and scripts that install Mooncake.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/mooncake");
/// Generous, because the first installation downloads packages.
const SETUP_LIMIT: Duration = Duration::from_secs(600);
/// The newest release.
pub const NEWEST: &str = "0.3.14";
/// The newest release that is built without CUDA, which most end-to-end tests and benchmarks run.
pub const NEWEST_WITHOUT_CUDA: &str = "0.3.13.post1";
/// All tested releases. [`has`] reports whether a release has a wheel for this machine's Python.
pub const RELEASES: [&str; 6] =
    [NEWEST, NEWEST_WITHOUT_CUDA, "0.3.12.post1", "0.3.11.post1", "0.3.10", "0.3.9"];
pub const HANDSHAKE: &str = "P2PHANDSHAKE";

/// Maximum objects and bytes of one batch put: a client copies them through a buffer of 16 MiB.
const BATCH: usize = 512;
const BATCH_BYTES: usize = 4 << 20;

/// Folder of installed releases, beside the build's profiles: a test is `<profile>/deps/<name>`.
fn installation() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(3).expect("cargo built the test").join("mooncake")
}

/// Installs Mooncake if needed, and returns its folder.
async fn installed() -> PathBuf {
    let into = installation();
    let mut setup = Command::new(Path::new(FOLDER).join("setup"));
    let ran = tokio::time::timeout(SETUP_LIMIT, setup.arg(&into).kill_on_drop(true).output()).await;
    let ran = ran.expect("mooncake/setup ends in time").expect("mooncake/setup can be run");
    let output = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "mooncake/setup failed:\n{output}");
    into
}

/// Folder of libraries that a release needs, and that a machine without a GPU lacks.
fn libraries(release: &Path) -> PathBuf {
    release.join("libraries")
}

/// Whether a release has a wheel for this machine's Python. If not, its tests are skipped.
pub async fn has(release: &str) -> bool {
    installed().await.join(release).exists()
}

/// A running `mooncake_master`, killed on drop.
pub struct RealMaster {
    release: &'static str,
    flags: &'static [&'static str],
    child: Child,
    pub rpc: String,
    pub admin: String,
}

impl RealMaster {
    pub async fn start(release: &'static str) -> Self {
        Self::start_with(release, &[]).await
    }

    /// Starts a master with additional flags; by default it only listens on loopback.
    pub async fn start_with(release: &'static str, flags: &'static [&'static str]) -> Self {
        Self::start_at(release, flags, free_port(), free_port()).await
    }

    async fn start_at(release: &'static str, flags: &'static [&'static str], rpc: u16, admin: u16) -> Self {
        let folder = installed().await.join(release);
        let mut command = Command::new(folder.join("mooncake/mooncake_master"));
        command.env("LD_LIBRARY_PATH", libraries(&folder));
        command.args(["--rpc_address=127.0.0.1", "--logtostderr=true"]);
        command.args([format!("--rpc_port={rpc}"), format!("--metrics_port={admin}")]).args(flags);
        if [NEWEST, NEWEST_WITHOUT_CUDA].contains(&release) {
            // Older releases lack the flag.
            command.arg("--metrics_host=127.0.0.1");
        }
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).spawn().unwrap();
        let [rpc, admin] = [rpc, admin].map(|port| format!("127.0.0.1:{port}"));
        let master = Self { release, flags, child, rpc, admin };
        let admin = master.admin();
        let ready = async {
            while !admin.health().await.is_ok_and(|health| health.service_ready) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LIMIT, ready).await.expect("the master serves in time");
        master
    }

    pub async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// The process id of the master.
    pub fn id(&self) -> u32 {
        self.child.id().expect("the master still runs")
    }

    /// Starts another master at the same addresses.
    pub async fn start_again(self) -> Self {
        let port = |address: &str| address.rsplit_once(':').unwrap().1.parse().unwrap();
        Self::start_at(self.release, self.flags, port(&self.rpc), port(&self.admin)).await
    }

    pub fn admin(&self) -> AdminClient {
        AdminClient::new(&self.admin, admin::AdminClientOptions::default()).unwrap()
    }

    pub fn client(&self, supervisor: &Supervisor) -> MasterClient {
        MasterClient::new(&self.rpc, rpc::MasterClientOptions::default(), supervisor)
    }
}

/// A command that runs one of the Python programs with a release of Mooncake.
pub async fn program(release: &str, name: &str) -> Command {
    let mooncake = installed().await;
    let mut command = Command::new(mooncake.join("venv/bin/python"));
    command.arg(Path::new(FOLDER).join(name)).env("LD_LIBRARY_PATH", libraries(&mooncake.join(release)));
    command.env("PYTHONPATH", mooncake.join(release)).env("NO_PROXY", "*").env("no_proxy", "*");
    command
}

/// The script that runs Mooncake's store service, and the arguments that select a release. Installs its dependencies.
pub async fn service(release: &str) -> (PathBuf, Vec<String>) {
    let (script, mooncake) = (Path::new(FOLDER).join("service"), installed().await);
    let choice = vec![mooncake.to_str().expect("a plain path").to_owned(), release.to_owned()];
    let ready = Command::new(&script).args(&choice).kill_on_drop(true).status();
    let ready = tokio::time::timeout(SETUP_LIMIT, ready).await.expect("mooncake/service ends in time");
    assert!(ready.expect("mooncake/service can be run").success(), "mooncake/service failed");
    (script, choice)
}

/// Runs `scenario.py` with a release's client, and returns its output lines.
pub async fn scenario(release: &str, rpc: &str, admin: &str) -> Vec<String> {
    run_program(release, "scenario.py", &[rpc, admin], &[]).await
}

/// Runs `disks.py` with a release's client, and returns its output lines.
pub async fn disks(release: &str, rpc: &str, admin: &str, disk: &Path) -> Vec<String> {
    let arguments = [rpc, admin, disk.to_str().expect("a plain path")];
    let variables = [("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "file_per_key_storage_backend")];
    run_program(release, "disks.py", &arguments, &variables).await
}

/// Runs `prefetch.py` with the newest client, and returns its output lines.
pub async fn prefetch(rpc: &str, admin: &str, disk: &Path) -> Vec<String> {
    let arguments = [rpc, admin, disk.to_str().expect("a plain path")];
    // Only this backend supports prefetching. It writes complete buckets.
    let variables = [
        ("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "bucket_storage_backend"),
        ("MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT", "2"),
    ];
    run_program(NEWEST, "prefetch.py", &arguments, &variables).await
}

async fn run_program(
    release: &str,
    name: &str,
    arguments: &[&str],
    variables: &[(&str, &str)],
) -> Vec<String> {
    let mut command = program(release, name).await;
    command.env("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1").envs(variables.iter().copied());
    let ran = command.args(arguments).kill_on_drop(true).output();
    let ran = tokio::time::timeout(4 * LIMIT, ran).await.expect("it ends in time").unwrap();
    let errors = String::from_utf8_lossy(&ran.stderr);
    let last: Vec<&str> = errors.lines().rev().take(5).collect();
    assert!(ran.status.success(), "{release}: {name} failed: {last:?}");
    let lines = String::from_utf8_lossy(&ran.stdout);
    // The client's coloured log output may be appended to a line.
    let note = |line: &str| Some(line.strip_prefix("> ")?.split('\u{1b}').next()?.to_owned());
    lines.lines().filter_map(note).collect()
}

/// A process with Mooncake's own client, killed on drop.
pub struct RealNode {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl RealNode {
    /// Starts a client that mounts `mebibytes` of memory: 0, or at least 16.
    pub async fn start(master: &RealMaster, metadata: &str, mebibytes: u32) -> Self {
        Self::start_of(master.release, &master.rpc, metadata, mebibytes).await
    }

    /// Starts a client of any release, with the master at `rpc`.
    pub async fn start_of(release: &str, rpc: &str, metadata: &str, mebibytes: u32) -> Self {
        Self::start_with(release, rpc, metadata, mebibytes, &[]).await
    }

    /// As [`RealNode::start_of`], with environment variables.
    pub async fn start_with(
        release: &str,
        rpc: &str,
        metadata: &str,
        mebibytes: u32,
        variables: &[(&str, &str)],
    ) -> Self {
        let mut command = program(release, "store.py").await;
        command.args([rpc, metadata, &mebibytes.to_string()]).envs(variables.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut node = Self { stdin: child.stdin.take().unwrap(), child, lines };
        assert_eq!(node.read_response().await, "ready");
        node
    }

    pub async fn put(&mut self, key: &str, size: usize) {
        assert_eq!(self.send_command(&format!("put {key} {size}")).await, "0", "put {key}");
    }

    /// Puts many objects, preferably into this node's own memory. Returns the number of batches that failed partly or
    /// completely.
    pub async fn fill(&mut self, keys: &[String], size: usize) -> usize {
        self.fill_copies(keys, size, 1).await
    }

    /// As [`RealNode::fill`], with replicas on other nodes.
    pub async fn fill_copies(&mut self, keys: &[String], size: usize, copies: usize) -> usize {
        let mut failed = 0;
        for keys in keys.chunks((BATCH_BYTES / size).clamp(1, BATCH)) {
            let result = self.send_command(&format!("fill {copies} {size} {}", keys.join(" "))).await;
            failed += usize::from(result != "0");
        }
        failed
    }

    /// Removes an object without a lease.
    pub async fn remove(&mut self, key: &str) {
        assert_eq!(self.send_command(&format!("remove {key}")).await, "0", "remove {key}");
    }

    /// Gets an object, and returns its size, or 0 on failure.
    pub async fn get(&mut self, key: &str) -> usize {
        self.send_command(&format!("get {key}")).await.parse().unwrap()
    }

    /// Closes the client, which unmounts its memory.
    pub async fn close(&mut self) {
        assert_eq!(self.send_command("close").await, "closed");
    }

    pub async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// Sends a command to `store.py`, and returns its response.
    pub async fn send_command(&mut self, command: &str) -> String {
        self.stdin.write_all(format!("{command}\n").as_bytes()).await.unwrap();
        self.read_response().await
    }

    async fn read_response(&mut self) -> String {
        let response = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("store.py failed");
                if let Some(response) = line.strip_prefix("> ") {
                    return response.to_owned();
                }
            }
        };
        tokio::time::timeout(LIMIT, response).await.expect("store.py responds in time")
    }
}
