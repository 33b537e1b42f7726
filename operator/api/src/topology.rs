//! Where an instance runs, level by level.

use serde::{Deserialize, Serialize};

/// A level of nearness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyLevel {
    /// One host.
    Node,
    /// GPUs that NVLink joins, inside or across nodes.
    NvlinkDomain,
    /// A rack, or an RDMA rail.
    Rack,
    /// An availability zone.
    Zone,
}

impl TopologyLevel {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Node, Self::NvlinkDomain, Self::Rack, Self::Zone];

    /// As annotations have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::NvlinkDomain => "nvlink-domain",
            Self::Rack => "rack",
            Self::Zone => "zone",
        }
    }

    /// The level of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }

    /// The label of nodes by which the level is told, where there is a usual one. Racks have none. NVLink domains are
    /// labelled by NVIDIA's GPU feature discovery.
    #[must_use]
    pub fn default_label(self) -> Option<&'static str> {
        match self {
            Self::Node => Some("kubernetes.io/hostname"),
            Self::NvlinkDomain => Some("nvidia.com/gpu.clique"),
            Self::Rack => None,
            Self::Zone => Some("topology.kubernetes.io/zone"),
        }
    }
}

/// Where an instance runs. Unknown levels are `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyLocation {
    /// Kubernetes node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// NVLink domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink_domain: Option<String>,
    /// Rack or RDMA rail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    /// Availability zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
}

impl TopologyLocation {
    /// The domain of a level.
    pub fn domain_mut(&mut self, level: TopologyLevel) -> &mut Option<String> {
        match level {
            TopologyLevel::Node => &mut self.node,
            TopologyLevel::NvlinkDomain => &mut self.nvlink_domain,
            TopologyLevel::Rack => &mut self.rack,
            TopologyLevel::Zone => &mut self.zone,
        }
    }
}
