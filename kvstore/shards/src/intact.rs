//! A node's report of intact ranges, by shard.

use mooncake_wire::intact_ranges::IntactRangesArguments;

use crate::{ShardCount, ShardIndex, segment_part};

/// The report of each shard whose part of the segment, which has `size` bytes, is in the reported one. Offsets are those in the part.
pub fn split_intact_ranges(
    report: &IntactRangesArguments,
    size: u64,
    shards: ShardCount,
) -> Vec<(ShardIndex, IntactRangesArguments)> {
    let part_of = |shard| {
        let (offset, part) = segment_part(size, shard, shards);
        let (from, to) = (report.from.max(offset), report.to.min(offset + part));
        // A report on an empty part of a segment is passed on once, so that it is answered.
        if from >= to && !(shard == 0 && report.from >= report.to) {
            return None;
        }
        let ranges = report.starts.iter().zip(&report.ends);
        let clipped = ranges.filter_map(|(start, end)| {
            let (start, end) = ((*start).max(offset), (*end).min(offset + part));
            (start < end).then(|| (start - offset, end - offset))
        });
        let (starts, ends) = clipped.unzip();
        let (from, to) = (from.saturating_sub(offset), to.saturating_sub(offset));
        Some((shard, IntactRangesArguments { from, to, starts, ends, ..report.clone() }))
    };
    shards.iter().filter_map(part_of).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use mooncake_wire::types::Uuid;
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    proptest! {
        /// In units of half a page, each one is reported by exactly the shard that has it, as intact if it was.
        #[test]
        fn every_range_is_reported_by_the_shard_that_has_it(
            pages in 1..40_u64,
            count in 1..6_usize,
            bounds in prop::collection::btree_set(0..80_u64, 0..8),
            (from, to) in (0..80_u64, 0..80_u64),
        ) {
            let (size, unit) = (pages * PAGE, PAGE / 2);
            let shards = ShardCount::new(count).unwrap();
            let bounds: Vec<u64> = bounds.into_iter().map(|bound| (bound * unit).min(size)).collect();
            let pairs = bounds.chunks_exact(2).filter(|pair| pair[0] < pair[1]);
            let (starts, ends): (Vec<u64>, Vec<u64>) = pairs.map(|pair| (pair[0], pair[1])).unzip();
            let (from, to) = ((from * unit).min(size), (to * unit).min(size));
            let id = Uuid { first: 1, second: 2 };
            let report = IntactRangesArguments { client_id: id, segment_id: id, from, to, starts, ends };
            let covers = |report: &IntactRangesArguments, at: u64| (report.from..report.to).contains(&at);
            let intact = |report: &IntactRangesArguments, at: u64| {
                report.starts.iter().zip(&report.ends).any(|(start, end)| (*start..*end).contains(&at))
            };
            let mut seen = BTreeSet::new();
            for (shard, part) in split_intact_ranges(&report, size, shards) {
                let (offset, part_size) = segment_part(size, shard, shards);
                prop_assert!(part.to <= part_size);
                for at in (0..part_size).step_by(usize::try_from(unit).unwrap()).filter(|at| covers(&part, *at)) {
                    prop_assert!(seen.insert(offset + at));
                    prop_assert_eq!(intact(&part, at), intact(&report, offset + at));
                }
            }
            let reported = (0..size).step_by(usize::try_from(unit).unwrap()).filter(|at| covers(&report, *at));
            prop_assert_eq!(seen, reported.collect::<BTreeSet<u64>>());
        }
    }
}
