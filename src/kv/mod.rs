//! `moongate kv`: command-line access to the objects of a store.

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

/// Time limit for background tasks after the command.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Arguments of `moongate kv`.
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
    /// Store a file or stdin as an object
    Put(files::KvPutArgs),
    /// Write an object to a file or stdout
    Get(files::KvGetArgs),
    /// Remove objects by key, by regular expression, or all
    Rm(list::KvRemoveArgs),
    /// List keys through the master's admin server, without leasing objects
    Ls(list::KvListArgs),
    /// Show size, lease and replicas of objects; this leases them
    Stat(list::KvStatArgs),
    /// Measure throughput and latency of puts and gets
    Bench(bench::KvBenchArgs),
}

/// Arguments that select a store and its connections.
#[derive(Clone, Debug, Args)]
struct KvStoreArgs {
    /// The master's RPC address, or etcd://HOST:PORT;HOST:PORT if masters publish their leader in etcd
    #[arg(
        long,
        global = true,
        value_name = "HOST:PORT",
        env = "MOONCAKE_MASTER",
        default_value = "127.0.0.1:50051"
    )]
    master: String,

    /// --cluster_id of the masters, if several stores share the etcd
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "MC_STORE_CLUSTER_ID",
        default_value = "mooncake_cluster"
    )]
    cluster_id: String,

    /// Where nodes publish their data ports: P2PHANDSHAKE, or the URL of an HTTP metadata server
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "MOONCAKE_TE_META_DATA_SERVER",
        default_value = "P2PHANDSHAKE"
    )]
    metadata: MetadataSource,

    /// Tenant that owns the objects
    #[arg(long, global = true, value_name = "NAME", env = "MOONGATE_KV_TENANT", default_value = "default")]
    tenant: String,

    /// Distance of a host or network, as 10.1.0.0/16=1. The nearest replica is read; this host has distance 0, hosts
    /// without a rule 100
    #[arg(
        long,
        global = true,
        value_name = "HOST_OR_CIDR=N",
        env = "MOONGATE_KV_DISTANCE",
        value_delimiter = ','
    )]
    distance: Vec<String>,

    /// Maximum number of connections to one node
    #[arg(long, global = true, value_name = "N", env = "MOONGATE_KV_CONNECTIONS_PER_NODE", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    connections_per_node: u16,

    /// Slice size: larger objects are split into slices that are transferred in parallel
    #[arg(long, global = true, value_name = "SIZE", env = "MOONGATE_KV_SLICE", default_value = "4MiB", value_parser = size::parse)]
    slice: usize,

    /// RDMA devices for transfers with nodes that have RDMA; all devices of the machine by default
    #[arg(long, global = true, value_name = "NAME,...", env = "MOONCAKE_DEVICE", value_delimiter = ',')]
    rdma_device: Vec<String>,

    #[command(flatten)]
    tls: PeerTlsArgs,

    /// Print JSON, one object per line
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
        for rule in &self.distance {
            locality = locality.with_rule(rule).context("--distance")?;
        }
        Ok(KvClientOptions {
            tenant: self.tenant.clone(),
            metadata: self.metadata.clone(),
            authentication: tls.map(StoreCredentials::new),
            locality,
            connections_per_node: usize::from(self.connections_per_node),
            slice_bytes: self.slice,
            rdma_devices: self.rdma_device.iter().filter(|name| !name.is_empty()).cloned().collect(),
            ..KvClientOptions::default()
        })
    }

    /// Loads TLS for connections to the store's programs, if it is configured.
    fn tls(&self) -> anyhow::Result<Option<PeerTls>> {
        self.tls.load().map_err(invalid_settings)
    }

    /// The master's address in the form that [`KvClient::new`] takes.
    fn master(&self) -> anyhow::Result<String> {
        Ok(MasterAddress::parse(&self.master, Some(&self.cluster_id)).context("--master")?.to_string())
    }

    fn client(&self, supervisor: &Supervisor) -> anyhow::Result<KvClient> {
        Ok(KvClient::new(&self.master()?, self.options(supervisor)?, supervisor)?)
    }
}

pub(crate) async fn run(command: KvArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let KvArgs { subcommand, store, .. } = command;
    let work = async {
        match subcommand {
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
        // A put in progress is revoked by a task of the supervisor.
        () = terminated() => Err(anyhow::anyhow!("stopped by a signal")),
    };
    let stopping = supervisor.shutdown(SHUTDOWN_TIMEOUT).await;
    if let Err(left) = stopping {
        tracing::debug!(%left, "background tasks did not end in time");
    }
    outcome
}
