//! NUMA placement of a region's pages. On a machine with one node it has no effect.
#![expect(unsafe_code, reason = "no crate wraps mbind and set_mempolicy")]

use std::io;
use std::path::Path;

use crate::mapping::MappedSpan;

/// Upper bound of node numbers (exclusive).
const MAX_NODES: usize = 1024;
const WORD: usize = u64::BITS as usize;
// Policy numbers of the kernel (linux/mempolicy.h).
const PREFERRED: usize = 1;
const INTERLEAVE: usize = 3;

/// Source of pages at their first write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NumaPlacement {
    /// Node of the writing thread.
    #[default]
    Anywhere,
    /// This node while it has memory, else others.
    Node(usize),
    /// All nodes round-robin, so that each carries a share of the traffic.
    Spread,
}

/// The machine's NUMA nodes; node 0 if the system lists none.
#[must_use]
pub fn nodes() -> Vec<usize> {
    let list = std::fs::read_to_string(Path::new("/sys/devices/system/node/has_memory")).unwrap_or_default();
    let nodes = parse_list(list.trim());
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// Parses a list such as `0-3,8`. Invalid parts are skipped.
fn parse_list(list: &str) -> Vec<usize> {
    let ranges = list.split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok().filter(|last| *last < MAX_NODES)?)
    });
    ranges.flatten().collect()
}

/// Sets the placement of pages of `span` that are not allocated yet.
pub(crate) fn place(span: MappedSpan<'_>, placement: NumaPlacement) -> io::Result<()> {
    let (mode, nodes) = match placement {
        NumaPlacement::Anywhere => return Ok(()),
        NumaPlacement::Node(node) => (PREFERRED, vec![node]),
        NumaPlacement::Spread => (INTERLEAVE, nodes()),
    };
    let mask = node_mask(&nodes)?;
    // SAFETY: the range is mapped, the mask has the given length (the kernel reads one bit less), and a policy changes no bytes.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, span.start(), span.len(), mode, mask.as_ptr(), MAX_NODES + 1, 0usize)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Binds the calling thread to the CPUs of a node, and lets it prefer the node's memory for new pages.
///
/// # Errors
/// When the machine has no such node, or the system refuses.
pub fn bind_current_thread(node: usize) -> io::Result<()> {
    let list = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist"));
    // A kernel without NUMA has no such folder, and its only node is 0.
    let list = match list {
        Err(error) if error.kind() == io::ErrorKind::NotFound && node == 0 => return Ok(()),
        list => list?,
    };
    let mut cpus = rustix::thread::CpuSet::new();
    let listed = parse_list(list.trim()).into_iter().filter(|cpu| *cpu < rustix::thread::CpuSet::MAX_CPU);
    listed.for_each(|cpu| cpus.set(cpu));
    // A node may have memory only.
    if cpus.count() > 0 {
        rustix::thread::sched_setaffinity(None, &cpus)?;
    }
    let mask = node_mask(&[node])?;
    // SAFETY: the mask has the given length (the kernel reads one bit less), and a policy changes no bytes.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, PREFERRED, mask.as_ptr(), MAX_NODES + 1) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// One bit per node.
fn node_mask(nodes: &[usize]) -> io::Result<[u64; MAX_NODES / WORD]> {
    let mut mask = [0u64; MAX_NODES / WORD];
    for node in nodes {
        let word = mask.get_mut(node / WORD).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        *word |= 1 << (node % WORD);
    }
    Ok(mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_lists_are_parsed() {
        assert_eq!(parse_list("0"), [0]);
        assert_eq!(parse_list("0-2,5,7-8"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(parse_list(""), [0; 0]);
        assert_eq!(parse_list("x,3,1-y,0-99999999"), [3]);
    }

    #[test]
    fn this_machine_has_at_least_one_node() {
        assert!(!nodes().is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no such system call")]
    fn a_thread_is_bound_to_an_existing_node_only() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

        std::thread::spawn(|| {
            let allowed = sched_getaffinity(None).unwrap();
            let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
            let mut first = CpuSet::new();
            first.set(allowed[0]);
            sched_setaffinity(None, &first).unwrap();
            let node = nodes()[0];
            // A sandbox may forbid the policy for memory, which is set last.
            let _ = bind_current_thread(node);
            if let Ok(list) = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist"))
            {
                let bound = sched_getaffinity(None).unwrap();
                let of_node = parse_list(list.trim());
                for cpu in allowed.iter().filter(|cpu| of_node.contains(cpu)) {
                    assert!(bound.is_set(*cpu), "cpu {cpu}");
                }
            }
            assert!(bind_current_thread(MAX_NODES).is_err());
        })
        .join()
        .unwrap();
    }
}
