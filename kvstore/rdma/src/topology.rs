//! Which device is used for which memory: the one nearest to it first, all that are equally near in turn.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::device::RdmaDevice;

/// For each place in memory the preferred devices, and the others that can be used.
pub type PriorityMatrix = BTreeMap<String, [Vec<String>; 2]>;

/// The place of memory that lies anywhere.
pub const ANY_LOCATION: &str = "*";

/// The place of a memory node.
#[must_use]
pub fn place(node: u32) -> String {
    format!("cpu:{node}")
}

/// The matrix of a machine, for each of its memory nodes. A device that belongs to no node is as good for all of them.
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

/// The machine's memory nodes; a machine that does not tell has one.
#[must_use]
pub fn memory_nodes(sysfs: &Path) -> Vec<u32> {
    let listed = fs::read_dir(sysfs.join("devices/system/node")).into_iter().flatten();
    let mut nodes: Vec<u32> = listed
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("node")?.parse().ok())
        .collect();
    nodes.sort_unstable();
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// The device for a piece of memory at `place`: pieces go over the preferred devices in turn. A piece that has failed
/// goes on with the next one, and over the other usable devices after that.
#[must_use]
pub fn choose<'a>(matrix: &'a PriorityMatrix, place: &str, piece: usize, attempt: usize) -> Option<&'a str> {
    let row = matrix.get(place).or_else(|| matrix.values().next())?;
    let [preferred, others] = row;
    let first = if preferred.is_empty() { others } else { preferred };
    let in_turn = piece.checked_rem(first.len())?;
    if attempt == 0 {
        return first.get(in_turn).map(String::as_str);
    }
    let all = preferred.len() + others.len();
    let at = (in_turn + attempt).checked_rem(all)?;
    preferred.iter().chain(others).nth(at).map(String::as_str)
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
    fn pieces_go_over_near_devices_in_turn_and_then_over_all() {
        let devices = [device("a", Some(0)), device("b", Some(1)), device("c", Some(0))];
        let matrix = priority_matrix(&[0, 1, 2], &devices);
        let chosen = |piece, attempt| choose(&matrix, "cpu:0", piece, attempt).unwrap();
        assert_eq!([0, 1, 2].map(|piece| chosen(piece, 0)), ["a", "c", "a"]);
        assert_eq!([1, 2, 3].map(|attempt| chosen(0, attempt)), ["c", "b", "a"]);
        // Far ones are better than none.
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
        fn as_many_attempts_as_devices_try_them_all(numa in prop::collection::vec(0u32..3, 1..6), piece in 0usize..9) {
            let devices: Vec<RdmaDevice> = numa.iter().enumerate().map(|(at, node)| device(&at.to_string(), Some(*node))).collect();
            let matrix = priority_matrix(&[0], &devices);
            let mut tried: Vec<_> = (1..=devices.len()).map(|attempt| choose(&matrix, "cpu:0", piece, attempt).unwrap()).collect();
            tried.sort_unstable();
            tried.dedup();
            prop_assert_eq!(tried.len(), devices.len());
        }
    }
}
