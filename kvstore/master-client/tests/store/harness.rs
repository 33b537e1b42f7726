//! Real masters and real store nodes.

#![allow(dead_code, reason = "each test binary uses a part of it")]

#[path = "../../../../tests/world/ports.rs"]
mod ports;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use moongate_master_client::admin::{self, AdminClient};
use moongate_master_client::rpc::{self, MasterClient};
use moongate_runtime::Supervisor;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

pub(crate) use ports::free_port;

/// Installing for the first time takes a while on a slow line.
const SETUP_LIMIT: Duration = Duration::from_secs(600);
/// Long, because it only says when a test hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
pub(crate) const NEWEST: &str = "0.3.13.post1";
/// All releases that are tested with. Whether there is a wheel of one for this machine's Python, [`has`] says.
pub(crate) const RELEASES: [&str; 5] = [NEWEST, "0.3.12.post1", "0.3.11.post1", "0.3.10", "0.3.9"];
pub(crate) const HANDSHAKE: &str = "P2PHANDSHAKE";

/// Objects that are put at once at most, and their bytes: a client copies them through a buffer of 16 MiB.
const BATCH: usize = 512;
const BATCH_BYTES: usize = 4 << 20;

/// Where this file and its programs are. Tests of several packages use them.
fn folder() -> PathBuf {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|it| it.join("kvstore/master-client/tests/store"));
    above.find(|folder| folder.is_dir()).expect("the sources are there")
}

/// Installs Mooncake unless it is there; returns where.
async fn installed() -> PathBuf {
    let into = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("mooncake");
    let mut setup = Command::new(folder().join("setup"));
    let ran = tokio::time::timeout(SETUP_LIMIT, setup.arg(&into).kill_on_drop(true).output()).await;
    let ran = ran.expect("tests/store/setup ends in time").expect("tests/store/setup can be run");
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "tests/store/setup has failed:\n{said}");
    into
}

/// Where a release has the libraries that a machine without a GPU lacks.
fn libraries(release: &Path) -> PathBuf {
    release.join("nvidia/cuda_runtime/lib")
}

/// Whether there is a wheel of a release for this machine's Python. If not, there is nothing to test with.
pub(crate) async fn has(release: &str) -> bool {
    installed().await.join(release).exists()
}

/// A running `mooncake_master`. Killed when dropped.
pub(crate) struct RealMaster {
    release: &'static str,
    flags: &'static [&'static str],
    child: Child,
    pub(crate) rpc: String,
    pub(crate) admin: String,
}

impl RealMaster {
    pub(crate) async fn start(release: &'static str) -> Self {
        Self::start_with(release, &[]).await
    }

