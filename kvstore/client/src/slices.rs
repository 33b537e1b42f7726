//! Splits large objects into slices.

/// Maximum number of slices of one object, which bounds its concurrent transfers.
const MAX_SLICES: usize = 64;
/// Alignment of slices in bytes, so that no two slices share a page.
const PAGE: usize = 4096;

/// Slice length for an object of `length` bytes: nearly equal slices, none longer than `max_length` unless that would be more
/// than [`MAX_SLICES`]. Never 0.
pub(crate) fn slice_length(length: usize, max_length: usize) -> usize {
    let count = length.div_ceil(max_length.max(1)).clamp(1, MAX_SLICES);
    length.div_ceil(count).next_multiple_of(PAGE).max(PAGE)
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

    proptest! {
        #[test]
        fn slices_are_bounded(length in 0_usize..1 << 40, max_length in 0_usize..1 << 24) {
            let slice = slice_length(length, max_length);
            prop_assert!(slice > 0 && slice.is_multiple_of(PAGE));
            prop_assert!(length.div_ceil(slice) <= MAX_SLICES);
            // At most one page longer than `max_length`, except where the number of slices is limited.
            prop_assert!(slice < max_length + PAGE || slice <= length.div_ceil(MAX_SLICES) + PAGE || slice == PAGE);
        }
    }
}
