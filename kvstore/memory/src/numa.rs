//! On which memory node a region's pages lie. On a machine with one node there is nothing to choose.
#![expect(unsafe_code, reason = "no crate wraps mbind")]

use std::io;
use std::path::Path;

use crate::mapping::MappedSpan;

/// Highest node number that can be chosen, plus one.
const MAX_NODES: usize = 1024;
const WORD: usize = u64::BITS as usize;
// The kernel's numbers (linux/mempolicy.h).
const PREFERRED: usize = 1;
const INTERLEAVE: usize = 3;

/// Where pages come from when they are first written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NumaPlacement {
    /// From the node of the thread that writes.
    #[default]
    Anywhere,
    /// From this node while it has memory, else from others.
    Node(usize),
    /// From all nodes in turn, so that each carries its share of the traffic.
    Spread,
}

/// The machine's memory nodes. One, number 0, where the system does not tell.
#[must_use]
pub fn nodes() -> Vec<usize> {
    let list = std::fs::read_to_string(Path::new("/sys/devices/system/node/has_memory")).unwrap_or_default();
    let nodes = parse_list(list.trim());
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// A list as `0-3,8`. What cannot be read is left out.
fn parse_list(list: &str) -> Vec<usize> {
    let ranges = list.split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok().filter(|last| *last < MAX_NODES)?)
    });
    ranges.flatten().collect()
}

/// Places the pages of `span` that are not there yet.
pub(crate) fn place(span: MappedSpan<'_>, placement: NumaPlacement) -> io::Result<()> {
    let (mode, nodes) = match placement {
        NumaPlacement::Anywhere => return Ok(()),
        NumaPlacement::Node(node) => (PREFERRED, vec![node]),
        NumaPlacement::Spread => (INTERLEAVE, nodes()),
    };
    let mut mask = [0u64; MAX_NODES / WORD];
    for node in nodes {
        let word = mask.get_mut(node / WORD).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        *word |= 1 << (node % WORD);
    }
    // SAFETY: the range is mapped, the mask is as long as said (the kernel reads one bit less), and a policy changes no bytes.
    let answer = unsafe {
        libc::syscall(libc::SYS_mbind, span.start(), span.len(), mode, mask.as_ptr(), MAX_NODES + 1, 0usize)
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_read() {
        assert_eq!(parse_list("0"), [0]);
        assert_eq!(parse_list("0-2,5,7-8"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(parse_list(""), [0; 0]);
        assert_eq!(parse_list("x,3,1-y,0-99999999"), [3]);
    }

    #[test]
    fn this_machine_has_a_node() {
        assert!(!nodes().is_empty());
    }
}
