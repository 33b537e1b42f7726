//! Topology levels, and the location of an instance by level.

use serde::{Deserialize, Serialize};

/// A topology level, from one host to a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyLevel {
    /// One host: its devices are connected by PCIe, or by NVLink inside the host.
    Node,
    /// GPUs connected by NVLink, inside or across nodes.
    NvlinkDomain,
    /// A rack, or an RDMA rail: nodes below one leaf switch.
    Rack,
    /// Racks below one spine switch.
    Block,
    /// Blocks below one core switch.
    Core,
    Zone,
    Region,
}

impl TopologyLevel {
    pub const ALL: [Self; 7] =
        [Self::Node, Self::NvlinkDomain, Self::Rack, Self::Block, Self::Core, Self::Zone, Self::Region];

    /// The level's name in annotations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::NvlinkDomain => "nvlink-domain",
            Self::Rack => "rack",
            Self::Block => "block",
            Self::Core => "core",
            Self::Zone => "zone",
            Self::Region => "region",
        }
    }

    /// Finds a level by its name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }

    /// The default node label that identifies the level's domains. Racks, blocks and cores have none: their labels depend on the
    /// cluster's provider. NVLink domains are labelled by NVIDIA's GPU feature discovery.
    #[must_use]
    pub fn default_label(self) -> Option<&'static str> {
        match self {
            Self::Node => Some("kubernetes.io/hostname"),
            Self::NvlinkDomain => Some("nvidia.com/gpu.clique"),
            Self::Rack | Self::Block | Self::Core => None,
            Self::Zone => Some("topology.kubernetes.io/zone"),
            Self::Region => Some("topology.kubernetes.io/region"),
        }
    }
}

/// Location of an instance, at the levels that routers distinguish. Unknown levels are `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyLocation {
    /// Name of the Kubernetes node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// NVLink domain of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink_domain: Option<String>,
    /// Rack or RDMA rail of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    /// Availability zone of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
}

impl TopologyLocation {
    /// Sets the domain of a level. Levels that only placement distinguishes are left out.
    pub fn set(&mut self, level: TopologyLevel, domain: Option<String>) {
        match level {
            TopologyLevel::Node => self.node = domain,
            TopologyLevel::NvlinkDomain => self.nvlink_domain = domain,
            TopologyLevel::Rack => self.rack = domain,
            TopologyLevel::Zone => self.zone = domain,
            TopologyLevel::Block | TopologyLevel::Core | TopologyLevel::Region => {}
        }
    }
}
