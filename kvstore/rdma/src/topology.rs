//! Chooses the device for a memory location: the nearest devices first, round-robin among equally near ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::device::RdmaDevice;

/// For each memory location, the preferred devices and the other usable ones.
pub type PriorityMatrix = BTreeMap<String, [Vec<String>; 2]>;

/// Location of memory on no particular NUMA node.
pub const ANY_LOCATION: &str = "*";

/// Location name of a NUMA node, for example `cpu:0`.
#[must_use]
pub fn place(node: u32) -> String {
    format!("cpu:{node}")
}

/// The priority matrix of a machine, one row per NUMA node. A device without NUMA affinity is near to every node.
#[must_use]
pub fn priority_matrix(nodes: &[u32], devices: &[RdmaDevice]) -> PriorityMatrix {
    let row = |node: &u32| {
        let is_near = |device: &&RdmaDevice| device.numa.is_none_or(|own| own == *node);
        let (near, far): (Vec<&RdmaDevice>, Vec<&RdmaDevice>) = devices.iter().partition(is_near);
        let names =
            |devices: Vec<&RdmaDevice>| devices.into_iter().map(|device| device.name.clone()).collect();
        (place(*node), [names(near), names(far)])
    };
    nodes.iter().map(row).collect()
}

/// The machine's NUMA nodes; node 0 if sysfs lists none.
#[must_use]
pub fn memory_nodes(sysfs: &Path) -> Vec<u32> {
    let listed = fs::read_dir(sysfs.join("devices/system/node")).into_iter().flatten();
    let mut nodes: Vec<u32> = listed
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("node")?.parse().ok())
        .collect();
    nodes.sort_unstable();
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// The device for chunk number `chunk` at `location`: chunks go over the preferred devices round-robin. A retry uses the next device, and
/// the other usable devices after the preferred ones.
#[must_use]
pub fn choose<'a>(
    matrix: &'a PriorityMatrix,
    location: &str,
    chunk: usize,
    attempt: usize,
) -> Option<&'a str> {
    let row = matrix.get(location).or_else(|| matrix.values().next())?;
    let [preferred, others] = row;
    let first = if preferred.is_empty() { others } else { preferred };
    let position = chunk.checked_rem(first.len())?;
    if attempt == 0 {
        return first.get(position).map(String::as_str);
    }
    let all = preferred.len() + others.len();
    let index = (position + attempt).checked_rem(all)?;
    preferred.iter().chain(others).nth(index).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::{GidEntry, LinkLayer};
    use crate::gid::Gid;

    fn device(name: &str, numa: Option<u32>) -> RdmaDevice {
        let gid = GidEntry { index: 0, gid: Gid::default(), is_v2: true };
        RdmaDevice { name: name.to_owned(), port: 1, link: LinkLayer::Ethernet, lid: 0, gid, numa }
    }

    #[test]
    fn devices_near_to_memory_are_preferred() {
        let devices = [device("a", Some(0)), device("b", Some(1)), device("c", None)];
        let matrix = priority_matrix(&[0, 1], &devices);
        assert_eq!(matrix["cpu:0"], [vec!["a".to_owned(), "c".to_owned()], vec!["b".to_owned()]]);
        assert_eq!(matrix["cpu:1"], [vec!["b".to_owned(), "c".to_owned()], vec!["a".to_owned()]]);
    }

    #[test]
    fn chunks_use_near_devices_round_robin_and_retries_all() {
        let devices = [device("a", Some(0)), device("b", Some(1)), device("c", Some(0))];
        let matrix = priority_matrix(&[0, 1, 2], &devices);
        let chosen = |chunk, attempt| choose(&matrix, "cpu:0", chunk, attempt).unwrap();
        assert_eq!([0, 1, 2].map(|chunk| chosen(chunk, 0)), ["a", "c", "a"]);
        assert_eq!([1, 2, 3].map(|attempt| chosen(0, attempt)), ["c", "b", "a"]);
        // Far devices are used if no near one exists.
        assert_eq!(choose(&matrix, "cpu:2", 1, 0), Some("b"));
        assert_eq!(choose(&matrix, ANY_LOCATION, 0, 0), Some("a"));
        assert_eq!(choose(&PriorityMatrix::new(), "cpu:0", 0, 0), None);
        assert_eq!(choose(&priority_matrix(&[0], &[]), "cpu:0", 0, 1), None);
    }

    #[test]
    fn memory_nodes_are_those_of_the_machine() {
        let tree = tempfile::tempdir().unwrap();
        assert_eq!(memory_nodes(tree.path()), [0]);
        for name in ["node1", "node0", "possible", "node12"] {
            fs::create_dir_all(tree.path().join("devices/system/node").join(name)).unwrap();
        }
        assert_eq!(memory_nodes(tree.path()), [0, 1, 12]);
    }

    proptest! {
        #[test]
        fn as_many_attempts_as_devices_try_them_all(numa in prop::collection::vec(0u32..3, 1..6), chunk in 0usize..9) {
            let devices: Vec<RdmaDevice> = numa.iter().enumerate().map(|(index, node)| device(&index.to_string(), Some(*node))).collect();
            let matrix = priority_matrix(&[0], &devices);
            let mut tried: Vec<_> = (1..=devices.len()).map(|attempt| choose(&matrix, "cpu:0", chunk, attempt).unwrap()).collect();
            tried.sort_unstable();
            tried.dedup();
            prop_assert_eq!(tried.len(), devices.len());
        }
    }
}
