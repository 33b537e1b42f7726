//! Memory at the addresses that direct I/O wants.

use bytes::{Buf as _, BytesMut};

/// Addresses, lengths and offsets of direct I/O are multiples of this on every disk.
pub(crate) const ALIGN: usize = 4096;

/// Bytes at a multiple of [`ALIGN`]. Never grown, so that they stay where they are.
#[derive(Debug)]
pub(crate) struct AlignedBuffer(BytesMut);

impl AlignedBuffer {
    /// `len` bytes, all zero.
    pub(crate) fn new(len: usize) -> Self {
        Self(zeroed(len))
    }

    /// So many of `len` bytes each, a multiple of [`ALIGN`], in one piece of memory: allocators round sizes like these up.
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

/// `len` in whole units of direct I/O.
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
