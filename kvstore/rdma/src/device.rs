//! The machine's RDMA devices, as listed in `/sys/class/infiniband`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::gid::Gid;

/// Mount point of sysfs on Linux.
pub const SYSFS: &str = "/sys";
/// Maximum number of GID table entries read per port.
const MAX_GIDS: u32 = 256;

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    Ethernet,
    InfiniBand,
}

/// A GID of a port and its index in the port's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Index in the port's GID table.
    pub index: u8,
    pub gid: Gid,
    /// Whether the type is RoCE v2, whose UDP packets are routable.
    pub is_v2: bool,
}

/// A usable port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaDevice {
    /// System name of the device, for example `mlx5_0`.
    pub name: String,
    /// Port number on the device, from 1.
    pub port: u8,
    /// Link layer of the port.
    pub link: LinkLayer,
    /// Local identifier (LID); 0 on Ethernet.
    pub lid: u16,
    /// The GID that is sent to peers.
    pub gid: GidEntry,
    /// NUMA node of the device, if known.
    pub numa: Option<u32>,
}

/// Why a device is not used.
#[derive(Debug, thiserror::Error)]
pub enum RdmaDeviceError {
    /// No port of the device is active.
    #[error("none of its ports is active")]
    Down,
    /// The active port has no usable GID.
    #[error("its port {port} has no {required}; assign its network interface an address")]
    NoGid {
        /// Number of the active port.
        port: u8,
        /// The required type of GID.
        required: &'static str,
    },
    /// A file in sysfs cannot be read.
    #[error("{path}: {problem}", path = path.display())]
    Io { path: PathBuf, problem: io::Error },
    /// A device that was requested by name does not exist.
    #[error("no such device")]
    Missing,
    /// libibverbs cannot open it.
    #[error(transparent)]
    Open(io::Error),
}

