//! Command-line arguments. The first flags are those of Mooncake's store service.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use moongate_runtime::{PeerTlsArgs, SecretString};
use moongate_telemetry::LoggingArgs;
use moongate_transfer::AllowedPeers;

/// Maximum length in bytes of a socket's path in Linux.
const MAX_SOCKET_PATH: usize = 107;

/// Run a store node that contributes memory to a Mooncake store; replaces Mooncake's own store service.
///
/// The segment size, the protocol and the master's address come from a JSON file or from the environment. Keys and
/// MOONCAKE_* variables are those of Mooncake's store service.
#[derive(Clone, Debug, Parser)]
#[command(name = "moongate store", version)]
pub struct NodeArgs {
    /// Mooncake's configuration file (JSON); without one, MOONCAKE_* variables are read
    #[arg(long, env = "MOONCAKE_CONFIG_PATH", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Override one key of the configuration
    #[arg(short = 'D', long = "define", value_name = "KEY=VALUE")]
    pub define: Vec<String>,
    /// Port of the REST API, health and metrics
    #[arg(long, env = "MOONGATE_STORE_PORT", default_value_t = 8080)]
    pub port: u16,
    /// Seconds to wait at start for the master and the metadata server
    #[arg(long, env = "MOONGATE_STORE_MAX_WAIT_TIME", value_name = "SECONDS", default_value_t = 60.0)]
    pub max_wait_time: f64,
    /// Address to listen on; by default that of the local hostname
    #[arg(long, env = "MOONGATE_STORE_LISTEN", value_name = "IP")]
    pub listen: Option<IpAddr>,
    /// Networks that may connect, as 10.0.0.0/8,fd00::/8: the protocol has no authentication. Required unless the node listens on
    /// loopback, where the default is loopback
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
    /// Port for transfers; 0 reuses the port of the previous run with the same memory, or picks a free one
    #[arg(
        long,
        alias = "data_port",
        env = "MOONGATE_STORE_DATA_PORT",
        value_name = "PORT",
        default_value_t = 0
    )]
    pub data_port: u16,
    /// Where the segment is stored: `process`, `holder:SOCKET` (see `moongate store-holder`) or `folder:PATH`
    #[arg(long, env = "MOONGATE_STORE_MEMORY", value_name = "WHERE", default_value = "process")]
    pub memory: SegmentBackingArg,
    /// Name of the segment at the holder or in the folder
    #[arg(
        long,
        alias = "memory_label",
        env = "MOONGATE_STORE_MEMORY_LABEL",
        value_name = "NAME",
        default_value = "segment"
    )]
    pub memory_label: String,
    /// Page size of the segment's memory
    #[arg(long, env = "MOONGATE_STORE_PAGES", value_enum, default_value_t = PageModeArg::Normal)]
    pub pages: PageModeArg,
    /// Where programs on this host get the node's memory to map, which is faster than sockets: `auto` is a socket for programs of the same
    /// user in the same network namespace, a path one for those that may open the file, `off` none. Never with TLS or RDMA
    #[arg(
        long,
        alias = "shared_memory",
        env = "MOONGATE_STORE_SHARED_MEMORY",
        value_name = "SOCKET",
        default_value = "auto"
    )]
    pub shared_memory: SharedMemoryArg,
    /// What a stop signal does with the segment: keep it for the next run, or unmount it from the store. Process memory is
    /// always unmounted
    #[arg(long, alias = "on_stop", env = "MOONGATE_STORE_ON_STOP", value_enum, default_value_t = OnStopAction::Keep)]
    pub on_stop: OnStopAction,
    /// How long transfers in progress may take after a stop signal before they are cut
    #[arg(long, alias = "drain_timeout", env = "MOONGATE_STORE_DRAIN_TIMEOUT", value_name = "TIME",
        default_value = "10s", value_parser = humantime::parse_duration)]
    pub drain_timeout: Duration,
    /// Maximum number of connections for transfers
    #[arg(
        long,
        alias = "max_connections",
        env = "MOONGATE_STORE_MAX_CONNECTIONS",
        value_name = "N",
        default_value_t = 1024
    )]
    pub max_connections: usize,
    /// Maximum number of connections for transfers from one address
    #[arg(
        long,
        alias = "max_connections_per_peer",
        env = "MOONGATE_STORE_MAX_CONNECTIONS_PER_PEER",
        value_name = "N",
        default_value_t = 256
    )]
    pub max_connections_per_peer: usize,
    /// Bytes per second of each segment that are re-read in the background to detect corruption; 0 turns this off
    #[arg(long, alias = "scrub_rate", env = "MOONGATE_STORE_SCRUB_RATE", value_name = "SIZE", default_value = "64mb",
        value_parser = crate::size::parse)]
    pub scrub_rate: u64,
    /// Disk space for objects that are offloaded from memory, allocated in full at start. Required if the configuration sets
    /// enable_ssd_offload and ssd_offload_path
    #[arg(long, alias = "tier_size", env = "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", value_name = "SIZE",
        value_parser = crate::size::parse)]
    pub tier_size: Option<u64>,
    /// Memory into which objects that are only on disk are loaded for readers; larger objects cannot be read from disk
    #[arg(long, alias = "tier_buffer", env = "MOONGATE_STORE_TIER_BUFFER", value_name = "SIZE", default_value = "256mb",
        value_parser = crate::size::parse)]
    pub tier_buffer: u64,
    /// TLS for the store's ports
    #[command(flatten)]
    pub tls: PeerTlsArgs,
    /// Level and format of log output
    #[command(flatten)]
    pub logs: LoggingArgs,
}

