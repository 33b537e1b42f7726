//! A node's address, its name and its listening sockets.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use moongate_memory::holder::{self, HolderClient};
use moongate_runtime::BindError;
use moongate_runtime::net::TcpListener;
use serde::{Deserialize, Serialize};

use crate::args::SegmentBackingArg;

/// The node's address or sockets cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NodeListenError {
    /// The local hostname does not resolve.
    #[error(
        "the local hostname {host} has no address: {source}; set it to an address of this host, or use --listen"
    )]
    Host { host: String, source: HostResolutionError },
    /// A port cannot be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The holder does not provide a socket.
    #[error(transparent)]
    Holder(#[from] holder::HolderError),
    /// A system call on a socket failed.
    #[error("cannot use a listening socket: {0}")]
    Socket(#[from] std::io::Error),
}

/// Why a host name has no address.
#[derive(Debug, thiserror::Error)]
pub enum HostResolutionError {
    #[error(transparent)]
    Lookup(#[from] std::io::Error),
    #[error("the name exists but resolves to no address")]
    NoAddress,
}

/// A host, and the port in the node's name; 0 for any free port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeHost {
    pub(crate) name: String,
    pub(crate) port: u16,
}

impl NodeHost {
    /// Parses `host`, `host:port` or `[address]:port`.
    pub(crate) fn parse(text: &str) -> Self {
        let split = text.rsplit_once(':').and_then(|(name, port)| Some((name, port.parse().ok()?)));
        match split {
            Some((name, port)) if !name.contains(':') || name.starts_with('[') => {
                Self { name: name.trim_matches(['[', ']']).to_owned(), port }
            }
            _ => Self { name: text.trim_matches(['[', ']']).to_owned(), port: 0 },
        }
    }

    /// The node's name, which is also the address of its handshake port.
    pub(crate) fn endpoint(&self, port: u16) -> String {
        let name = &self.name;
        if name.contains(':') { format!("[{name}]:{port}") } else { format!("{name}:{port}") }
    }

    /// Resolves the address to listen on, unless one is configured.
    pub(crate) async fn address(&self) -> Result<IpAddr, NodeListenError> {
        let resolved = self.resolve().await;
        resolved.map_err(|source| NodeListenError::Host { host: self.name.clone(), source })
    }

    async fn resolve(&self) -> Result<IpAddr, HostResolutionError> {
        let resolved = tokio::net::lookup_host((self.name.as_str(), 0)).await?;
        let resolved: Vec<IpAddr> = resolved.map(|it| it.ip()).collect();
        // Peers of older releases support IPv4 only.
        let chosen = resolved.iter().find(|address| address.is_ipv4()).or(resolved.first());
        chosen.copied().ok_or(HostResolutionError::NoAddress)
    }
}

/// A node's address and listening sockets.
#[derive(Debug)]
pub(crate) struct NodeListeners {
    pub(crate) address: IpAddr,
    pub(crate) handshake: TcpListener,
    pub(crate) data: TcpListener,
    /// Socket for disk reads, if there is a disk tier.
    pub(crate) disk: Option<TcpListener>,
}

/// Ports that peers have cached, stored in a file next to persistent memory.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct PersistedPorts {
    handshake: u16,
    data: u16,
    /// 0 if there was no disk tier.
    #[serde(default)]
    disk: u16,
}

/// Where a node listens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListenerOptions<'a> {
    pub(crate) host: &'a NodeHost,
    pub(crate) address: IpAddr,
    pub(crate) data_port: u16,
    pub(crate) backing: &'a SegmentBackingArg,
    /// Name of the ports of the previous run.
    pub(crate) label: &'a str,
    pub(crate) has_disk: bool,
}

