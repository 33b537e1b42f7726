//! Replay of a whole state, as at a start, on several threads.
//!
//! Allocating each object's range at its offset would cost more than everything else: free ranges at random offsets have to be
//! searched in a tree. A bulk replay allocates none. Its objects only have their offsets, and [`MasterCore::end_bulk_replay`] builds
//! each segment's allocator from the sorted ranges. Meanwhile ranges may overlap, since the parts of a snapshot are from different
//! times; after the last state change they do not. Should they do so in spite of that, the state changes contradict each other, so
//! all replicas that overlap are dropped rather than one of them returned with another's bytes.
//!
//! State changes of different shards are independent until then, so each [`ReplayLane`] may be applied by a separate thread.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::allocator::{ReplayedRange, SegmentAllocator};
use crate::codec::{RecordSubject, subject};
use crate::indices::{AllocatorBlockIndex, EntryIndex, SegmentIndex, ShardIndex, SlabIndex};
use crate::master::MasterCore;
use crate::object::MemoryReplica;
use crate::object_table::ObjectTable;
use crate::shard::ObjectShard;

/// Runs independent jobs.
pub trait JobRunner {
    /// Number of jobs that run at the same time.
    fn width(&self) -> usize;

    /// Runs all jobs and returns when the last one has ended.
    fn run<'j>(&self, jobs: Vec<Box<dyn FnOnce() + Send + 'j>>);
}

/// Runs one job after the other.
impl JobRunner for () {
    fn width(&self) -> usize {
        1
    }

    fn run<'j>(&self, jobs: Vec<Box<dyn FnOnce() + Send + 'j>>) {
        jobs.into_iter().for_each(|job| job());
    }
}

/// Which state changes a state change must be ordered with in a bulk replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayLane {
    /// Those of the same lane, a number below [`MasterCoreOptions::shards`](crate::MasterCoreOptions::shards).
    Shard(usize),
    /// All others: every lane must have applied what is before it, and none may have applied what is after it.
    Exclusive,
}

/// Some of the shards, and their ranges by segment.
struct ShardPart {
    shards: Range<usize>,
    /// In the order of [`for_each_range`].
    ranges: Vec<Vec<ReplayedRange>>,
    /// By segment, the position of the first range of this part.
    first: Vec<usize>,
    /// Number of replicas dropped because they overlap.
    dropped: u64,
}

/// The ranges of a segment.
#[derive(Default)]
struct SegmentRanges {
    ranges: Vec<ReplayedRange>,
    /// The blocks that they got, by position.
    blocks: Vec<AllocatorBlockIndex>,
}

impl MasterCore {
    /// Starts a bulk replay in a master without objects.
    pub fn begin_bulk_replay(&self) {
        self.objects.bulk_replay.store(true, Relaxed);
    }

    /// The lane of an encoded state change, when all exclusive ones before it have been applied.
    pub fn replay_lane(&self, record: &[u8]) -> ReplayLane {
        let shard = match subject(record) {
            Some(RecordSubject::Object { tenant, key }) => {
                match self.objects.locate_reader_key(tenant, key) {
                    Ok(location) => location.shard,
                    // The first object of a tenant adds the tenant.
                    Err(_) => return ReplayLane::Exclusive,
                }
            }
            Some(RecordSubject::Quarantine { segment, offset }) => {
                self.objects.quarantine_shard(segment, offset)
            }
            Some(RecordSubject::Planner) => ShardIndex::FIRST,
            None => return ReplayLane::Exclusive,
        };
        ReplayLane::Shard(shard.get())
    }

    /// Allocates the ranges of all objects. Returns the number of replicas that were dropped because they overlap. Further state
    /// changes may be applied one by one.
    pub fn end_bulk_replay(&self, runner: &dyn JobRunner) -> u64 {
        if !self.objects.bulk_replay.swap(false, Relaxed) {
            return 0;
        }
        let mut parts = self.objects.parts(runner.width());
        runner.run(parts.iter_mut().map(|part| boxed(|| part.collect(&self.objects))).collect());
        let mut segments = take_ranges(&mut parts);
        let table = Arc::clone(&self.objects.segments.load());
        let jobs = segments.iter_mut().enumerate().filter_map(|(slot, segment)| {
            let mounted = table.get(SegmentIndex::new(slot)?)?;
            Some(boxed(move || {
                let allocator = segment.allocate(mounted.descriptor.size);
                mounted.with_allocator(|empty| *empty = allocator);
            }))
        });
        runner.run(jobs.collect());
        let segments = &segments;
        runner.run(parts.iter_mut().map(|part| boxed(|| part.assign(&self.objects, segments))).collect());
        parts.iter().map(|part| part.dropped).sum()
    }
}

fn boxed<'j>(job: impl FnOnce() + Send + 'j) -> Box<dyn FnOnce() + Send + 'j> {
    Box::new(job)
}

