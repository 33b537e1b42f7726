//! Rings and buffers that threads take turns with.
//!
//! All buffers are there from the beginning, and transfers share them. Were they each ring's own, or made as they are needed, a tier
//! would come to hold the memory of its busiest moment, spread over the heaps of all threads that ever used it.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;

use parking_lot::{Condvar, Mutex};

use crate::buffer::Buffer;
use crate::engine::{Direction, Piece, Visit};
use crate::ring::Lane;

/// Transfers at a time; others wait for one.
const MAX_TRANSFERS: usize = 16;
/// Buffers of all transfers.
const BUFFERS: usize = 128;
/// Their bytes at most, whatever a block has.
const MAX_BYTES: usize = 64 << 20;
/// Buffers of one transfer at most.
const MAX_BUFFERS: usize = 64;

/// Rings and buffers.
pub(crate) struct Lanes {
    free: Mutex<Free>,
    returned: Condvar,
    /// Of a buffer.
    bytes: usize,
}

struct Free {
    /// Made when they are needed, since they are small.
    lanes: Vec<Lane>,
    buffers: Vec<Buffer>,
    transfers: usize,
}

impl Lanes {
    /// With buffers of `bytes` bytes.
    ///
    /// # Errors
    /// When io_uring is not there, or not permitted.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let count = (MAX_BYTES / bytes.max(1)).clamp(2, BUFFERS);
        let lanes = vec![Lane::new(MAX_BUFFERS)?];
        let buffers = Buffer::several(count, bytes);
        Ok(Self { free: Mutex::new(Free { lanes, buffers, transfers: 0 }), returned: Condvar::new(), bytes })
    }

    /// Transfers all pieces, and returns when each is over.
    ///
    /// # Errors
    /// When a ring fails. What a piece comes to is told to `visit`.
    pub(crate) fn transfer(
        &self,
        file: &File,
        direction: Direction,
        pieces: &[Piece],
        visit: &mut dyn Visit,
    ) -> io::Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        let (turn, lane, mut buffers) = self.take(pieces.len());
        // Not dropped by an error or a panic: the kernel may still have the buffers.
        let mut lane = ManuallyDrop::new(lane.map_or_else(|| Lane::new(MAX_BUFFERS), Ok)?);
        lane.buffers.append(&mut buffers);
        lane.transfer(file, direction, pieces, visit)?;
        turn.give_back(ManuallyDrop::into_inner(lane));
        Ok(())
    }

    /// A turn, a ring if one is free, and buffers for so many pieces: at most half of the free ones, so that the next transfer, which
    /// may be of few pieces, does not wait for this one.
    fn take(&self, pieces: usize) -> (Turn<'_>, Option<Lane>, Vec<Buffer>) {
        let mut free = self.free.lock();
        while free.transfers >= MAX_TRANSFERS || free.buffers.is_empty() {
            self.returned.wait(&mut free);
        }
        free.transfers += 1;
        let left = free.buffers.len();
        let taken = pieces.min(MAX_BUFFERS).min(left.div_ceil(2));
        let buffers = free.buffers.split_off(left - taken);
        (Turn { lanes: self, missing: taken }, free.lanes.pop(), buffers)
    }
}

/// A transfer's turn. If it ends without giving ring and buffers back, there are others in their place.
struct Turn<'a> {
    lanes: &'a Lanes,
    /// Buffers that it has.
    missing: usize,
}

impl Turn<'_> {
    fn give_back(mut self, mut lane: Lane) {
        let mut free = self.lanes.free.lock();
        free.buffers.append(&mut lane.buffers);
        free.lanes.push(lane);
        self.missing = 0;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let others: Vec<Buffer> = (0..self.missing).map(|_| Buffer::new(self.lanes.bytes)).collect();
        let mut free = self.lanes.free.lock();
        free.buffers.extend(others);
        free.transfers -= 1;
        // A transfer may return buffers for several.
        self.lanes.returned.notify_all();
    }
}
