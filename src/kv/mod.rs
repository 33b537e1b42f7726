//! `moongate kv`: objects of a store, from the command line.

mod bench;
mod files;
mod list;
mod size;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use moongate_master_client::rpc::{MasterAddress, StoreCredentials};
use moongate_runtime::{PeerTls, PeerTlsArgs, Supervisor, terminated};
use moongate_store_client::{KvClient, KvClientOptions, Locality, MetadataSource};
use moongate_telemetry::LoggingArgs;

use crate::settings::invalid_settings;

/// Time for tasks to end once the command is through.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Flags of `moongate kv`.
#[derive(Debug, Args)]
pub(crate) struct KvArgs {
    #[command(subcommand)]
    subcommand: KvSubcommand,
    #[command(flatten)]
    store: KvStoreArgs,
    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

#[derive(Debug, Subcommand)]
enum KvSubcommand {
    /// Store a file, or what comes on stdin.
    Put(files::KvPutArgs),
    /// Write an object to a file, or to stdout.
    Get(files::KvGetArgs),
    /// Remove objects.
    Rm(list::KvRemoveArgs),
    /// List keys. Asks the master's admin server, which leases nothing.
    Ls(list::KvListArgs),
    /// Tell where objects are. Leases them.
    Stat(list::KvStatArgs),
    /// Measure putting and getting.
    Bench(bench::KvBenchArgs),
}

/// Which store, and how it is reached.
#[derive(Clone, Debug, Args)]
struct KvStoreArgs {
    /// The master's RPC port, or etcd://HOST:PORT;HOST:PORT where several masters have their leader there.
    #[arg(
        long,
        global = true,
        value_name = "HOST:PORT",
        env = "MOONCAKE_MASTER",
        default_value = "127.0.0.1:50051"
    )]
    master: String,

    /// Which masters, if etcd has those of several stores: their --cluster_id.
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "MC_STORE_CLUSTER_ID",
        default_value = "mooncake_cluster"
    )]
    cluster_id: String,

    /// Where nodes tell their data ports: P2PHANDSHAKE, or the URL of an HTTP metadata server.
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "MOONCAKE_TE_META_DATA_SERVER",
        default_value = "P2PHANDSHAKE"
    )]
    metadata: MetadataSource,

    /// Whose objects.
    #[arg(long, global = true, value_name = "NAME", env = "MOONGATE_KV_TENANT", default_value = "default")]
    tenant: String,

    /// How far nodes are: a host or network and a number, as 10.1.0.0/16=1. The nearest replica is read; the same
    /// host is 0, others are 100.
    #[arg(long, global = true, value_name = "PLACE=N", env = "MOONGATE_KV_NEAR", value_delimiter = ',')]
    near: Vec<String>,

    /// Connections to one node.
    #[arg(long, global = true, value_name = "N", env = "MOONGATE_KV_LANES", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    lanes: u16,

    /// Larger objects are cut into slices that are under way at once.
    #[arg(long, global = true, value_name = "SIZE", env = "MOONGATE_KV_SLICE", default_value = "4MiB", value_parser = size::parse)]
    slice: usize,

    /// Devices for transfers with nodes that have RDMA; without names, all that the machine has.
    #[arg(long, global = true, value_name = "NAME,...", env = "MOONCAKE_DEVICE", value_delimiter = ',')]
    rdma_device: Vec<String>,

    #[command(flatten)]
    tls: PeerTlsArgs,

    /// Print JSON, one object a line.
    #[arg(long, global = true, env = "MOONGATE_KV_JSON")]
    json: bool,
}

impl KvStoreArgs {
    fn options(&self, supervisor: &Supervisor) -> anyhow::Result<KvClientOptions> {
        let tls = self.tls()?;
        if let Some(tls) = &tls {
            tls.reload_on_change(supervisor);
        }
        let mut locality = Locality::default();
        for rule in &self.near {
            locality = locality.with_rule(rule).context("--near")?;
        }
        Ok(KvClientOptions {
            tenant: self.tenant.clone(),
            metadata: self.metadata.clone(),
            authentication: tls.map(StoreCredentials::new),
            locality,
            connections_per_node: usize::from(self.lanes),
            slice_bytes: self.slice,
            rdma_devices: self.rdma_device.iter().filter(|name| !name.is_empty()).cloned().collect(),
            ..KvClientOptions::default()
        })
    }

    /// TLS with the store's programs, if it is configured.
    fn tls(&self) -> anyhow::Result<Option<PeerTls>> {
        self.tls.load().map_err(invalid_settings)
    }

    /// The master's address as clients take it.
    fn master(&self) -> anyhow::Result<String> {
        Ok(MasterAddress::parse(&self.master, Some(&self.cluster_id)).context("--master")?.to_string())
    }

    fn client(&self, supervisor: &Supervisor) -> anyhow::Result<KvClient> {
        Ok(KvClient::new(&self.master()?, self.options(supervisor)?, supervisor)?)
    }
}

pub(crate) async fn run(command: KvArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let KvArgs { subcommand: tool, store, .. } = command;
    let work = async {
        match tool {
            KvSubcommand::Put(put) => files::put(put, &store, &store.client(&supervisor)?).await,
            KvSubcommand::Get(get) => files::get(get, &store, &store.client(&supervisor)?).await,
            KvSubcommand::Rm(remove) => list::remove(remove, &store, &store.client(&supervisor)?).await,
            KvSubcommand::Ls(list) => list::list(list, &store).await,
            KvSubcommand::Stat(stat) => list::stat(stat, &store, &store.client(&supervisor)?).await,
            KvSubcommand::Bench(bench) => bench::run(bench, &store, &supervisor).await,
        }
    };
    let outcome = tokio::select! {
        outcome = work => outcome,
        // A put that was under way is taken back by a task of the supervisor.
        () = terminated() => Err(anyhow::anyhow!("stopped by a signal")),
    };
    let stopping = supervisor.shutdown(SHUTDOWN_TIMEOUT).await;
    if let Err(left) = stopping {
        tracing::debug!(%left, "tasks did not end");
    }
    outcome
}
