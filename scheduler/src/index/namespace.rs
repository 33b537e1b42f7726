//! Keys of pages from different models in one index.

use super::placement_table::mix;

/// What keeps pages apart whose hashes may be equal: another model, page size or hash scheme gives another namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockHashNamespace(u64);

impl BlockHashNamespace {
    /// The namespace of these parts. Their order and their division count.
    #[must_use]
    pub fn new(parts: &[&str]) -> Self {
        let start = mix(parts.len() as u64 + 1);
        Self(parts.iter().fold(start, |state, part| {
            let state = part.bytes().fold(state, |state, byte| mix(state ^ u64::from(byte)));
            mix(state ^ (part.len() as u64) << 8)
        }))
    }

    /// The index's key of a page with this 64-bit hash. Different pages of one namespace keep different keys.
    #[inline]
    #[must_use]
    pub fn key(self, hash: u64) -> u64 {
        // A multiplication spreads hashes that are not cryptographic over the low half; the shift over the high one.
        let mixed = (hash ^ self.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ mixed >> 32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn namespaces_differ_by_part_and_by_division() {
        let all = [&["ab", "c"][..], &["a", "bc"], &["abc"], &["ab", "c", ""], &[], &[""], &["c", "ab"]];
        let seen: BTreeSet<u64> = all.iter().map(|parts| BlockHashNamespace::new(parts).0).collect();
        assert_eq!(seen.len(), all.len());
        assert_ne!(BlockHashNamespace::new(&["a"]).key(1), BlockHashNamespace::new(&["b"]).key(1));
    }

    #[test]
    fn keys_of_a_namespace_differ() {
        let space = BlockHashNamespace::new(&["model", "64"]);
        let keys: BTreeSet<u64> = (0..10_000).map(|hash| space.key(hash)).collect();
        assert_eq!(keys.len(), 10_000);
    }
}