/// Usable devices, and why others are not usable, ordered by name.
///
/// # Errors
/// When sysfs cannot be read. A machine without devices returns an empty list.
pub fn devices(sysfs: &Path) -> io::Result<Vec<(String, Result<RdmaDevice, RdmaDeviceError>)>> {
    let folder = sysfs.join("class/infiniband");
    let mut names = match fs::read_dir(&folder) {
        Ok(entries) => entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    names.sort();
    Ok(names
        .into_iter()
        .map(|name| {
            let device = device(&folder.join(&name), &name);
            (name, device)
        })
        .collect())
}

fn device(folder: &Path, name: &str) -> Result<RdmaDevice, RdmaDeviceError> {
    let ports = folder.join("ports");
    let listed =
        fs::read_dir(&ports).map_err(|problem| RdmaDeviceError::Io { path: ports.clone(), problem })?;
    let mut numbers: Vec<u8> =
        listed.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    for port in numbers {
        let port_path = ports.join(port.to_string());
        // The content looks like "4: ACTIVE".
        if !text(&port_path.join("state"))?.contains("ACTIVE") {
            continue;
        }
        let ethernet = text(&port_path.join("link_layer")).is_ok_and(|layer| layer == "Ethernet");
        let link = if ethernet { LinkLayer::Ethernet } else { LinkLayer::InfiniBand };
        let lid = text(&port_path.join("lid")).unwrap_or_default();
        let lid = u16::from_str_radix(lid.trim_start_matches("0x"), 16).unwrap_or(0);
        let required = if ethernet { "RoCE v2 identifier" } else { "identifier" };
        let gid = choose(&gids(&port_path), link).ok_or(RdmaDeviceError::NoGid { port, required })?;
        let numa = text(&folder.join("device/numa_node")).ok().and_then(|node| node.parse().ok());
        return Ok(RdmaDevice { name: name.to_owned(), port, link, lid, gid, numa });
    }
    Err(RdmaDeviceError::Down)
}

fn gids(port: &Path) -> Vec<GidEntry> {
    let entry = |index: u32| {
        let gid: Gid = text(&port.join(format!("gids/{index}"))).ok()?.parse().ok()?;
        // Reading the type of an unused entry is an error.
        let kind = text(&port.join(format!("gid_attrs/types/{index}"))).unwrap_or_default();
        let index = u8::try_from(index).ok()?;
        (!gid.is_empty()).then_some(GidEntry { index, gid, is_v2: kind == "RoCE v2" })
    };
    (0..MAX_GIDS).filter_map(entry).collect()
}

/// The GID that most peers can reach. On Ethernet: an IPv4 address over UDP, then a global IPv6 address, then a link-local one. On
/// InfiniBand: the first entry.
fn choose(entries: &[GidEntry], link: LinkLayer) -> Option<GidEntry> {
    let rank = |entry: &GidEntry| match (entry.gid.is_ipv4(), entry.gid.is_link_local()) {
        (true, _) => 0,
        (false, false) => 1,
        (false, true) => 2,
    };
    let mut usable = entries.iter().filter(|entry| link == LinkLayer::InfiniBand || entry.is_v2);
    match link {
        LinkLayer::InfiniBand => usable.next().copied(),
        LinkLayer::Ethernet => usable.min_by_key(|entry| rank(entry)).copied(),
    }
}

fn text(path: &Path) -> Result<String, RdmaDeviceError> {
    let read = fs::read_to_string(path);
    let text = read.map_err(|problem| RdmaDeviceError::Io { path: path.to_owned(), problem })?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct SysfsTree(tempfile::TempDir);

    impl SysfsTree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn file(&self, path: &str, content: &str) -> &Self {
            let path = self.0.path().join("class/infiniband").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{content}\n")).unwrap();
            self
        }

        fn port(&self, device: &str, state: &str, layer: &str, gids: &[(&str, &str)]) -> &Self {
            self.file(&format!("{device}/ports/1/state"), state);
            self.file(&format!("{device}/ports/1/link_layer"), layer);
            self.file(&format!("{device}/ports/1/lid"), "0x1f");
            for (index, (gid, kind)) in gids.iter().enumerate() {
                self.file(&format!("{device}/ports/1/gids/{index}"), gid);
                self.file(&format!("{device}/ports/1/gid_attrs/types/{index}"), kind);
            }
            self
        }
    }

    const LOCAL: &str = "fe80:0000:0000:0000:5054:00ff:fe77:0001";
    const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a4d:0001";
    const IPV6: &str = "fd00:0000:0000:0000:0000:0000:0000:0001";
    const NONE: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    #[test]
    fn the_gid_that_most_peers_reach_is_chosen() {
        let tree = SysfsTree::new();
        let (v1, v2) = ("IB/RoCE v1", "RoCE v2");
        tree.port(
            "a",
            "4: ACTIVE",
            "Ethernet",
            &[(LOCAL, v1), (LOCAL, v2), (IPV4, v1), (IPV6, v2), (IPV4, v2)],
        );
        tree.port("b", "4: ACTIVE", "Ethernet", &[(NONE, v2), (LOCAL, v2), (IPV6, v2)]);
        tree.port("c", "4: ACTIVE", "InfiniBand", &[(LOCAL, v1), (IPV6, v1)]);
        tree.port("d", "4: ACTIVE", "Ethernet", &[(IPV4, v1)]);
        tree.port("e", "1: DOWN", "Ethernet", &[(IPV4, v2)]);
        tree.file("a/device/numa_node", "1").file("b/device/numa_node", "-1");
        let found = devices(tree.0.path()).unwrap();
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c", "d", "e"]);
        let device = |index: usize| found[index].1.as_ref().unwrap();
        assert_eq!((device(0).gid.index, device(0).gid.is_v2, device(0).numa), (4, true, Some(1)));
        assert_eq!((device(1).gid.index, device(1).numa), (2, None));
        assert_eq!((device(2).gid.index, device(2).link, device(2).lid), (0, LinkLayer::InfiniBand, 0x1f));
        assert!(matches!(found[3].1, Err(RdmaDeviceError::NoGid { port: 1, .. })));
        assert!(matches!(found[4].1, Err(RdmaDeviceError::Down)));
    }

    #[test]
    fn a_machine_without_devices_has_none() {
        assert!(devices(SysfsTree::new().0.path()).unwrap().is_empty());
    }
}
