//! Objects in several buffers: which bytes can go directly between buffers and sockets, and which need staging.
//!
//! The client transfers one contiguous range per object. Buffers that are adjacent in memory are one range. An object in other
//! buffers is copied through staging memory, of which a batch uses a bounded amount at a time.

use std::ops::Range;

use crate::registered_memory::MemoryRange;

/// Maximum staging memory of a call in bytes, except for a single object that needs more.
const MAX_STAGED: usize = 64 << 20;

/// Merges adjacent ranges, and drops empty ones.
pub(crate) fn merge_adjacent(parts: &[MemoryRange]) -> Vec<MemoryRange> {
    let mut merged: Vec<MemoryRange> = Vec::with_capacity(parts.len());
    for part in parts.iter().filter(|part| part.size > 0) {
        match merged.last_mut() {
            Some(last) if last.address.checked_add(last.size) == Some(part.address) => last.size += part.size,
            _ => merged.push(*part),
        }
    }
    merged
}

/// Total size in bytes. `None` if that exceeds the address space.
pub(crate) fn total_size(parts: &[MemoryRange]) -> Option<usize> {
    parts.iter().try_fold(0_usize, |sum, part| sum.checked_add(part.size))
}

/// Splits a batch so that no part stages more than the limit. Takes the staged bytes of each object.
pub(crate) fn bounded_batches(staged: &[usize]) -> Vec<Range<usize>> {
    let (mut batches, mut start, mut sum) = (Vec::new(), 0, 0_usize);
    for (index, size) in staged.iter().enumerate() {
        if index > start && sum.saturating_add(*size) > MAX_STAGED {
            batches.push(start..index);
            (start, sum) = (index, 0);
        }
        sum = sum.saturating_add(*size);
    }
    if start < staged.len() {
        batches.push(start..staged.len());
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(address: usize, size: usize) -> MemoryRange {
        MemoryRange { address, size }
    }

    #[test]
    fn adjacent_buffers_are_one_range() {
        let parts = [range(100, 10), range(110, 5), range(500, 0), range(115, 1), range(90, 10)];
        assert_eq!(merge_adjacent(&parts), [range(100, 16), range(90, 10)]);
        assert!(merge_adjacent(&[range(1, 0)]).is_empty());
        assert_eq!((total_size(&parts), total_size(&[range(1, usize::MAX), range(1, 1)])), (Some(26), None));
    }

    #[test]
    fn batches_stage_a_bounded_amount() {
        let half = MAX_STAGED / 2;
        assert_eq!(bounded_batches(&[half, half, 1, 0]), [0..2, 2..4]);
        assert_eq!(bounded_batches(&[MAX_STAGED + 1, 0, 5]), [0..1, 1..3]);
        assert_eq!(bounded_batches(&[0; 3000]).first(), Some(&(0..3000)));
        assert!(bounded_batches(&[]).is_empty());
    }
}
