//! How a large object is cut.

/// The largest number of slices of one object, so that an object of any size has a bounded number of transfers
/// under way.
const MAX_SLICES: usize = 64;
/// Slices begin at multiples of this, so that no two of them share a page.
const PAGE: usize = 4096;

/// Into slices of which length to cut `length` bytes, so that they are nearly equal and none is longer than
/// `longest`, unless that would be more than 64 slices. Never 0.
pub(crate) fn slice_length(length: usize, longest: usize) -> usize {
    let count = length.div_ceil(longest.max(1)).clamp(1, MAX_SLICES);
    length.div_ceil(count).next_multiple_of(PAGE).max(PAGE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_objects_stay_whole_and_large_ones_are_cut_evenly() {
        assert_eq!(slice_length(0, 1 << 20), PAGE);
        assert_eq!(slice_length(1 << 20, 1 << 20), 1 << 20);
        assert_eq!(slice_length((1 << 20) + 1, 1 << 20), 528_384);
        assert_eq!(slice_length(8192, 0), PAGE, "a senseless setting is harmless");
    }

    proptest! {
        #[test]
        fn slices_are_bounded(length in 0_usize..1 << 40, longest in 0_usize..1 << 24) {
            let slice = slice_length(length, longest);
            prop_assert!(slice > 0 && slice.is_multiple_of(PAGE));
            prop_assert!(length.div_ceil(slice) <= MAX_SLICES);
            // Never much longer than asked for, except where there would be too many.
            prop_assert!(slice < longest + PAGE || slice <= length.div_ceil(MAX_SLICES) + PAGE || slice == PAGE);
        }
    }
}
