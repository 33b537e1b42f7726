//! Memory at the addresses that direct I/O wants.

/// Addresses, lengths and offsets of direct I/O are multiples of this on every disk.
pub(crate) const ALIGN: usize = 4096;

/// Bytes at a multiple of [`ALIGN`].
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// `len` bytes, all zero.
    pub(crate) fn new(len: usize) -> Self {
        // Never grown, so that it stays where it is.
        let bytes = vec![0; len + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN);
        Self { bytes, start, len }
    }

    pub(crate) fn get(&self) -> &[u8] {
        self.bytes.get(self.start..self.start + self.len).unwrap_or_default()
    }

    pub(crate) fn get_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..self.start + self.len).unwrap_or_default()
    }
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
            let mut buffer = Buffer::new(len);
            assert_eq!(buffer.get().as_ptr().align_offset(ALIGN), 0);
            assert_eq!(buffer.get_mut().len(), len);
        }
    }
}