impl NodeListeners {
    /// Binds the configured ports, or those of the previous run: peers cache them.
    pub(crate) fn open(options: &ListenerOptions<'_>) -> Result<Self, NodeListenError> {
        let ListenerOptions { host, address, data_port, backing, label, has_disk } = *options;
        let listeners = match backing {
            SegmentBackingArg::Holder(path) => {
                let holder = HolderClient::new(path);
                let inherit = |kind: &str, port| {
                    inherited_listener(&holder, &format!("{label}.{kind}"), (address, port).into())
                };
                Self {
                    address,
                    handshake: inherit("handshake", host.port)?,
                    data: inherit("data", data_port)?,
                    disk: has_disk.then(|| inherit("disk", 0)).transpose()?,
                }
            }
            SegmentBackingArg::Process => Self::bind(
                address,
                PersistedPorts { handshake: host.port, data: data_port, disk: 0 },
                has_disk,
            )?,
            SegmentBackingArg::Folder(folder) => {
                let file = folder.join(format!("{label}.ports"));
                let persisted = read(&file);
                let or =
                    |configured: u16, persisted: u16| if configured == 0 { persisted } else { configured };
                let (handshake, data) = (or(host.port, persisted.handshake), or(data_port, persisted.data));
                let listeners =
                    Self::bind(address, PersistedPorts { handshake, data, disk: persisted.disk }, has_disk)?;
                listeners.write(&file)?;
                listeners
            }
        };
        Ok(listeners)
    }

    fn bind(address: IpAddr, ports: PersistedPorts, has_disk: bool) -> Result<Self, NodeListenError> {
        let bind = |port| moongate_runtime::bind(SocketAddr::new(address, port));
        let disk = has_disk.then(|| bind(ports.disk)).transpose()?;
        Ok(Self { address, handshake: bind(ports.handshake)?, data: bind(ports.data)?, disk })
    }

    fn write(&self, file: &PathBuf) -> Result<(), NodeListenError> {
        let disk = self.disk.as_ref().map(TcpListener::local_addr).transpose()?;
        let ports = PersistedPorts {
            handshake: self.handshake.local_addr()?.port(),
            data: self.data.local_addr()?.port(),
            disk: disk.map_or(0, |address| address.port()),
        };
        let text = serde_json::to_vec(&ports).map_err(std::io::Error::other)?;
        Ok(std::fs::write(file, text)?)
    }
}

fn read(file: &Path) -> PersistedPorts {
    let bytes = std::fs::read(file).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

/// Takes a socket over from the holder. One at another address belongs to an earlier pod and is released.
#[cfg(not(feature = "simulation"))]
fn inherited_listener(
    holder: &HolderClient,
    name: &str,
    address: SocketAddr,
) -> Result<TcpListener, NodeListenError> {
    let mut listener = holder.listener(name, address)?;
    let local = listener.local_addr()?;
    let same_port = address.port() == 0 || address.port() == local.port();
    if local.ip() != address.ip() || !same_port {
        holder.release(name)?;
        listener = holder.listener(name, address)?;
    }
    listener.set_nonblocking(true)?;
    Ok(TcpListener::from_std(listener)?)
}

/// Simulations have no holder.
#[cfg(feature = "simulation")]
fn inherited_listener(_: &HolderClient, _: &str, _: SocketAddr) -> Result<TcpListener, NodeListenError> {
    Err(NodeListenError::Socket(std::io::ErrorKind::Unsupported.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_hostname_parses_with_and_without_port() {
        for (text, name, port) in [
            ("10.0.0.7", "10.0.0.7", 0),
            ("node-1:12345", "node-1", 12345),
            ("fd00::7", "fd00::7", 0),
            ("[fd00::7]:12345", "fd00::7", 12345),
            ("node:http", "node:http", 0),
        ] {
            assert_eq!(NodeHost::parse(text), NodeHost { name: name.to_owned(), port }, "{text}");
        }
        assert_eq!(NodeHost::parse("fd00::7").endpoint(9), "[fd00::7]:9");
        assert_eq!(NodeHost::parse("a").endpoint(9), "a:9");
    }

    #[tokio::test]
    async fn node_with_persistent_memory_reuses_its_ports() {
        let folder = std::env::temp_dir().join(format!("moongate-place-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let backing = SegmentBackingArg::Folder(folder.clone());
        let ports = async || {
            let host = NodeHost::parse("127.0.0.1");
            let address = host.address().await.unwrap();
            let listeners = NodeListeners::open(&ListenerOptions {
                host: &host,
                address,
                data_port: 0,
                backing: &backing,
                label: "segment",
                has_disk: true,
            })
            .unwrap();
            [&listeners.handshake, &listeners.data, listeners.disk.as_ref().unwrap()]
                .map(|it| it.local_addr().unwrap().port())
        };
        let first = ports().await;
        assert_eq!(ports().await, first);
        std::fs::remove_dir_all(&folder).unwrap();
        let unresolvable = NodeHost::parse("no.such.host.invalid");
        let error = unresolvable.address().await;
        assert!(error.unwrap_err().to_string().contains("--listen"));
    }
}
