//! The pieces of a request body, joined as they arrive, with their memory reserved.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::memory::{MemoryBudget, MemoryExhausted, MemoryReservation};

/// First capacity of a body in several pieces whose length is declared. A client that declares more than it sends costs no more.
const FIRST_CAPACITY: usize = 256 << 10;

/// Pieces up to this size are copied when more is awaited. A connection's buffer has twice as much.
const SMALL_PIECE: usize = 4 << 10;

/// A body that is not complete. What has arrived is counted, not what is declared.
pub(super) struct BodyBuffer {
    /// Declared length; 0 if none is.
    declared: usize,
    /// The only piece so far, as it came.
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

    pub(super) fn push(&mut self, piece: Bytes, budget: &Arc<MemoryBudget>) -> Result<(), MemoryExhausted> {
        self.reservation.grow(piece.len())?;
        let len = self.len();
        if len == 0 {
            self.first = piece;
            return Ok(());
        }
        let needed = len + piece.len();
        if self.joined.capacity() < needed {
            // Both are there until the old one is copied.
            let _copying = budget.reserve(len)?;
            let mut larger = BytesMut::with_capacity(self.capacity(needed));
            larger.extend_from_slice(&std::mem::take(&mut self.first));
            larger.extend_from_slice(&self.joined);
            self.joined = larger;
        }
        self.joined.extend_from_slice(&piece);
        Ok(())
    }

    /// Copies a small first piece, so that the buffer that it was read into is freed while more is awaited.
    pub(super) fn detach(&mut self) {
        if !self.first.is_empty() && self.first.len() <= SMALL_PIECE {
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
    fn what_arrives_is_counted_and_what_is_declared_is_not() {
        let budget = MemoryBudget::new("--body-memory", 16 << 20);
        let mut buffer = BodyBuffer::new(26 << 20, budget.reserve(0).unwrap());
        let mut sent = Vec::new();
        for number in 0..40_u8 {
            let piece = vec![number; 4096 * usize::from(number)];
            sent.extend_from_slice(&piece);
            buffer.push(Bytes::from(piece), &budget).unwrap();
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
