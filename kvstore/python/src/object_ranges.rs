//! The ranges of memory that an object is in.

use crate::registered_memory::MemoryRange;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_buffers_are_one_range() {
        let range = |address, size| MemoryRange { address, size };
        let parts = [range(100, 10), range(110, 5), range(500, 0), range(115, 1), range(90, 10)];
        assert_eq!(merge_adjacent(&parts), [range(100, 16), range(90, 10)]);
        assert!(merge_adjacent(&[range(1, 0)]).is_empty());
        assert_eq!((total_size(&parts), total_size(&[range(1, usize::MAX), range(1, 1)])), (Some(26), None));
    }
}
