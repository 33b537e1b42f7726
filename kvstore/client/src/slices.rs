//! Splits large objects into slices.

/// Maximum number of slices of one object, which bounds its concurrent transfers.
const MAX_SLICES: usize = 64;
/// Alignment of slices in bytes, so that no two slices share a page.
const PAGE: usize = 4096;

/// How many times longer the slices of a read from this host may be. Its bytes are copied by the cores of the client and the node, for
/// which transfers over several connections compete.
const LOCAL_READ_FACTOR: usize = 4;

/// Maximum length of the slices of a read. `is_local` if all replicas are on this host.
pub(crate) fn max_read_slice(max_length: usize, is_local: bool) -> usize {
    if is_local { max_length.saturating_mul(LOCAL_READ_FACTOR) } else { max_length }
}

/// Slice length for an object of `length` bytes: nearly equal slices, none longer than `max_length` unless that would be more
/// than [`MAX_SLICES`]. Never 0.
pub(crate) fn slice_length(length: usize, max_length: usize) -> usize {
    let count = length.div_ceil(max_length.max(1)).clamp(1, MAX_SLICES);
    length.div_ceil(count).next_multiple_of(PAGE).max(PAGE)
}

/// Cuts an object that is in several ranges of memory into slices of this length, the last one shorter. Each slice has its ranges.
pub(crate) fn cut<R: SplitRange>(ranges: impl IntoIterator<Item = R>, length: usize) -> Vec<Vec<R>> {
    let (mut slices, mut slice, mut missing) = (Vec::new(), Vec::new(), length.max(1));
    for mut range in ranges {
        while range.length() >= missing {
            let (first, rest) = range.split(missing);
            slice.push(first);
            slices.push(std::mem::take(&mut slice));
            (range, missing) = (rest, length.max(1));
        }
        if range.length() > 0 {
            missing -= range.length();
            slice.push(range);
        }
    }
    if !slice.is_empty() {
        slices.push(slice);
    }
    slices
}

/// A range of memory to read or to write.
pub(crate) trait SplitRange: Sized {
    fn length(&self) -> usize;
    /// The first `at` bytes, of at least so many, and the rest.
    fn split(self, at: usize) -> (Self, Self);
}

impl SplitRange for &[u8] {
    fn length(&self) -> usize {
        self.len()
    }

    fn split(self, at: usize) -> (Self, Self) {
        self.split_at(at)
    }
}

impl SplitRange for &mut [u8] {
    fn length(&self) -> usize {
        self.len()
    }

    fn split(self, at: usize) -> (Self, Self) {
        self.split_at_mut(at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_objects_have_one_slice_and_large_ones_equal_slices() {
        assert_eq!(slice_length(0, 1 << 20), PAGE);
        assert_eq!(slice_length(1 << 20, 1 << 20), 1 << 20);
        assert_eq!(slice_length((1 << 20) + 1, 1 << 20), 528_384);
        assert_eq!(slice_length(8192, 0), PAGE, "a slice size of 0 is treated as one page");
    }

    #[test]
    fn reads_from_this_host_have_longer_slices() {
        let slices = |length: usize, is_local| {
            length.div_ceil(slice_length(length, max_read_slice(4 << 20, is_local)))
        };
        assert_eq!((slices(16 << 20, true), slices(16 << 20, false)), (1, 4));
        assert_eq!((slices(64 << 20, true), slices(64 << 20, false)), (4, 16));
        assert_eq!(max_read_slice(usize::MAX, true), usize::MAX);
    }

    proptest! {
        #[test]
        fn slices_are_bounded(length in 0_usize..1 << 40, max_length in 0_usize..1 << 24) {
            let slice = slice_length(length, max_length);
            prop_assert!(slice > 0 && slice.is_multiple_of(PAGE));
            prop_assert!(length.div_ceil(slice) <= MAX_SLICES);
            // At most one page longer than `max_length`, except where the number of slices is limited.
            prop_assert!(slice < max_length + PAGE || slice <= length.div_ceil(MAX_SLICES) + PAGE || slice == PAGE);
        }

        #[test]
        fn cut_ranges_have_all_bytes_in_order(
            ranges in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9),
            length in 1_usize..12,
        ) {
            let slices = cut(ranges.iter().map(Vec::as_slice), length);
            let whole: Vec<Vec<u8>> = slices.iter().map(|slice| slice.concat()).collect();
            prop_assert_eq!(whole.concat(), ranges.concat());
            let full = |slice: &Vec<u8>| slice.len() == length;
            prop_assert!(whole.split_last().is_none_or(|(last, others)| others.iter().all(full) && last.len() <= length));
            prop_assert!(slices.iter().flatten().all(|range| !range.is_empty()));
        }
    }
}