/// Moves the ranges of all parts into one list per segment.
fn take_ranges(parts: &mut [ShardPart]) -> Vec<SegmentRanges> {
    let mut segments: Vec<SegmentRanges> = Vec::new();
    for part in parts {
        for (slot, ranges) in part.ranges.iter_mut().enumerate() {
            if segments.len() <= slot {
                segments.push(SegmentRanges::default());
            }
            let all = &mut segments[slot].ranges;
            let first = all.len();
            part.first.push(first);
            if first == 0 {
                *all = std::mem::take(ranges);
            } else {
                let moved = std::mem::take(ranges).into_iter();
                all.extend(moved.map(|range| ReplayedRange { position: range.position + first, ..range }));
            }
        }
    }
    segments
}

/// Calls `visit` with the block of every range without one, its segment, its offset and its size.
fn for_each_range(
    shard: &mut ObjectShard,
    mut visit: impl FnMut(&mut AllocatorBlockIndex, SegmentIndex, ReplayedRange),
) {
    let mut visit = |block: &mut AllocatorBlockIndex, segment, offset, size| {
        if *block == AllocatorBlockIndex::NONE {
            visit(block, segment, ReplayedRange { offset, size, position: 0 });
        }
    };
    for range in &mut shard.quarantined {
        visit(&mut range.block, range.segment, range.offset, range.size);
    }
    for slot in 0..shard.entries.high_water_mark() {
        let entry = &mut shard.entries[EntryIndex::from_slot(slot)];
        let size = entry.size;
        for replica in entry.replicas_mut() {
            visit(&mut replica.block, replica.segment, replica.offset, size);
        }
        if let Some(pending) = entry.extra.as_mut().and_then(|extra| extra.pending.as_mut()) {
            for replica in &mut pending.replicas {
                visit(&mut replica.block, replica.segment, replica.offset, pending.size);
            }
        }
    }
}

impl ShardPart {
    fn collect(&mut self, objects: &ObjectTable) {
        for shard in self.shards.clone() {
            for_each_range(&mut objects.lock(ShardIndex::new(shard)), |_, segment, range| {
                if self.ranges.len() <= segment.get() {
                    self.ranges.resize_with(segment.get() + 1, Vec::new);
                }
                let ranges = &mut self.ranges[segment.get()];
                ranges.push(ReplayedRange { position: ranges.len(), ..range });
            });
        }
    }

    /// Sets the blocks of all ranges, and drops the replicas that got none.
    fn assign(&mut self, objects: &ObjectTable, segments: &[SegmentRanges]) {
        let mut positions = std::mem::take(&mut self.first);
        for shard in self.shards.clone() {
            let mut shard = objects.lock(ShardIndex::new(shard));
            let mut is_complete = true;
            for_each_range(&mut shard, |block, segment, _| {
                let position = &mut positions[segment.get()];
                let blocks = &segments[segment.get()].blocks;
                *block = blocks.get(*position).copied().unwrap_or(AllocatorBlockIndex::NONE);
                *position += 1;
                is_complete &= *block != AllocatorBlockIndex::NONE;
            });
            if !is_complete {
                shard.quarantined.retain(|range| range.block != AllocatorBlockIndex::NONE);
                let has_no_block = |replica: &MemoryReplica, _| replica.block == AllocatorBlockIndex::NONE;
                self.dropped += shard.drop_replicas(has_no_block, 0, &mut ());
            }
        }
    }
}

impl SegmentRanges {
    /// Builds the allocator of a segment of `capacity` bytes.
    fn allocate(&mut self, capacity: u64) -> SegmentAllocator {
        self.blocks = vec![AllocatorBlockIndex::NONE; self.ranges.len()];
        let mut ranges = std::mem::take(&mut self.ranges);
        ranges.retain(|range| range.end() <= capacity);
        ranges.sort_unstable_by_key(|range| range.offset);
        drop_overlapping(&mut ranges);
        SegmentAllocator::with_ranges(capacity, &ranges, |range, block| self.blocks[range.position] = block)
    }
}

/// Removes all ranges that overlap others. They must be sorted by offset.
fn drop_overlapping(ranges: &mut Vec<ReplayedRange>) {
    let mut overlapping = Vec::new();
    // The range that reaches furthest so far.
    let (mut furthest, mut end) = (0, 0);
    for (nth, range) in ranges.iter().enumerate() {
        if range.offset < end {
            overlapping.extend([furthest, nth]);
        }
        let range_end = range.end();
        if range_end > end {
            (furthest, end) = (nth, range_end);
        }
    }
    if overlapping.is_empty() {
        return;
    }
    overlapping.sort_unstable();
    let mut nth = 0;
    ranges.retain(|_| {
        nth += 1;
        overlapping.binary_search(&(nth - 1)).is_err()
    });
}

impl ObjectTable {
    /// All shards in `count` parts.
    fn parts(&self, count: usize) -> Vec<ShardPart> {
        let shards = self.shards.len();
        let size = shards.div_ceil(count.max(1));
        let part = |first| ShardPart {
            shards: first..shards.min(first + size),
            ranges: Vec::new(),
            first: Vec::new(),
            dropped: 0,
        };
        (0..shards).step_by(size).map(part).collect()
    }
}
