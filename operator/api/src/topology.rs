//! Location of an instance, by topology level.

use serde::{Deserialize, Serialize};

/// A topology level, from one host to a zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyLevel {
    Node,
    /// GPUs connected by NVLink, inside or across nodes.
    NvlinkDomain,
    /// A rack, or an RDMA rail.
    Rack,
    Zone,
}

impl TopologyLevel {
    pub const ALL: [Self; 4] = [Self::Node, Self::NvlinkDomain, Self::Rack, Self::Zone];

    /// The level's name in annotations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::NvlinkDomain => "nvlink-domain",
            Self::Rack => "rack",
            Self::Zone => "zone",
        }
    }

    /// Finds a level by its name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }

    /// The default node label that identifies the level's domains. Racks have none. NVLink domains are labelled by NVIDIA's GPU
    /// feature discovery.
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

/// Location of an instance. Unknown levels are `None`.
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
    /// The domain of a level, to be set.
    pub fn domain_mut(&mut self, level: TopologyLevel) -> &mut Option<String> {
        match level {
            TopologyLevel::Node => &mut self.node,
            TopologyLevel::NvlinkDomain => &mut self.nvlink_domain,
            TopologyLevel::Rack => &mut self.rack,
            TopologyLevel::Zone => &mut self.zone,
        }
    }
}
