//! Topology levels from the labels that the cluster's nodes have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rbg_api::TopologyLevel;

use crate::group_topology::TopologyKey;

/// Node labels of each level, in the order in which they are preferred: what NVIDIA's GPU feature discovery and topograph (1.x, 0.x) write,
/// then the labels of providers. A label serves one level only: the layers of AWS are numbered from the top, and an instance type has
/// three or four.
const KNOWN_LABELS: [(TopologyLevel, &[&str]); 6] = [
    (TopologyLevel::Node, &["kubernetes.io/hostname"]),
    (
        TopologyLevel::NvlinkDomain,
        &[
            "nvidia.com/gpu.clique",
            "accelerator.topograph.run/domain",
            "network.topology.nvidia.com/accelerator",
            "topology.k8s.aws/ultraserver-id",
            "ds.coreweave.com/nvlink.domain",
        ],
    ),
    (
        TopologyLevel::Rack,
        &[
            "fabric.topograph.run/tier-0",
            "network.topology.nvidia.com/leaf",
            "network.topology.nvidia.com/block",
            "cloud.google.com/gce-topology-subblock",
            "topology.k8s.aws/network-node-layer-4",
            "topology.k8s.aws/network-node-layer-3",
            "oci.oraclecloud.com/rdma.local_block_id",
        ],
    ),
    (
        TopologyLevel::Block,
        &[
            "fabric.topograph.run/tier-1",
            "network.topology.nvidia.com/spine",
            "cloud.google.com/gce-topology-block",
            "topology.k8s.aws/network-node-layer-3",
            "topology.k8s.aws/network-node-layer-2",
            "oci.oraclecloud.com/rdma.network_block_id",
        ],
    ),
    (
        TopologyLevel::Core,
        &[
            "fabric.topograph.run/tier-2",
            "network.topology.nvidia.com/core",
            "network.topology.nvidia.com/datacenter",
            "topology.k8s.aws/network-node-layer-2",
            "topology.k8s.aws/network-node-layer-1",
            "oci.oraclecloud.com/rdma.hpc_island_id",
        ],
    ),
    (TopologyLevel::Zone, &["topology.kubernetes.io/zone"]),
];

/// Known topology labels that nodes have had. None is removed when the last node with it disappears: an autoscaler may have removed that
/// node, and pods that make it add another one need the level.
#[derive(Debug, Clone, Default)]
pub struct NodeLabels {
    seen: BTreeSet<&'static str>,
    levels: Arc<[TopologyKey]>,
}

impl NodeLabels {
    /// Adds the labels of a node. Returns whether the levels have changed.
    pub fn observe(&mut self, labels: &BTreeMap<String, String>) -> bool {
        let known = KNOWN_LABELS.iter().flat_map(|(_, known)| known.iter().copied());
        let is_set = |label: &&str| labels.get(*label).is_some_and(|value| !value.is_empty());
        let count = self.seen.len();
        self.seen.extend(known.filter(is_set));
        if self.seen.len() == count {
            return false;
        }
        let levels = levels_of(&self.seen);
        let has_changed = *levels != *self.levels;
        self.levels = levels.into();
        has_changed
    }

    /// The levels that these labels identify, nearest first.
    #[must_use]
    pub fn levels(&self) -> &Arc<[TopologyKey]> {
        &self.levels
    }
}

fn levels_of(seen: &BTreeSet<&'static str>) -> Vec<TopologyKey> {
    let mut levels: Vec<TopologyKey> = Vec::new();
    for (level, known) in KNOWN_LABELS {
        let is_unused = |label: &&&str| !levels.iter().any(|key| key.label == **label);
        let label = known.iter().filter(|label| seen.contains(**label)).find(is_unused);
        if let Some(label) = label {
            levels.push(TopologyKey { level, label: (*label).to_owned() });
        }
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The levels after nodes with each of these sets of labels, as `LEVEL=LABEL`.
    fn levels(nodes: &[&[&str]]) -> Vec<String> {
        let mut all = NodeLabels::default();
        for labels in nodes {
            all.observe(&labels.iter().map(|label| ((*label).to_owned(), "x".to_owned())).collect());
        }
        all.levels().iter().map(|key| format!("{}={}", key.level.name(), key.label)).collect()
    }

    #[test]
    fn levels_follow_the_labels_of_each_provider() {
        let host = "kubernetes.io/hostname";
        assert_eq!(levels(&[&["other"]]), [""; 0]);
        let zone = "topology.kubernetes.io/zone";
        assert_eq!(
            levels(&[&[zone, host]]),
            ["node=kubernetes.io/hostname", "zone=topology.kubernetes.io/zone"]
        );
        let topograph =
            ["fabric.topograph.run/tier-0", "fabric.topograph.run/tier-1", "nvidia.com/gpu.clique"];
        assert_eq!(
            levels(&[&[host], &topograph]),
            [
                "node=kubernetes.io/hostname",
                "nvlink-domain=nvidia.com/gpu.clique",
                "rack=fabric.topograph.run/tier-0",
                "block=fabric.topograph.run/tier-1"
            ]
        );
        let old = ["accelerator", "block", "spine", "datacenter"];
        let old = old.map(|name| format!("network.topology.nvidia.com/{name}"));
        assert_eq!(
            levels(&[&old.each_ref().map(String::as_str)]),
            [
                "nvlink-domain=network.topology.nvidia.com/accelerator",
                "rack=network.topology.nvidia.com/block",
                "block=network.topology.nvidia.com/spine",
                "core=network.topology.nvidia.com/datacenter"
            ]
        );
        let layers = [1, 2, 3, 4].map(|layer| format!("topology.k8s.aws/network-node-layer-{layer}"));
        let layers = layers.each_ref().map(String::as_str);
        let of_aws = |level: &str, layer: usize| format!("{level}={}", layers[layer - 1]);
        assert_eq!(levels(&[&layers[..3]]), [of_aws("rack", 3), of_aws("block", 2), of_aws("core", 1)]);
        assert_eq!(levels(&[&layers]), [of_aws("rack", 4), of_aws("block", 3), of_aws("core", 2)]);
    }

    #[test]
    fn only_new_levels_are_changes() {
        let labels = |label: &str, value: &str| BTreeMap::from([(label.to_owned(), value.to_owned())]);
        let mut all = NodeLabels::default();
        assert!(!all.observe(&labels("nvidia.com/gpu.clique", "")), "an empty value is no domain");
        assert!(all.observe(&labels("nvidia.com/gpu.clique", "a.0")));
        assert!(!all.observe(&labels("nvidia.com/gpu.clique", "b.1")));
        assert!(!all.observe(&labels("accelerator.topograph.run/domain", "a")), "another label of the level");
        assert!(!all.observe(&BTreeMap::new()));
        assert_eq!(all.levels().len(), 1, "levels stay when their nodes are gone");
    }
}
