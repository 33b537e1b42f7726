//! Settings of a router.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;

/// Settings of a router.
#[derive(Clone, Debug, Args)]
pub struct RouterOptions {
    /// The store's masters in the order of their --shard: each HOST:PORT, or etcd://HOST:PORT;HOST:PORT/CLUSTER for the leader of several
    #[arg(
        long,
        env = "MOONGATE_ROUTER_SHARDS",
        value_name = "MASTER,...",
        value_delimiter = ',',
        required = true
    )]
    pub shards: Vec<String>,
    /// HOST:PORT of each master's admin server; by default port 9003 of the masters' hosts
    #[arg(long, env = "MOONGATE_ROUTER_SHARD_ADMINS", value_name = "HOST:PORT,...", value_delimiter = ',')]
    pub shard_admins: Vec<String>,
    /// Listen address for clients, in place of a master's RPC port
    #[arg(long, env = "MOONGATE_ROUTER_LISTEN", value_name = "IP:PORT", default_value = "0.0.0.0:50051")]
    pub listen: SocketAddr,
    /// Listen address for health, metrics and keys, in place of a master's admin server
    #[arg(
        long,
        env = "MOONGATE_ROUTER_ADMIN_LISTEN",
        value_name = "IP:PORT",
        default_value = "0.0.0.0:9003"
    )]
    pub admin_listen: SocketAddr,
    /// Maximum number of connections of clients; further ones wait
    #[arg(long, env = "MOONGATE_ROUTER_MAX_CONNECTIONS", value_name = "N", default_value_t = 16_384)]
    pub max_connections: usize,
    /// Maximum size of a request in bytes
    #[arg(long, env = "MOONGATE_ROUTER_MAX_FRAME_BYTES", value_name = "BYTES", default_value_t = 256 << 20)]
    pub max_frame_bytes: usize,
    /// Time limit for a master's response. Then the call fails for the objects of that shard
    #[arg(long, env = "MOONGATE_ROUTER_CALL_TIMEOUT", value_name = "TIME", default_value = "5s",
        value_parser = humantime::parse_duration)]
    pub call_timeout: Duration,
    /// Time within which a started request must arrive completely, and responses must be read
    #[arg(long, env = "MOONGATE_ROUTER_STALL_TIMEOUT", value_name = "TIME", default_value = "60s",
        value_parser = humantime::parse_duration)]
    pub stall_timeout: Duration,
}