    /// With flags beside those that make it listen on loopback.
    pub(crate) async fn start_with(release: &'static str, flags: &'static [&'static str]) -> Self {
        Self::start_at(release, flags, free_port(), free_port()).await
    }

    async fn start_at(release: &'static str, flags: &'static [&'static str], rpc: u16, admin: u16) -> Self {
        let folder = installed().await.join(release);
        let mut command = Command::new(folder.join("mooncake/mooncake_master"));
        command.env("LD_LIBRARY_PATH", libraries(&folder));
        command.args(["--rpc_address=127.0.0.1", "--logtostderr=true"]);
        command.args([format!("--rpc_port={rpc}"), format!("--metrics_port={admin}")]).args(flags);
        if release == NEWEST {
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

    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id().expect("the master still runs")
    }

    /// Another master at the same addresses.
    pub(crate) async fn start_again(self) -> Self {
        let port = |address: &str| address.rsplit_once(':').unwrap().1.parse().unwrap();
        Self::start_at(self.release, self.flags, port(&self.rpc), port(&self.admin)).await
    }

    pub(crate) fn admin(&self) -> AdminClient {
        AdminClient::new(&self.admin, admin::AdminClientOptions::default()).unwrap()
    }

    pub(crate) fn client(&self, supervisor: &Supervisor) -> MasterClient {
        MasterClient::new(&self.rpc, rpc::MasterClientOptions::default(), supervisor)
    }
}

/// A Python program of this folder, with a release of Mooncake.
pub(crate) async fn program(release: &str, name: &str) -> Command {
    let mooncake = installed().await;
    let mut command = Command::new(mooncake.join("venv/bin/python"));
    command.arg(folder().join(name)).env("LD_LIBRARY_PATH", libraries(&mooncake.join(release)));
    command.env("PYTHONPATH", mooncake.join(release)).env("NO_PROXY", "*").env("no_proxy", "*");
    command
}

/// Mooncake's store service of a release, and the arguments that choose it, once all that it needs is there.
pub(crate) async fn service(release: &str) -> (PathBuf, Vec<String>) {
    let (script, mooncake) = (folder().join("service"), installed().await);
    let choice = vec![mooncake.to_str().expect("a plain path").to_owned(), release.to_owned()];
    let ready = Command::new(&script).args(&choice).kill_on_drop(true).status();
    let ready = tokio::time::timeout(SETUP_LIMIT, ready).await.expect("tests/store/service ends in time");
    assert!(ready.expect("tests/store/service can be run").success(), "tests/store/service has failed");
    (script, choice)
}

/// What `scenario.py` notes: how the calls of a release's client end.
pub(crate) async fn scenario(release: &str, rpc: &str, admin: &str) -> Vec<String> {
    log_file(release, "scenario.py", &[rpc, admin]).await
}

/// What `disks.py` notes: how the calls of a client with a disk end.
pub(crate) async fn disks(release: &str, rpc: &str, admin: &str, disk: &Path) -> Vec<String> {
    log_file(release, "disks.py", &[rpc, admin, disk.to_str().expect("a plain path")]).await
}

async fn log_file(release: &str, name: &str, arguments: &[&str]) -> Vec<String> {
    let mut command = program(release, name).await;
    command.env("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1");
    command.env("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "file_per_key_storage_backend");
    let ran = command.args(arguments).kill_on_drop(true).output();
    let ran = tokio::time::timeout(4 * LIMIT, ran).await.expect("it ends in time").unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    let last: Vec<&str> = said.lines().rev().take(5).collect();
    assert!(ran.status.success(), "{release}: {name} has failed: {last:?}");
    let lines = String::from_utf8_lossy(&ran.stdout);
    // A coloured line of the client's log may come before the end of one of ours.
    let note = |line: &str| Some(line.strip_prefix("> ")?.split('\u{1b}').next()?.to_owned());
    lines.lines().filter_map(note).collect()
}

/// A process with Mooncake's own client. Killed when dropped.
pub(crate) struct RealNode {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl RealNode {
    /// One that lends `mebibytes` of memory: none, or at least 16.
    pub(crate) async fn start(master: &RealMaster, metadata: &str, mebibytes: u32) -> Self {
        Self::start_of(master.release, &master.rpc, metadata, mebibytes).await
    }

    /// One of any release, with whatever master serves at `rpc`.
    pub(crate) async fn start_of(release: &str, rpc: &str, metadata: &str, mebibytes: u32) -> Self {
        Self::start_with(release, rpc, metadata, mebibytes, &[]).await
    }

    /// The same with variables in its environment.
    pub(crate) async fn start_with(
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

    pub(crate) async fn put(&mut self, key: &str, size: usize) {
        assert_eq!(self.send_command(&format!("put {key} {size}")).await, "0", "put {key}");
    }

    /// Puts many objects, into this node's own memory while there is room. Returns how many batches of them did not
    /// succeed as a whole.
    pub(crate) async fn fill(&mut self, keys: &[String], size: usize) -> usize {
        self.fill_copies(keys, size, 1).await
    }

    /// The same with copies on other nodes.
    pub(crate) async fn fill_copies(&mut self, keys: &[String], size: usize, copies: usize) -> usize {
        let mut failed = 0;
        for keys in keys.chunks((BATCH_BYTES / size).clamp(1, BATCH)) {
            let result = self.send_command(&format!("fill {copies} {size} {}", keys.join(" "))).await;
            failed += usize::from(result != "0");
        }
        failed
    }

    /// Removes an object that nobody has a lease on.
    pub(crate) async fn remove(&mut self, key: &str) {
        assert_eq!(self.send_command(&format!("remove {key}")).await, "0", "remove {key}");
    }

    /// The size of the object, 0 if it cannot be had.
    pub(crate) async fn get(&mut self, key: &str) -> usize {
        self.send_command(&format!("get {key}")).await.parse().unwrap()
    }

    /// Leaves the store in order.
    pub(crate) async fn close(&mut self) {
        assert_eq!(self.send_command("close").await, "closed");
    }

    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// Does what `store.py` understands, and returns its answer.
    pub(crate) async fn send_command(&mut self, command: &str) -> String {
        self.stdin.write_all(format!("{command}\n").as_bytes()).await.unwrap();
        self.read_response().await
    }

    async fn read_response(&mut self) -> String {
        let answer = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("store.py has failed");
                if let Some(answer) = line.strip_prefix("> ") {
                    return answer.to_owned();
                }
            }
        };
        tokio::time::timeout(LIMIT, answer).await.expect("store.py answers in time")
    }
}
