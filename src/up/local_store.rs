//! The store of `moongate up`: a master and nodes in this process.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use moongate_master::RunningMaster;
use moongate_master::flags::{self, MasterInvocation, MasterOptions};
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions};
use moongate_store_node::{NodeArgs, NodeConfig, RunningNode};

pub(super) const NODES: usize = 2;
/// Segment size of each node. Pages of simulated engines are small: it holds two million tokens.
const SEGMENT: &str = "256mb";
/// Time limit for calls in progress at shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(3);

/// A running master and its nodes.
pub(super) struct LocalStoreCluster {
    master: RunningMaster,
    nodes: Vec<RunningNode>,
    supervisor: Supervisor,
}

impl LocalStoreCluster {
    /// Starts a master and [`NODES`] nodes on free loopback ports.
    pub(super) async fn start() -> anyhow::Result<Self> {
        let supervisor = Supervisor::new();
        let master = moongate_master::start(master_options()?, &supervisor).await?;
        let rpc = master.rpc_address().to_string();
        let mut nodes = Vec::new();
        for _ in 0..NODES {
            let (flags, config) = node_settings(&rpc)?;
            nodes.push(moongate_store_node::start(flags, config, &supervisor).await?);
        }
        Ok(Self { master, nodes, supervisor })
    }

    /// A new client, connected to this store's master.
    pub(super) fn client(&self) -> anyhow::Result<KvClient> {
        Ok(KvClient::new(
            &self.master.rpc_address().to_string(),
            KvClientOptions::default(),
            &self.supervisor,
        )?)
    }

    /// Address of the master's admin server.
    pub(super) fn admin(&self) -> SocketAddr {
        self.master.service_addresses().admin
    }

    /// Flags that connect a gateway to this store.
    pub(super) fn gateway_flags(&self) -> Vec<String> {
        let addresses = self.master.service_addresses();
        let events = addresses.events.map(|address| format!("--mooncake-events=tcp://{address}"));
        std::iter::once(format!("--mooncake-admin={}", addresses.admin)).chain(events).collect()
    }

    pub(super) async fn stop(self) {
        for node in self.nodes {
            node.stop().await;
        }
        self.master.stop();
        if let Err(still) = self.supervisor.shutdown(SHUTDOWN_GRACE).await {
            tracing::warn!("{still}");
        }
        self.master.finish();
    }
}

fn master_options() -> anyhow::Result<MasterOptions> {
    let line = [
        "--rpc_address=127.0.0.1",
        "--rpc_port=0",
        "--metrics_host=127.0.0.1",
        "--metrics_port=0",
        "--enable_kv_events",
        "--kv_events_bind_endpoint=tcp://127.0.0.1:*",
    ];
    match flags::read(line.map(OsString::from), |_| None)? {
        MasterInvocation::Serve(options) => Ok(*options),
        MasterInvocation::PrintText(text) => {
            anyhow::bail!("the master's flags print text instead of starting it: {text}")
        }
    }
}

fn node_settings(master: &str) -> anyhow::Result<(NodeArgs, NodeConfig)> {
    let line = ["moongate store", "--port=0", "--memory=process", "--listen=127.0.0.1", "--data-port=0"];
    let flags = NodeArgs::try_parse_from(line).context("an environment variable is invalid for the store")?;
    let config = NodeConfig::read(None, &[], |name| {
        let value = match name {
            "MOONCAKE_MASTER" => master,
            "MOONCAKE_LOCAL_HOSTNAME" => "127.0.0.1",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE" => SEGMENT,
            _ => return None,
        };
        Some(value.to_owned())
    })?;
    Ok((flags, config))
}
