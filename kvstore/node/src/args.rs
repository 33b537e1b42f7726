//! The command line. Its first flags are those of Mooncake's store service.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use moongate_runtime::{PeerTlsArgs, SecretString};
use moongate_telemetry::LoggingArgs;
use moongate_transfer::AllowedPeers;

/// Lend memory to a Mooncake store, in the place of Mooncake's own store service.
///
/// What the node lends, to whom, and where the master is, it reads from a JSON file or from the environment, as
/// Mooncake's store service does: keys and MOONCAKE_* variables are the same.
#[derive(Clone, Debug, Parser)]
#[command(name = "moongate store", version)]
pub struct NodeArgs {
    /// Mooncake's configuration file (JSON); without one, MOONCAKE_* variables are read
    #[arg(long, env = "MOONCAKE_CONFIG_PATH", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Override a key of the configuration
    #[arg(short = 'D', long = "define", value_name = "KEY=VALUE")]
    pub define: Vec<String>,
    /// Port of the REST API, health and metrics
    #[arg(long, env = "MOONGATE_STORE_PORT", default_value_t = 8080)]
    pub port: u16,
    /// How long to wait for the master and the metadata server at start, in seconds
    #[arg(long, env = "MOONGATE_STORE_MAX_WAIT_TIME", value_name = "SECONDS", default_value_t = 60.0)]
    pub max_wait_time: f64,
    /// Address to listen on, if it is not that of the local hostname
    #[arg(long, env = "MOONGATE_STORE_LISTEN", value_name = "IP")]
    pub listen: Option<IpAddr>,
    /// Networks that may connect, as 10.0.0.0/8,fd00::/8: the protocol has no authentication. Required unless the node listens on
    /// loopback, where it is loopback
    #[arg(long, alias = "allow_peers", env = "MOONGATE_STORE_ALLOW_PEERS", value_name = "CIDR,...")]
    pub allow_peers: Option<AllowedPeers>,
    /// Bearer token of the REST API under /api, for callers from --allow-peers; without one, only callers on loopback may use it
    #[arg(
        long,
        alias = "api_token",
        env = "MOONGATE_STORE_API_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true
    )]
    pub api_token: Option<SecretString>,
    /// Port of transfers; 0 for the one of the last run with the same memory, or else any that is free
    #[arg(
        long,
        alias = "data_port",
        env = "MOONGATE_STORE_DATA_PORT",
        value_name = "PORT",
        default_value_t = 0
    )]
    pub data_port: u16,
    /// Where the memory is kept: `process`, `holder:SOCKET` (see `moongate store-holder`) or `folder:PATH`
    #[arg(long, env = "MOONGATE_STORE_MEMORY", value_name = "WHERE", default_value = "process")]
    pub memory: SegmentBackingArg,
    /// Name of the memory where it is kept
    #[arg(
        long,
        alias = "memory_label",
        env = "MOONGATE_STORE_MEMORY_LABEL",
        value_name = "NAME",
        default_value = "segment"
    )]
    pub memory_label: String,
    /// Size of the memory's pages
    #[arg(long, env = "MOONGATE_STORE_PAGES", value_enum, default_value_t = PageModeArg::Normal)]
    pub pages: PageModeArg,
    /// What becomes of the memory when the node is asked to stop: it is kept for the next run, or leaves the store.
    /// Memory of the process always leaves
    #[arg(long, alias = "on_stop", env = "MOONGATE_STORE_ON_STOP", value_enum, default_value_t = OnStopAction::Keep)]
    pub on_stop: OnStopAction,
    /// How long transfers in progress may take after the node was asked to stop
    #[arg(long, alias = "drain_timeout", env = "MOONGATE_STORE_DRAIN_TIMEOUT", value_name = "TIME",
        default_value = "10s", value_parser = humantime::parse_duration)]
    pub drain_timeout: Duration,
    /// Connections for transfers at most
    #[arg(
        long,
        alias = "max_connections",
        env = "MOONGATE_STORE_MAX_CONNECTIONS",
        value_name = "N",
        default_value_t = 1024
    )]
    pub max_connections: usize,
    /// Connections for transfers from one address at most
    #[arg(
        long,
        alias = "max_connections_per_peer",
        env = "MOONGATE_STORE_MAX_CONNECTIONS_PER_PEER",
        value_name = "N",
        default_value_t = 256
    )]
    pub max_connections_per_peer: usize,
    /// Bytes per second that are read again in the background to find bits that have changed; 0 for none
    #[arg(long, alias = "scrub_rate", env = "MOONGATE_STORE_SCRUB_RATE", value_name = "SIZE", default_value = "64mb",
        value_parser = crate::size::parse)]
    pub scrub_rate: u64,
    /// Bytes of the disk that objects go to when memory is full, all of them taken at once. There is such a disk if the
    /// configuration sets enable_ssd_offload and ssd_offload_path
    #[arg(long, alias = "tier_size", env = "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", value_name = "SIZE",
        value_parser = crate::size::parse)]
    pub tier_size: Option<u64>,
    /// Bytes of memory in which readers find objects that are only on the disk; none is larger than that
    #[arg(long, alias = "tier_buffer", env = "MOONGATE_STORE_TIER_BUFFER", value_name = "SIZE", default_value = "256mb",
        value_parser = crate::size::parse)]
    pub tier_buffer: u64,
    /// TLS
    #[command(flatten)]
    pub tls: PeerTlsArgs,
    /// Logs
    #[command(flatten)]
    pub logs: LoggingArgs,
}

