//! Where a node is: its address, its name, and its two listening sockets.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use moongate_memory::holder::{self, HolderClient};
use moongate_runtime::BindError;
use moongate_runtime::net::TcpListener;
use serde::{Deserialize, Serialize};

use crate::args::SegmentBackingArg;

/// A node that is nowhere.
#[derive(Debug, thiserror::Error)]
pub enum NodeListenError {
    /// Its host has no address.
    #[error(
        "the local hostname {host} has no address: {problem}; set it to an address of this host, or use --listen"
    )]
    Host {
        /// The host.
        host: String,
        /// Why not.
        problem: String,
    },
    /// A port cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The holder has no socket for it.
    #[error(transparent)]
    Holder(#[from] holder::HolderError),
    /// A socket cannot be used.
    #[error("cannot use a listening socket: {0}")]
    Socket(#[from] std::io::Error),
}

/// A host, and the port that a node's name shall have; 0 if it may be any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeHost {
    pub(crate) name: String,
    pub(crate) port: u16,
}

impl NodeHost {
    /// Of `host`, `host:port` or `[address]:port`.
    pub(crate) fn parse(text: &str) -> Self {
        let split = text.rsplit_once(':').and_then(|(name, port)| Some((name, port.parse().ok()?)));
        match split {
            Some((name, port)) if !name.contains(':') || name.starts_with('[') => {
                Self { name: name.trim_matches(['[', ']']).to_owned(), port }
            }
            _ => Self { name: text.trim_matches(['[', ']']).to_owned(), port: 0 },
        }
    }

    /// The node's name, which is also where its handshake port is.
    pub(crate) fn endpoint(&self, port: u16) -> String {
        let name = &self.name;
        if name.contains(':') { format!("[{name}]:{port}") } else { format!("{name}:{port}") }
    }

    /// Where a node of this host listens, unless another address is configured.
    pub(crate) async fn address(&self) -> Result<IpAddr, NodeListenError> {
        let error = |problem: String| NodeListenError::Host { host: self.name.clone(), problem };
        let found = tokio::net::lookup_host((self.name.as_str(), 0)).await;
        let found: Vec<IpAddr> = found.map_err(|it| error(it.to_string()))?.map(|it| it.ip()).collect();
        // Peers of older releases speak IPv4 only.
        let best = found.iter().find(|address| address.is_ipv4()).or(found.first());
        best.copied().ok_or_else(|| error("its name is known, and has none".to_owned()))
    }
}

/// Where a node listens.
#[derive(Debug)]
pub(crate) struct NodeListeners {
    pub(crate) address: IpAddr,
    pub(crate) handshake: TcpListener,
    pub(crate) data: TcpListener,
    /// Where readers ask for what is on the disk, if there is one.
    pub(crate) disk: Option<TcpListener>,
}

/// Ports that peers know, kept beside memory that outlives the process.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct PersistedPorts {
    handshake: u16,
    data: u16,
    /// 0 if there was no disk.
    #[serde(default)]
    disk: u16,
}

impl NodeListeners {
    /// Listens where it is told to, or where the node has listened before: peers keep what they were told.
    pub(crate) fn open(
        host: &NodeHost,
        address: IpAddr,
        data_port: u16,
        keeping: &SegmentBackingArg,
        label: &str,
        has_disk: bool,
    ) -> Result<Self, NodeListenError> {
        let place = match keeping {
            SegmentBackingArg::Holder(path) => {
                let holder = HolderClient::new(path);
                let kept = |kind: &str, port| {
                    held_listener(&holder, &format!("{label}.{kind}"), (address, port).into())
                };
                Self {
                    address,
                    handshake: kept("handshake", host.port)?,
                    data: kept("data", data_port)?,
                    disk: has_disk.then(|| kept("disk", 0)).transpose()?,
                }
            }
            SegmentBackingArg::Process => Self::bind(
                address,
                PersistedPorts { handshake: host.port, data: data_port, disk: 0 },
                has_disk,
            )?,
            SegmentBackingArg::Folder(folder) => {
                let file = folder.join(format!("{label}.ports"));
                let known = read(&file);
                let or = |asked: u16, known: u16| if asked == 0 { known } else { asked };
                let (handshake, data) = (or(host.port, known.handshake), or(data_port, known.data));
                let place =
                    Self::bind(address, PersistedPorts { handshake, data, disk: known.disk }, has_disk)?;
                place.write(&file)?;
                place
            }
        };
        Ok(place)
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

/// A socket of the holder's. One at another address is of a pod that was, and is let go.
#[cfg(not(feature = "simulation"))]
fn held_listener(
    holder: &HolderClient,
    name: &str,
    address: SocketAddr,
) -> Result<TcpListener, NodeListenError> {
    let mut listener = holder.listener(name, address)?;
    let at = listener.local_addr()?;
    let same_port = address.port() == 0 || address.port() == at.port();
    if at.ip() != address.ip() || !same_port {
        holder.release(name)?;
        listener = holder.listener(name, address)?;
    }
    listener.set_nonblocking(true)?;
    Ok(TcpListener::from_std(listener)?)
}

/// No holder is simulated.
#[cfg(feature = "simulation")]
fn held_listener(_: &HolderClient, _: &str, _: SocketAddr) -> Result<TcpListener, NodeListenError> {
    Err(NodeListenError::Socket(std::io::ErrorKind::Unsupported.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_ports_or_not() {
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
    async fn a_node_with_lasting_memory_comes_back_to_its_ports() {
        let folder = std::env::temp_dir().join(format!("moongate-place-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let keeping = SegmentBackingArg::Folder(folder.clone());
        let ports = async || {
            let host = NodeHost::parse("127.0.0.1");
            let address = host.address().await.unwrap();
            let place = NodeListeners::open(&host, address, 0, &keeping, "segment", true).unwrap();
            [&place.handshake, &place.data, place.disk.as_ref().unwrap()]
                .map(|it| it.local_addr().unwrap().port())
        };
        let first = ports().await;
        assert_eq!(ports().await, first);
        std::fs::remove_dir_all(&folder).unwrap();
        let nowhere = NodeHost::parse("no.such.host.invalid");
        let error = nowhere.address().await;
        assert!(error.unwrap_err().to_string().contains("--listen"));
    }
}
