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

/// Nodes.
pub(super) const NODES: usize = 2;
/// What each lends. Pages of simulated engines are small: this is room for two million tokens.
const SEGMENT: &str = "256mb";
/// Time for the last calls.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(3);

/// A store that serves.
pub(super) struct LocalStoreCluster {
    master: RunningMaster,
    nodes: Vec<RunningNode>,
    supervisor: Supervisor,
}

impl LocalStoreCluster {
    /// Starts it on free loopback ports.
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

    /// A client of it.
    pub(super) fn client(&self) -> anyhow::Result<KvClient> {
        Ok(KvClient::new(
            &self.master.rpc_address().to_string(),
            KvClientOptions::default(),
            &self.supervisor,
        )?)
    }

    /// Where the master tells people.
    pub(super) fn admin(&self) -> SocketAddr {
        self.master.service_addresses().admin
    }

    /// What a gateway has to be told.
    pub(super) fn gateway_flags(&self) -> Vec<String> {
        let faces = self.master.service_addresses();
        let events = faces.events.map(|address| format!("--mooncake-events=tcp://{address}"));
        std::iter::once(format!("--mooncake-admin={}", faces.admin)).chain(events).collect()
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
        MasterInvocation::PrintText(text) => anyhow::bail!("the master has nothing but text: {text}"),
    }
}

fn node_settings(master: &str) -> anyhow::Result<(NodeArgs, NodeConfig)> {
    let line = ["moongate store", "--port=0", "--memory=process", "--listen=127.0.0.1", "--data-port=0"];
    let flags =
        NodeArgs::try_parse_from(line).context("a setting of the environment does not suit a store")?;
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
