//! Buffers aligned for direct I/O.

use bytes::{Buf as _, BytesMut};

/// Alignment of addresses, lengths and offsets of direct I/O that every disk accepts.
pub(crate) const ALIGN: usize = 4096;

/// A buffer aligned to [`ALIGN`]. It never grows, so its address is stable.
#[derive(Debug)]
pub(crate) struct AlignedBuffer(BytesMut);

impl AlignedBuffer {
    /// Allocates `len` bytes, all zero.
    pub(crate) fn new(len: usize) -> Self {
        Self(zeroed(len))
    }

    /// Allocates `count` buffers of `len` bytes each, a multiple of [`ALIGN`], in one allocation: allocators round up sizes like these.
    pub(crate) fn allocate(count: usize, len: usize) -> Vec<Self> {
        let mut all = zeroed(count * len);
        (0..count).map(|_| Self(all.split_to(len))).collect()
    }

    pub(crate) fn get(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn get_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

fn zeroed(len: usize) -> BytesMut {
    let mut bytes = BytesMut::zeroed(len + ALIGN);
    bytes.advance(bytes.as_ptr().align_offset(ALIGN));
    bytes.truncate(len);
    bytes
}

/// Rounds `len` up to whole units of direct I/O.
pub(crate) fn aligned(len: u64) -> u64 {
    len.next_multiple_of(ALIGN as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_whole_and_aligned() {
        for len in [ALIGN, 3 * ALIGN, 1 << 20] {
            let mut buffer = AlignedBuffer::new(len);
            assert_eq!(buffer.get().as_ptr().align_offset(ALIGN), 0);
            assert_eq!(buffer.get_mut().len(), len);
            for mut buffer in AlignedBuffer::allocate(3, len) {
                assert_eq!(buffer.get().as_ptr().align_offset(ALIGN), 0);
                assert_eq!(buffer.get_mut().len(), len);
            }
        }
    }
}
