//! Masters, and where they settle who leads.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use moongate_testkit::free_port;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::certificates::HaCertificates;
use crate::lease::LeaseElection;
use crate::network::{HaNetwork, run};

/// Generous, because it only detects a test that hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// Lines of each log that a test shows when it fails.
const LOGGED: usize = 40;
pub(crate) const MASTERS: usize = 3;
const ETCDS: usize = 3;

/// A node of etcd: `HOST:PORT` for clients without TLS and with it, a URL for the others.
struct EtcdNode {
    plain: String,
    secured: String,
    peer: String,
}

/// What is not as in the simplest cluster.
#[derive(Default)]
struct HaClusterSetup {
    /// Whether masters keep their states on disks.
    on_disks: bool,
    /// Whether these masters write a snapshot every second.
    frequent_snapshots: bool,
    certificates: Option<HaCertificates>,
    /// A Kubernetes Lease for the election, instead of etcd.
    lease: Option<LeaseElection>,
}

/// A master's state on disk.
#[derive(Debug)]
pub(crate) struct StateFolder {
    /// Each copy of a leader's whole state gets another name.
    pub(crate) name: String,
    /// Name of the oldest file of the log, in the order of their records.
    pub(crate) oldest_record: String,
}

/// Three masters, and three nodes of etcd or a Lease. Killed when dropped.
pub(crate) struct HaCluster {
    masters: Vec<Option<Child>>,
    etcds: Vec<Child>,
    nodes: Vec<EtcdNode>,
    /// Ports of the masters' administration, and of their metadata servers.
    admin: Vec<u16>,
    metadata: Vec<u16>,
    http: reqwest::Client,
    setup: HaClusterSetup,
    folder: TempDir,
    network: HaNetwork,
}

impl HaCluster {
    pub(crate) async fn start(network: HaNetwork) -> Self {
        Self::start_with(network, HaClusterSetup::default()).await
    }

    pub(crate) async fn start_on_disks(network: HaNetwork) -> Self {
        Self::start_with(network, HaClusterSetup { on_disks: true, ..HaClusterSetup::default() }).await
    }

    pub(crate) async fn start_with_frequent_snapshots(network: HaNetwork) -> Self {
        let setup = HaClusterSetup { on_disks: true, frequent_snapshots: true, ..HaClusterSetup::default() };
        Self::start_with(network, setup).await
    }

    /// With TLS between masters, and between them and etcd.
    pub(crate) async fn start_secured() -> Self {
        let network = HaNetwork::loopback();
        let certificates = HaCertificates::make(&network.etcd);
        Self::start_with(
            network,
            HaClusterSetup { certificates: Some(certificates), ..HaClusterSetup::default() },
        )
        .await
    }

    /// With a Lease of a real control plane in place of etcd.
    pub(crate) async fn start_with_lease() -> Self {
        let network = HaNetwork::loopback();
        let lease = LeaseElection::start(&network.masters).await;
        Self::start_with(network, HaClusterSetup { lease: Some(lease), ..HaClusterSetup::default() }).await
    }

