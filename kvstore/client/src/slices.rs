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
    }
}
