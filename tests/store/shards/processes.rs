//! The processes of a store with several masters.

use std::collections::BTreeSet;
use std::path::PathBuf;

use moongate_testkit::free_port;
use tempfile::TempDir;
use tokio::process::Command;

use crate::harness::polling::poll_until;
use crate::harness::process::MoongateProcess;

pub(super) const SHARDS: usize = 4;
pub(super) const NODES: usize = 2;

/// A process that is started again with the same command line.
struct RestartableProcess {
    arguments: Vec<String>,
    variables: Vec<(&'static str, String)>,
    running: Option<MoongateProcess>,
}

impl RestartableProcess {
    fn start(arguments: Vec<String>, variables: Vec<(&'static str, String)>) -> Self {
        let mut process = Self { arguments, variables, running: None };
        process.restart();
        process
    }

    fn restart(&mut self) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
        command
            .args(&self.arguments)
            .env_clear()
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        self.running = Some(MoongateProcess::spawn(&mut command));
    }

    async fn kill(&mut self) {
        if let Some(process) = self.running.take() {
            process.signal("KILL").await;
            process.wait().await;
        }
    }
}

/// What can be killed.
#[derive(Clone, Copy, Debug)]
pub(super) enum StoreProcess {
    Shard(usize),
    Node(usize),
    Router,
}

/// Masters with their state on disk, a router, and nodes whose memory survives them.
pub(super) struct ShardedStoreProcesses {
    folder: TempDir,
    shards: Vec<RestartableProcess>,
    admins: Vec<String>,
    router: RestartableProcess,
    router_address: String,
    router_admin: String,
    nodes: Vec<RestartableProcess>,
    _holder: Option<RestartableProcess>,
}

impl ShardedStoreProcesses {
    /// Starts masters and a router.
    pub(super) async fn start() -> Self {
        let folder = TempDir::new().unwrap();
        let (mut shards, mut addresses, mut admins) = (Vec::new(), Vec::new(), Vec::new());
        for shard in 0..SHARDS {
            let (rpc, admin) = (free_port(), free_port());
            let data = folder.path().join(format!("shard-{shard}"));
            let flags = [
                "master".to_owned(),
                format!("--shard={shard}/{SHARDS}"),
                format!("--rpc_port={rpc}"),
                format!("--metrics_port={admin}"),
                "--rpc_address=127.0.0.1".to_owned(),
                "--metrics_host=127.0.0.1".to_owned(),
                format!("--data_dir={}", data.display()),
                "--segment_ramp=0".to_owned(),
            ];
            shards.push(RestartableProcess::start(flags.to_vec(), Vec::new()));
            addresses.push(format!("127.0.0.1:{rpc}"));
            admins.push(format!("127.0.0.1:{admin}"));
        }
        let (router_address, router_admin) =
            (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port()));
        let flags = [
            "store-router".to_owned(),
            format!("--shards={}", addresses.join(",")),
            format!("--shard-admins={}", admins.join(",")),
            format!("--listen={router_address}"),
            format!("--admin-listen={router_admin}"),
        ];
        let router = RestartableProcess::start(flags.to_vec(), Vec::new());
        let store = Self {
            folder,
            shards,
            admins,
            router,
            router_address,
            router_admin,
            nodes: Vec::new(),
            _holder: None,
        };
        let health = format!("http://{}/health", store.router_admin);
        poll_until("all masters serve", async || {
            let Ok(response) = reqwest::get(&health).await else { return false };
            response.text().await.is_ok_and(|text| text.contains(r#""status":"ok""#))
        })
        .await;
        store
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("holder")
    }

    /// Starts a node with 256 MiB, whose memory is in a holder.
    pub(super) async fn start_node(&mut self, number: usize) {
        let socket = self.socket();
        if self._holder.is_none() {
            let flags = vec!["store-holder".to_owned(), format!("--socket={}", socket.display())];
            self._holder = Some(RestartableProcess::start(flags, Vec::new()));
            poll_until("the holder serves", async || socket.exists()).await;
        }
        let port = free_port();
        let flags = vec![
            "store".to_owned(),
            format!("--port={port}"),
            format!("--memory=holder:{}", socket.display()),
            format!("--memory-label=node-{number}"),
            "-Dglobal_segment_size=256mb".to_owned(),
        ];
        let variables = vec![
            ("MOONCAKE_MASTER", self.router_address.clone()),
            ("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1".to_owned()),
        ];
        self.nodes.push(RestartableProcess::start(flags, variables));
        let health = format!("http://127.0.0.1:{port}/health");
        poll_until("the node is healthy", async || {
            reqwest::get(&health).await.is_ok_and(|response| response.status().is_success())
        })
        .await;
    }

    /// Address of the router for clients.
    pub(super) fn router(&self) -> &str {
        &self.router_address
    }

    pub(super) fn router_admin(&self) -> String {
        self.router_admin.clone()
    }

    pub(super) fn shard_admin(&self, shard: usize) -> String {
        self.admins[shard].clone()
    }

    /// The keys that an admin server lists.
    pub(super) async fn keys(&self, admin: &str) -> BTreeSet<String> {
        let list = reqwest::get(format!("http://{admin}/get_all_keys")).await.unwrap();
        assert!(list.status().is_success());
        list.text().await.unwrap().lines().map(str::to_owned).collect()
    }

    /// Number of calls that the router has got.
    pub(super) async fn router_calls(&self) -> u64 {
        let text = reqwest::get(format!("http://{}/metrics", self.router_admin))
            .await
            .unwrap()
            .text()
            .await
            .unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("moongate_router_calls_total "));
        line.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
    }

    fn process(&mut self, which: StoreProcess) -> &mut RestartableProcess {
        match which {
            StoreProcess::Shard(shard) => &mut self.shards[shard],
            StoreProcess::Node(node) => &mut self.nodes[node],
            StoreProcess::Router => &mut self.router,
        }
    }

    pub(super) async fn kill(&mut self, which: StoreProcess) {
        self.process(which).kill().await;
    }

    pub(super) fn restart(&mut self, which: StoreProcess) {
        self.process(which).restart();
    }
}
