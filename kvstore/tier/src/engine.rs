//! How pieces of the file are read and written: rings that threads take turns with, or threads.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;

use parking_lot::{Condvar, Mutex};

use crate::ring::Lane;
use crate::threads;

/// Rings, and so transfers at a time; others wait for one.
const MAX_LANES: usize = 16;
/// Buffers of a ring: half of them for the 32 operations that are under way, half for bytes that are looked at.
const BUFFERS: usize = 64;
/// Bytes of a ring's buffers, whatever a block has.
const LANE_BYTES: usize = 64 << 20;

/// A part of the file. Both numbers are multiples of what direct I/O wants.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// Buffers of a transfer: how many, and how large.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Depth {
    pub(crate) buffers: usize,
    pub(crate) bytes: usize,
}

/// What is done with the bytes of a transfer, in whichever order its pieces come.
pub(crate) trait Visit {
    /// Gives the bytes of a piece to be written.
    fn fill(&mut self, piece: usize, bytes: &mut [u8]);
    /// Takes the bytes of a piece that was read, or hears that it was written, or what went wrong.
    fn over(&mut self, piece: usize, outcome: io::Result<&[u8]>);
}

pub(crate) struct Engine {
    depth: Depth,
    kind: Kind,
}

enum Kind {
    Ring { lanes: Mutex<Lanes>, returned: Condvar },
    Threads,
}

#[derive(Default)]
struct Lanes {
    idle: Vec<Lane>,
    made: usize,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Engine").field("depth", &self.depth).field("io_uring", &self.is_ring()).finish()
    }
}

impl Engine {
    /// For pieces of at most `bytes` bytes.
    pub(crate) fn new(bytes: usize, io_uring: bool) -> Self {
        let depth = Depth { buffers: (LANE_BYTES / bytes.max(1)).clamp(2, BUFFERS), bytes };
        let ring = if io_uring {
            Lane::new(depth).map_err(|problem| problem.to_string())
        } else {
            Err("off".into())
        };
        let kind = match ring {
            Ok(lane) => Kind::Ring {
                lanes: Mutex::new(Lanes { idle: vec![lane], made: 1 }),
                returned: Condvar::new(),
            },
            Err(why) => {
                tracing::info!("the tier does without io_uring ({why}): it reads and writes with threads");
                Kind::Threads
            }
        };
        Self { depth, kind }
    }

    pub(crate) fn is_ring(&self) -> bool {
        matches!(self.kind, Kind::Ring { .. })
    }

    /// Transfers all pieces, and returns when each is over.
    ///
    /// # Errors
    /// When the means itself fails. What a piece comes to is told to `visit`.
    pub(crate) fn transfer(
        &self,
        file: &File,
        direction: Direction,
        pieces: &[Piece],
        visit: &mut dyn Visit,
    ) -> io::Result<()> {
        match &self.kind {
            Kind::Threads => {
                threads::transfer(file, direction, pieces, self.depth, visit);
                Ok(())
            }
            Kind::Ring { lanes, returned } => {
                let turn = Turn { lanes, returned };
                // Not dropped by an error or a panic: the kernel may still have its buffers.
                let mut lane = ManuallyDrop::new(turn.take(self.depth)?);
                lane.transfer(file, direction, pieces, visit)?;
                turn.give_back(ManuallyDrop::into_inner(lane));
                Ok(())
            }
        }
    }
}

/// A thread's turn with a lane. If it ends without giving the lane back, another may be made in its place.
struct Turn<'a> {
    lanes: &'a Mutex<Lanes>,
    returned: &'a Condvar,
}

impl Turn<'_> {
    fn take(&self, depth: Depth) -> io::Result<Lane> {
        let mut lanes = self.lanes.lock();
        loop {
            if let Some(lane) = lanes.idle.pop() {
                return Ok(lane);
            }
            if lanes.made < MAX_LANES {
                lanes.made += 1;
                drop(lanes);
                return Lane::new(depth);
            }
            self.returned.wait(&mut lanes);
        }
    }

    fn give_back(&self, lane: Lane) {
        let mut lanes = self.lanes.lock();
        lanes.idle.push(lane);
        // Made good by the end of the turn.
        lanes.made += 1;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.lanes.lock().made -= 1;
        self.returned.notify_one();
    }
}