    async fn start_with(network: HaNetwork, setup: HaClusterSetup) -> Self {
        let mut nodes = Vec::new();
        while nodes.len() < ETCDS && setup.lease.is_none() {
            let [plain, secured] = [free_port(), free_port()].map(|port| format!("{}:{port}", network.etcd));
            let peer = format!("http://127.0.0.1:{}", free_port());
            nodes.push(EtcdNode { plain, secured, peer });
        }
        let (mut admin, mut metadata) = (Vec::new(), Vec::new());
        for _ in 0..MASTERS {
            admin.push(free_port());
            metadata.push(free_port());
        }
        // A master may close a connection that is idle just when it is used again, which is not what is tested.
        let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0);
        let http = http.timeout(Duration::from_secs(1)).build().unwrap();
        let (masters, etcds, folder) = (Vec::new(), Vec::new(), TempDir::new().unwrap());
        let mut cluster = Self { masters, etcds, nodes, admin, metadata, http, setup, folder, network };
        if cluster.setup.lease.is_none() {
            cluster.start_etcds();
            cluster.wait_until("etcd answers", async |it| it.key("x").await.is_some()).await;
        }
        cluster.start_masters();
        cluster
    }

    fn start_masters(&mut self) {
        for master in 0..MASTERS {
            self.masters.push(None);
            self.start_master(master);
        }
    }

    /// The address of the masters in the format of Mooncake's clients.
    pub(crate) fn entry(&self) -> String {
        match &self.setup.lease {
            Some(lease) => lease.service(),
            None => format!("etcd://{}", self.endpoints(|node| &node.plain)),
        }
    }

    fn endpoints(&self, of: impl Fn(&EtcdNode) -> &str) -> String {
        self.nodes.iter().map(of).collect::<Vec<_>>().join(";")
    }

    /// The RPC address of a master.
    pub(crate) fn address(&self, master: usize) -> &str {
        &self.network.masters[master]
    }

    /// The Lease of masters that have one.
    pub(crate) fn lease(&self) -> &LeaseElection {
        self.setup.lease.as_ref().unwrap()
    }

    pub(crate) fn start_master(&mut self, master: usize) {
        let address = &self.network.masters[master];
        let (host, port) = address.rsplit_once(':').unwrap();
        let replication = if self.network.namespaces.is_some() { 50_052 } else { free_port() };
        let etcd = |endpoints| format!("--ha_backend_type=etcd --ha_backend_connstring={endpoints}");
        let backend = match &self.setup {
            HaClusterSetup { lease: Some(lease), .. } => lease.flags(master),
            HaClusterSetup { certificates: Some(certificates), .. } => {
                format!("{} {}", etcd(self.endpoints(|node| &node.secured)), certificates.flags())
            }
            _ => etcd(self.endpoints(|node| &node.plain)),
        };
        let line = format!(
            "{}{} master --enable_ha=true {backend} --rpc_address={host} --rpc_port={port} \
             --ha_replication_port={replication} --metrics_host=127.0.0.1 --metrics_port={} \
             --enable_metric_reporting=false",
            self.network.inside(master).unwrap_or_default(),
            env!("CARGO_BIN_EXE_moongate"),
            self.admin[master],
        );
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap());
        let log = self.folder.path().join(format!("master-{master}.log"));
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        if let Some(lease) = &self.setup.lease {
            command.env("KUBECONFIG", lease.kubeconfig()).env_remove("KUBERNETES_SERVICE_HOST");
        }
        command.args(words).stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true);
        if self.setup.on_disks {
            command.arg(format!("--data_dir={}", self.data_folder(master).display()));
            if self.setup.frequent_snapshots {
                command.arg("--snapshot_interval_seconds=1");
            }
            command.args(["--enable_http_metadata_server", "--http_metadata_server_host=127.0.0.1"]);
            command.arg(format!("--http_metadata_server_port={}", self.metadata[master]));
        }
        self.masters[master] = Some(command.spawn().unwrap());
    }

    fn data_folder(&self, master: usize) -> PathBuf {
        self.folder.path().join(format!("state-{master}"))
    }

    /// The present state of a master on disk.
    pub(crate) fn state(&self, master: usize) -> StateFolder {
        let names = |folder: &Path| {
            let entries = std::fs::read_dir(folder).unwrap().flatten();
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect::<Vec<_>>()
        };
        let folder = self.data_folder(master);
        let name = names(&folder).into_iter().filter(|name| name.starts_with("state-")).max().unwrap();
        let logs = names(&folder.join(&name)).into_iter();
        let oldest_record = logs.filter(|file| file.ends_with(".log")).min().unwrap();
        StateFolder { name, oldest_record }
    }

    pub(crate) async fn kill(&mut self, master: usize) {
        self.masters[master].take().unwrap().kill().await.unwrap();
    }

    /// Kills all masters and all nodes of etcd at once.
    pub(crate) async fn kill_all(&mut self) {
        let mut all: Vec<Child> = self.masters.iter_mut().filter_map(Option::take).collect();
        all.append(&mut self.etcds);
        all.iter_mut().for_each(|it| it.start_kill().unwrap());
        for child in &mut all {
            child.wait().await.unwrap();
        }
    }

    /// Starts all nodes of etcd, with what they have.
    pub(crate) fn start_etcds(&mut self) {
        let all = self.nodes.iter().enumerate().map(|(at, node)| format!("e{at}={}", node.peer));
        let all = all.collect::<Vec<_>>().join(",");
        let etcd = |(at, node)| etcd(self.folder.path(), at, node, self.setup.certificates.as_ref(), &all);
        self.etcds = self.nodes.iter().enumerate().map(etcd).collect();
    }

    pub(crate) async fn kill_etcd(&mut self, node: usize) {
        self.etcds[node].kill().await.unwrap();
    }

    pub(crate) fn signal(&self, master: usize, signal: &str) {
        let id = self.masters[master].as_ref().unwrap().id().unwrap();
        let sent = std::process::Command::new("kill").args([format!("-{signal}"), id.to_string()]).status();
        assert!(sent.unwrap().success());
        // A stop takes hold of one thread after another. Until then the others may still respond, correctly.
        let asked = Instant::now();
        while signal == "STOP" && !is_stopped(id) {
            assert!(asked.elapsed() < Duration::from_secs(60), "it does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Nothing of this master reaches etcd any more.
    pub(crate) async fn disconnect_from_etcd(&self, master: usize) {
        self.disconnect(master, &self.network.etcd).await;
    }

    /// Nothing of this master reaches the others any more.
    pub(crate) async fn disconnect_from_masters(&self, master: usize) {
        for (other, address) in self.network.masters.iter().enumerate() {
            if other != master {
                self.disconnect(master, address.rsplit_once(':').unwrap().0).await;
            }
        }
    }

    async fn disconnect(&self, master: usize, host: &str) {
        let inside = self.network.inside(master).unwrap();
        assert!(run(&format!("{inside}ip route add blackhole {host}/32")).await);
    }

    pub(crate) async fn reconnect(&self, master: usize) {
        let inside = self.network.inside(master).unwrap();
        assert!(run(&format!("{inside}ip route flush type blackhole")).await);
    }

    /// The role that a master on loopback reports, and the status of a query for data.
    pub(crate) async fn status(&self, master: usize) -> (String, u16) {
        let url = |path| format!("http://127.0.0.1:{}/{path}", self.admin[master]);
        let role = self.http.get(url("role")).send().await.unwrap().text().await.unwrap();
        (role, self.http.get(url("get_all_keys")).send().await.unwrap().status().as_u16())
    }

    /// Writes transfer metadata at the master that leads.
    pub(crate) async fn put_metadata(&self, key: &str, value: &'static str) {
        let url =
            format!("http://127.0.0.1:{}/metadata?key={key}", self.metadata[self.wait_for_leader().await]);
        let put = self.http.put(url).body(value).send().await.unwrap();
        assert_eq!(put.status().as_u16(), 200);
    }

    /// Transfer metadata, from a master that leads, as soon as it serves.
    pub(crate) async fn metadata(&self, key: &str) -> String {
        let mut found = None;
        self.wait_until("metadata is served", async |it| {
            let Some(leader) = it.current_leader().await else { return false };
            let url = format!("http://127.0.0.1:{}/metadata?key={key}", it.metadata[leader]);
            let Ok(answer) = it.http.get(url).send().await else { return false };
            found = answer.text().await.ok();
            found.is_some()
        })
        .await;
        found.unwrap()
    }

    /// Waits until a master on loopback stands by.
    pub(crate) async fn wait_until_standby(&self, master: usize) {
        let url = format!("http://127.0.0.1:{}/role", self.admin[master]);
        self.wait_until("a master stands by", async |it| {
            let Ok(role) = it.http.get(&url).send().await else { return false };
            role.text().await.is_ok_and(|role| role == "standby")
        })
        .await;
    }

    /// The value of a key, empty if it does not exist. `None` if etcd does not respond.
    async fn key(&self, key: &str) -> Option<String> {
        use base64::Engine as _;
        use base64::engine::general_purpose::STANDARD;
        let question = json!({ "key": STANDARD.encode(key) });
        for node in &self.nodes {
            let asked =
                self.http.post(format!("http://{}/v3/kv/range", node.plain)).json(&question).send().await;
            let Ok(Ok(answer)) = asked.map(reqwest::Response::error_for_status) else { continue };
            let answer: Value = answer.json().await.unwrap();
            let value = answer["kvs"][0]["value"].as_str().unwrap_or_default();
            return Some(String::from_utf8(STANDARD.decode(value).unwrap()).unwrap());
        }
        None
    }

    /// The master that leads, if any does.
    pub(crate) async fn current_leader(&self) -> Option<usize> {
        let address = match &self.setup.lease {
            Some(lease) => lease.holder().await?,
            None => self.key("mooncake-store/mooncake_cluster/master_view").await?,
        };
        self.network.masters.iter().position(|master| *master == address)
    }

    /// Waits until a master leads.
    pub(crate) async fn wait_for_leader(&self) -> usize {
        let mut found = None;
        self.wait_until("somebody leads", async |it| {
            found = it.current_leader().await;
            found.is_some()
        })
        .await;
        found.unwrap()
    }

    /// Waits until so many masters may lead next.
    pub(crate) async fn wait_until_in_sync(&self, count: usize) {
        self.wait_until("masters are in sync", async |it| {
            let list = match &it.setup.lease {
                Some(lease) => lease.in_sync().await,
                None => it.key("mooncake-store/mooncake_cluster/moongate/in_sync").await,
            };
            list.is_some_and(|list| list.lines().count() == count)
        })
        .await;
    }

    pub(crate) async fn wait_until(&self, what: &str, mut is_so: impl AsyncFnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !is_so(self).await {
            assert!(begun.elapsed() < LIMIT, "{what}: not in time");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for HaCluster {
    /// Prints the logs of all programs if the test fails.
    #[expect(clippy::print_stderr, reason = "a test says why it has failed")]
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for log in ["master-0", "master-1", "master-2", "e0", "e1", "e2"] {
            let said = std::fs::read_to_string(self.folder.path().join(format!("{log}.log")));
            let said = said.unwrap_or_default();
            let lines: Vec<&str> = said.lines().collect();
            let last = lines[lines.len().saturating_sub(LOGGED)..].join("\n");
            eprintln!("{log} said last:\n{last}\n");
        }
    }
}

fn etcd(
    folder: &Path,
    at: usize,
    node: &EtcdNode,
    certificates: Option<&HaCertificates>,
    all: &str,
) -> Child {
    let mut command = Command::new("etcd");
    command.args(["--name", &format!("e{at}"), "--data-dir"]).arg(folder.join(format!("e{at}")));
    let mut client = format!("http://{}", node.plain);
    if let Some(certificates) = certificates {
        client = format!("{client},https://{}", node.secured);
        command.args(certificates.flags_of_etcd());
    }
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &node.peer, "--initial-advertise-peer-urls", &node.peer]);
    command.args(["--initial-cluster", all, "--initial-cluster-state", "new"]);
    let log =
        std::fs::File::options().create(true).append(true).open(folder.join(format!("e{at}.log"))).unwrap();
    // Processes die here, machines do not: what is written is there without waiting for a disk, which may be slow.
    command.args(["--unsafe-no-fsync", "--logger", "zap", "--log-level", "warn"]);
    command.stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true);
    command.spawn().expect("etcd can be run; `scripts/test tools` installs it")
}

/// Whether all threads of a process stand still.
fn is_stopped(process: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let stat =
        |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
    // The state follows the name, which may have anything in it.
    threads
        .flatten()
        .map(stat)
        .all(|stat| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T')))
}
