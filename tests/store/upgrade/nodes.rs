//! Three store nodes with their master, ours or Mooncake's.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use moongate_master::RunningMaster;
use moongate_master::flags::{self, MasterInvocation};
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions};
use moongate_store_testkit::mooncake::{NEWEST_WITHOUT_CUDA, RealMaster, service};
use moongate_testkit::free_port;
use tokio::process::Command;

use crate::harness::process::MoongateProcess;
use crate::harness::wait_until;

pub(crate) const NODES: usize = 3;
/// The size of the memory that each node adds to the store.
const SEGMENT: &str = "-Dglobal_segment_size=64mb";
const HOST: &str = "-Dlocal_hostname=127.0.0.1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreImplementation {
    Moongate,
    Mooncake,
}

/// A store node that can be replaced.
pub(crate) struct ReplaceableNode {
    program: PathBuf,
    arguments: Vec<String>,
    /// Its address, which Mooncake's nodes take only from the environment.
    master: String,
    /// Text in the log of a node that is ready.
    ready: &'static str,
    running: Option<MoongateProcess>,
    /// The holder of its memory, for a Moongate node.
    _holder: Option<MoongateProcess>,
}

impl ReplaceableNode {
    /// A node with its memory in a holder.
    async fn moongate(folder: &Path, number: usize, master: &str) -> Self {
        let socket = folder.join(format!("holder-{number}"));
        let holder = MoongateProcess::start(&["store-holder", "--socket", socket.to_str().unwrap()]);
        wait_until("the holder is there", || socket.exists()).await;
        let memory = format!("--memory=holder:{}", socket.display());
        let arguments = ["store", "--port=0", HOST, SEGMENT, &memory];
        Self {
            program: env!("CARGO_BIN_EXE_moongate").into(),
            arguments: arguments.map(str::to_owned).into(),
            master: master.to_owned(),
            ready: "store node ready",
            running: None,
            _holder: Some(holder),
        }
    }

    async fn mooncake(master: &str) -> Self {
        let (program, mut arguments) = service(NEWEST_WITHOUT_CUDA).await;
        let port = format!("--port={}", free_port());
        let config = ["-Dmetadata_server=P2PHANDSHAKE", "-Dprotocol=tcp", "-Dlocal_buffer_size=16mb"];
        arguments.extend([HOST, SEGMENT, &port].map(str::to_owned));
        arguments.extend(config.map(str::to_owned));
        let ready = "Mooncake Store Service is running";
        Self { program, arguments, master: master.to_owned(), ready, running: None, _holder: None }
    }

    async fn run(&mut self) {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).env_clear().env("MOONCAKE_MASTER", &self.master);
        let mut binary = MoongateProcess::spawn(&mut command);
        binary.wait_for_line(self.ready).await;
        self.running = Some(binary);
    }

    /// Ends its process and starts another one.
    pub(crate) async fn replace(&mut self, signal: &str) {
        let old = self.running.take().unwrap();
        old.signal(signal).await;
        let ended = old.wait().await;
        assert!(signal == "KILL" || ended.status.success(), "{ended:?}");
        self.run().await;
    }
}

enum UpgradeMaster {
    Moongate(RunningMaster),
    Mooncake(RealMaster),
}

pub(crate) struct UpgradeStore {
    master: UpgradeMaster,
    pub(crate) nodes: Vec<ReplaceableNode>,
    pub(crate) supervisor: Supervisor,
    _folder: tempfile::TempDir,
}

impl UpgradeStore {
    /// Its master has the settings that it has by itself.
    pub(crate) async fn start(whose: StoreImplementation) -> Self {
        let supervisor = Supervisor::new();
        let master = match whose {
            StoreImplementation::Moongate => UpgradeMaster::Moongate(our_master(&supervisor).await),
            StoreImplementation::Mooncake => {
                UpgradeMaster::Mooncake(RealMaster::start(NEWEST_WITHOUT_CUDA).await)
            }
        };
        let folder = tempfile::tempdir().unwrap();
        let mut store = Self { master, nodes: Vec::new(), supervisor, _folder: folder };
        let rpc = store.rpc();
        for number in 0..NODES {
            let mut node = match whose {
                StoreImplementation::Moongate => {
                    ReplaceableNode::moongate(store._folder.path(), number, &rpc).await
                }
                StoreImplementation::Mooncake => ReplaceableNode::mooncake(&rpc).await,
            };
            node.run().await;
            store.nodes.push(node);
        }
        store
    }

    fn rpc(&self) -> String {
        match &self.master {
            UpgradeMaster::Moongate(master) => master.rpc_address().to_string(),
            UpgradeMaster::Mooncake(master) => master.rpc.clone(),
        }
    }

    pub(crate) fn admin(&self) -> String {
        match &self.master {
            UpgradeMaster::Moongate(master) => master.service_addresses().admin.to_string(),
            UpgradeMaster::Mooncake(master) => master.admin.clone(),
        }
    }

    pub(crate) fn client(&self) -> KvClient {
        KvClient::new(&self.rpc(), KvClientOptions::default(), &self.supervisor).unwrap()
    }
}

async fn our_master(supervisor: &Supervisor) -> RunningMaster {
    let line = ["--rpc_address=127.0.0.1", "--rpc_port=0", "--metrics_host=127.0.0.1", "--metrics_port=0"];
    let MasterInvocation::Serve(options) = flags::read(line.map(OsString::from), |_| None).unwrap() else {
        panic!("the master is asked to serve")
    };
    moongate_master::start(*options, supervisor).await.unwrap()
}

impl Drop for UpgradeStore {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}