/// Value of `--memory`: where the segment is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SegmentBackingArg {
    /// In process memory, lost when the process exits.
    Process,
    /// By a memory holder that listens on this socket.
    Holder(PathBuf),
    /// In files in this folder.
    Folder(PathBuf),
}

/// Value of `--shared-memory`: the socket from which other processes get the node's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharedMemoryArg {
    /// An abstract socket with a random name, for the node's user and the superuser.
    Auto,
    /// None: all transfers use TCP.
    Off,
    /// A socket file, with the permissions of its user and group.
    Path(PathBuf),
}

/// The text is no place for a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write auto, off or the absolute path of a socket, of at most 107 bytes")]
pub struct SharedMemoryArgError;

impl FromStr for SharedMemoryArg {
    type Err = SharedMemoryArgError;

    fn from_str(text: &str) -> Result<Self, SharedMemoryArgError> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            path if path.starts_with('/') && path.len() <= MAX_SOCKET_PATH => Ok(Self::Path(path.into())),
            _ => Err(SharedMemoryArgError),
        }
    }
}

/// The text names no place for a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write process, holder:SOCKET or folder:PATH")]
pub struct SegmentBackingArgError;

impl FromStr for SegmentBackingArg {
    type Err = SegmentBackingArgError;

    fn from_str(text: &str) -> Result<Self, SegmentBackingArgError> {
        match text.split_once(':') {
            None if text == "process" => Ok(Self::Process),
            Some(("holder", path)) if !path.is_empty() => Ok(Self::Holder(path.into())),
            Some(("folder", path)) if !path.is_empty() => Ok(Self::Folder(path.into())),
            _ => Err(SegmentBackingArgError),
        }
    }
}

/// Value of `--pages`: page size of the segment's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PageModeArg {
    /// The system's default page size.
    Normal,
    /// Transparent huge pages where the kernel supports them.
    Transparent,
    /// Huge pages that the administrator reserved.
    Huge,
}

/// Value of `--on-stop`: what a stop signal does with the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnStopAction {
    /// Keep it for the next run.
    Keep,
    /// Unmount it from the store.
    Unmount,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mooncake_store_service_flags_are_parsed() {
        let line = ["moongate store", "--config", "c.json", "-Dlocal_hostname=a", "-D", "protocol=tcp"];
        let flags =
            NodeArgs::try_parse_from(line.into_iter().chain(["--port", "8081", "--max-wait-time", "5"]));
        let flags = flags.unwrap();
        assert_eq!(flags.define, ["local_hostname=a", "protocol=tcp"]);
        assert_eq!((flags.port, flags.max_wait_time), (8081, 5.0));
        assert_eq!(flags.memory, SegmentBackingArg::Process);
    }

    #[test]
    fn shared_memory_is_parsed() {
        assert_eq!("auto".parse(), Ok(SharedMemoryArg::Auto));
        assert_eq!("off".parse(), Ok(SharedMemoryArg::Off));
        assert_eq!("/run/m.sock".parse(), Ok(SharedMemoryArg::Path("/run/m.sock".into())));
        for wrong in ["", "on", "m.sock", "@m", &format!("/{}", "m".repeat(MAX_SOCKET_PATH))] {
            assert!(wrong.parse::<SharedMemoryArg>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_backing_is_parsed() {
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
