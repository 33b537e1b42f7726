//! The chunks of a request body, joined as they arrive, with their memory reserved.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::memory::{MemoryBudget, MemoryExhausted, MemoryReservation};

/// Initial capacity for a body in several chunks with a declared length. A client that declares more than it sends uses no more.
const FIRST_CAPACITY: usize = 256 << 10;

/// Chunks up to this size are copied when more is awaited. A connection's buffer is twice as large.
const SMALL_CHUNK: usize = 4 << 10;

/// An incomplete body. Memory is reserved for received bytes, not for the declared length.
pub(super) struct BodyBuffer {
    /// Declared length; 0 if there is none.
    declared: usize,
    /// The only chunk so far, not copied.
    first: Bytes,
    joined: BytesMut,
    reservation: MemoryReservation,
}

impl BodyBuffer {
    pub(super) fn new(declared: usize, reservation: MemoryReservation) -> Self {
        Self { declared, first: Bytes::new(), joined: BytesMut::new(), reservation }
    }

    pub(super) fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    pub(super) fn push(&mut self, chunk: Bytes, budget: &Arc<MemoryBudget>) -> Result<(), MemoryExhausted> {
        self.reservation.grow(chunk.len())?;
        let len = self.len();
        if len == 0 {
            self.first = chunk;
            return Ok(());
        }
        let needed = len + chunk.len();
        if self.joined.capacity() < needed {
            // Both buffers exist until the old one is copied.
            let _copying = budget.reserve(len)?;
            let mut larger = BytesMut::with_capacity(self.capacity(needed));
            larger.extend_from_slice(&std::mem::take(&mut self.first));
            larger.extend_from_slice(&self.joined);
            self.joined = larger;
        }
        self.joined.extend_from_slice(&chunk);
        Ok(())
    }

    /// Copies a small first chunk, so that the connection's buffer is freed while more is awaited.
    pub(super) fn detach(&mut self) {
        if !self.first.is_empty() && self.first.len() <= SMALL_CHUNK {
            let mut copy = BytesMut::with_capacity(2 * self.first.len());
            copy.extend_from_slice(&std::mem::take(&mut self.first));
            self.joined = copy;
        }
    }

    fn capacity(&self, needed: usize) -> usize {
        if self.declared < needed {
            return 2 * needed;
        }
        (4 * needed).max(FIRST_CAPACITY).min(self.declared)
    }

    pub(super) fn finish(self) -> Bytes {
        let bytes = if self.joined.is_empty() { self.first } else { self.joined.freeze() };
        if bytes.is_empty() { bytes } else { self.reservation.attach(bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn received_bytes_are_reserved_not_declared_ones() {
        let budget = MemoryBudget::new("--body-memory", 16 << 20);
        let mut buffer = BodyBuffer::new(26 << 20, budget.reserve(0).unwrap());
        let mut sent = Vec::new();
        for number in 0..40_u8 {
            let chunk = vec![number; 4096 * usize::from(number)];
            sent.extend_from_slice(&chunk);
            buffer.push(Bytes::from(chunk), &budget).unwrap();
            assert_eq!(budget.used(), sent.len() as u64);
        }
        let body = buffer.finish();
        assert_eq!(body, sent);
        assert_eq!(budget.used(), sent.len() as u64);
        drop(body);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_body_over_budget_releases_its_reservation() {
        let budget = MemoryBudget::new("--body-memory", 4 << 20);
        let mut buffer = BodyBuffer::new(0, budget.reserve(0).unwrap());
        let pushed = (0..100).take_while(|_| buffer.push(Bytes::from(vec![0; 64 << 10]), &budget).is_ok());
        assert!((16..48).contains(&pushed.count()));
        drop(buffer);
        assert_eq!(budget.used(), 0);
    }
}
