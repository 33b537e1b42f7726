//! Keys of blocks from different models in one index.

use super::placement_table::mix;

/// Separates blocks whose hashes may be equal: another model, block size or hash scheme gives another namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHashNamespace(u64);

impl BlockHashNamespace {
    /// The namespace of these parts. Their order and their boundaries matter.
    #[must_use]
    pub fn new(parts: &[&str]) -> Self {
        let start = mix(parts.len() as u64 + 1);
        Self(parts.iter().fold(start, |state, part| {
            let state = part.bytes().fold(state, |state, byte| mix(state ^ u64::from(byte)));
            mix(state ^ (part.len() as u64) << 8)
        }))
    }

    /// The namespace of one of an engine's KV-cache groups, whose blocks have equal hashes. Group 0 has this namespace
    /// itself, as the blocks of a model without groups.
    #[must_use]
    pub fn in_group(self, group: u32) -> Self {
        if group == 0 { self } else { Self(mix(self.0 ^ u64::from(group))) }
    }

    /// The index key of a block with this 64-bit hash. The mapping is injective within a namespace.
    #[inline]
    #[must_use]
    pub fn key(self, hash: u64) -> u64 {
        // The multiplication spreads non-cryptographic hashes over the high half, the shift over the low half.
        let mixed = (hash ^ self.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ mixed >> 32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn namespaces_differ_by_part_and_by_boundary() {
        let all = [&["ab", "c"][..], &["a", "bc"], &["abc"], &["ab", "c", ""], &[], &[""], &["c", "ab"]];
        let distinct: BTreeSet<u64> = all.iter().map(|parts| BlockHashNamespace::new(parts).0).collect();
        assert_eq!(distinct.len(), all.len());
        assert_ne!(BlockHashNamespace::new(&["a"]).key(1), BlockHashNamespace::new(&["b"]).key(1));
        let space = BlockHashNamespace::new(&["a"]);
        let groups: BTreeSet<u64> = (0..8).map(|group| space.in_group(group).0).collect();
        assert_eq!((groups.len(), space.in_group(0)), (8, space));
    }

    #[test]
    fn keys_of_a_namespace_differ() {
        let space = BlockHashNamespace::new(&["model", "64"]);
        let keys: BTreeSet<u64> = (0..10_000).map(|hash| space.key(hash)).collect();
        assert_eq!(keys.len(), 10_000);
    }
}