/// Where the memory is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SegmentBackingArg {
    /// In the process: it is gone with it.
    Process,
    /// By a holder that listens there.
    Holder(PathBuf),
    /// In files of a folder.
    Folder(PathBuf),
}

impl FromStr for SegmentBackingArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "process" => Ok(Self::Process),
            Some(("holder", path)) if !path.is_empty() => Ok(Self::Holder(path.into())),
            Some(("folder", path)) if !path.is_empty() => Ok(Self::Folder(path.into())),
            _ => Err("write process, holder:SOCKET or folder:PATH".to_owned()),
        }
    }
}

/// Size of the memory's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PageModeArg {
    /// The system's own.
    Normal,
    /// Large where the system can.
    Transparent,
    /// Huge pages that were set aside.
    Huge,
}

/// What becomes of the memory when the node is asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnStopAction {
    /// The next run goes on with it.
    Keep,
    /// It leaves the store.
    Unmount,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_the_store_service_are_understood() {
        let line = ["moongate store", "--config", "c.json", "-Dlocal_hostname=a", "-D", "protocol=tcp"];
        let flags =
            NodeArgs::try_parse_from(line.into_iter().chain(["--port", "8081", "--max-wait-time", "5"]));
        let flags = flags.unwrap();
        assert_eq!(flags.define, ["local_hostname=a", "protocol=tcp"]);
        assert_eq!((flags.port, flags.max_wait_time), (8081, 5.0));
        assert_eq!(flags.memory, SegmentBackingArg::Process);
    }

    #[test]
    fn memory_is_kept_where_it_is_said() {
        assert_eq!("holder:/run/h.sock".parse(), Ok(SegmentBackingArg::Holder("/run/h.sock".into())));
        assert_eq!("folder:/dev/shm".parse(), Ok(SegmentBackingArg::Folder("/dev/shm".into())));
        for wrong in ["", "holder", "holder:", "disk:/x", "Process"] {
            assert!(wrong.parse::<SegmentBackingArg>().is_err(), "{wrong}");
        }
        let flags =
            NodeArgs::try_parse_from(["x", "--allow_peers", "10.0.0.0/8", "--on_stop=unmount"]).unwrap();
        assert_eq!(
            (flags.allow_peers.unwrap().to_string().as_str(), flags.on_stop),
            ("10.0.0.0/8", OnStopAction::Unmount)
        );
    }
}
