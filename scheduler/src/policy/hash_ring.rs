//! Consistent hashing of engines by name.

use std::sync::Arc;

use super::name_hash::{name_hash, splitmix64};

/// Points per engine (smg's `VIRTUAL_NODES_PER_WORKER`): engines' shares then differ by some 8 %.
const POINTS_PER_ENGINE: u64 = 150;

/// Engines on a circle of hashes. Adding or removing one moves only the keys that it gains or loses.
#[derive(Debug, Default)]
pub(super) struct HashRing {
    names: Vec<Arc<str>>,
    /// Position and index into `names`, ordered by position.
    points: Vec<(u64, u32)>,
}

impl HashRing {
    pub(super) fn new(names: Vec<Arc<str>>) -> Self {
        let points_of = |(engine, name): (u32, &Arc<str>)| {
            let name = name.clone();
            (0..POINTS_PER_ENGINE).map(move |point| (name_hash(&name, point), engine))
        };
        let mut points: Vec<_> = (0..).zip(&names).flat_map(points_of).collect();
        points.sort_unstable();
        Self { names, points }
    }

    /// Whether the ring consists of exactly these engines in this order.
    pub(super) fn has_members<'a>(&self, names: impl Iterator<Item = &'a Arc<str>>) -> bool {
        self.names.iter().eq(names)
    }

    /// The first usable engine clockwise from `key`, as an index into the names of the ring.
    pub(super) fn owner(&self, key: u64, mut usable: impl FnMut(usize) -> bool) -> Option<usize> {
        let position = splitmix64(key);
        let start = self.points.partition_point(|&(point, _)| point < position);
        let (before, after) = self.points.split_at(start);
        after.iter().chain(before).map(|&(_, engine)| engine as usize).find(|&engine| usable(engine))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(count: usize) -> Vec<Arc<str>> {
        (0..count).map(|i| format!("http://10.0.0.{i}:30000").into()).collect()
    }

    #[test]
    fn keys_are_spread() {
        let ring = HashRing::new(names(8));
        let mut owned = [0_u32; 8];
        for key in 0..8000 {
            owned[ring.owner(key, |_| true).unwrap()] += 1;
        }
        assert!(owned.iter().all(|&keys| (700..1300).contains(&keys)), "{owned:?}");
    }

    #[test]
    fn an_engine_that_leaves_moves_only_its_own_keys() {
        let (full, less) = (HashRing::new(names(8)), HashRing::new(names(7)));
        for key in 0..2000 {
            let owner = full.owner(key, |_| true).unwrap();
            let next = full.owner(key, |engine| engine != 7).unwrap();
            assert_eq!(less.owner(key, |_| true), Some(next));
            assert!(owner == 7 || owner == next);
        }
    }

    #[test]
    fn an_empty_or_unusable_ring_owns_nothing() {
        assert_eq!(HashRing::default().owner(1, |_| true), None);
        assert_eq!(HashRing::new(names(3)).owner(1, |_| false), None);
    }

    #[test]
    fn ring_detects_changed_members() {
        let ring = HashRing::new(names(3));
        assert!(ring.has_members(names(3).iter()) && !ring.has_members(names(2).iter()));
        assert!(!ring.has_members(names(3).iter().rev()));
    }
}
