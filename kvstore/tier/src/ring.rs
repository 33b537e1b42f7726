//! Reads and writes through io_uring: while some operations are under way, the bytes of others are looked at.
#![expect(unsafe_code, reason = "the kernel is given addresses of buffers that it reads and writes later")]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::thread;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use crate::buffer::AlignedBuffer;
use crate::engine::{IoChunk, IoDirection, IoVisitor};

/// Operations under way at a time: a queue that is longer makes no disk quicker.
const QUEUE_DEPTH: usize = 32;

/// Pause between looking for completions while the ring refuses to be waited on.
const DRAIN_POLL: Duration = Duration::from_millis(2);

/// A ring, and during a transfer the buffers that its operations use.
///
/// After a transfer that failed or panicked the kernel may still use some of the buffers, until [`IoRing::drain`] has succeeded. A lane
/// that is dropped before that leaks its buffers.
pub(crate) struct IoRing {
    ring: IoUring,
    pub(crate) buffers: Vec<AlignedBuffer>,
    /// For each buffer, the operation that was queued and has not been reported complete.
    ops: Vec<Option<RingOperation>>,
}

/// What a buffer is used for.
#[derive(Clone, Copy)]
struct RingOperation {
    piece: usize,
    /// Bytes transferred so far.
    done: usize,
}

impl IoRing {
    /// For at most so many buffers.
    ///
    /// # Errors
    /// When io_uring is not there, or not permitted.
    pub(crate) fn new(buffers: usize) -> io::Result<Self> {
        let ring = IoUring::new(u32::try_from(buffers).unwrap_or(u32::MAX).next_power_of_two())?;
        Ok(Self { ring, buffers: Vec::new(), ops: Vec::new() })
    }

    /// Transfers all pieces. Each has its turn with `visit`: before it is written, or when it is over.
    ///
    /// # Errors
    /// When the ring itself fails; then the lane must be drained before its buffers are used again. What becomes of a piece is reported
    /// to `visit`.
    pub(crate) fn transfer(
        &mut self,
        file: &File,
        direction: IoDirection,
        pieces: &[IoChunk],
        visit: &mut dyn IoVisitor,
    ) -> io::Result<()> {
        let buffers = self.buffers.len();
        // Where there is not a buffer for each piece, half of them are for bytes that are looked at.
        let at_once = if buffers < pieces.len() { buffers.div_ceil(2) } else { buffers }.min(QUEUE_DEPTH);
        let mut free: Vec<usize> = (0..buffers).collect();
        self.ops.clear();
        self.ops.resize(buffers, None);
        let mut over = VecDeque::new();
        let (mut next, mut under_way) = (0, 0);
        loop {
            // The disk first: it works while the bytes that have come are looked at.
            while next < pieces.len()
                && under_way < at_once
                && let Some(slot) = free.pop()
            {
                if direction == IoDirection::Write
                    && let (Some(buffer), Some(piece)) = (self.buffers.get_mut(slot), pieces.get(next))
                {
                    visit.fill(next, buffer.get_mut().get_mut(..piece.len).unwrap_or_default());
                }
                self.push(file, direction, pieces, slot, RingOperation { piece: next, done: 0 })?;
                submit(&mut self.ring, CompletionWait::No)?;
                next += 1;
                under_way += 1;
            }
            if under_way > 0 && over.is_empty() {
                submit(&mut self.ring, CompletionWait::ForOne)?;
            }
            let mut ended = Vec::new();
            for entry in self.ring.completion() {
                let slot = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
                ended.push((slot, self.ops.get_mut(slot).and_then(Option::take), entry.result()));
            }
            for (slot, op, result) in ended {
                let Some(op) = op else {
                    return Err(io::Error::other("io_uring answered what was not asked"));
                };
                let len = pieces.get(op.piece).map_or(0, |piece| piece.len);
                match advance(op, result, len) {
                    RingOperationResult::Partial(op) => self.push(file, direction, pieces, slot, op)?,
                    RingOperationResult::Complete(outcome) => {
                        under_way -= 1;
                        over.push_back((slot, op.piece, len, outcome));
                    }
                }
            }
            match over.pop_front() {
                Some((slot, piece, len, outcome)) => {
                    let buffer = self.buffers.get(slot).map(AlignedBuffer::get).unwrap_or_default();
                    visit.complete(piece, outcome.map(|()| buffer.get(..len).unwrap_or_default()));
                    free.push(slot);
                }
                None if under_way == 0 && next >= pieces.len() => return Ok(()),
                None => {}
            }
        }
    }

    /// After a transfer that failed or panicked: waits until the kernel uses no buffer of this lane any more. While the ring refuses to
    /// be waited on, completions are polled for at most `limit`: the kernel may report them all the same.
    ///
    /// # Errors
    /// Why the ring cannot be waited on. The kernel may still use the buffers; another call may find that it no longer does.
    pub(crate) fn drain(&mut self, limit: Duration) -> io::Result<()> {
        let mut until = None;
        while !self.is_idle() {
            let Err(problem) = submit(&mut self.ring, CompletionWait::ForOne) else { continue };
            if Instant::now() >= *until.get_or_insert_with(|| Instant::now() + limit) {
                return if self.is_idle() { Ok(()) } else { Err(problem) };
            }
            thread::sleep(DRAIN_POLL);
        }
        Ok(())
    }

    /// Takes the completions that have come, and returns whether the kernel uses no buffer any more. Operations that were queued and
    /// never submitted do not count, so the ring must not be used for another transfer.
    pub(crate) fn is_idle(&mut self) -> bool {
        for entry in self.ring.completion() {
            if let Some(op) = usize::try_from(entry.user_data()).ok().and_then(|slot| self.ops.get_mut(slot))
            {
                *op = None;
            }
        }
        self.ops.iter().flatten().count() <= self.ring.submission().len()
    }

    /// Queues what is left of a piece. It is submitted by the next wait.
    fn push(
        &mut self,
        file: &File,
        direction: IoDirection,
        pieces: &[IoChunk],
        slot: usize,
        op: RingOperation,
    ) -> io::Result<()> {
        let (Some(piece), Some(buffer), Some(entry)) =
            (pieces.get(op.piece), self.buffers.get_mut(slot), self.ops.get_mut(slot))
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let rest = buffer.get_mut().get_mut(op.done..piece.len).ok_or(io::ErrorKind::InvalidInput)?;
        let (fd, offset) = (types::Fd(file.as_raw_fd()), piece.offset + op.done as u64);
        let (address, len) = (rest.as_mut_ptr(), u32::try_from(rest.len()).unwrap_or(u32::MAX));
        let asked = match direction {
            IoDirection::Read => opcode::Read::new(fd, address, len).offset(offset).build(),
            IoDirection::Write => opcode::Write::new(fd, address, len).offset(offset).build(),
        };
        // SAFETY: `rest` lies in a buffer of this lane and is touched by nobody until its operation has ended: `ops` holds the slot
        // until then. Should the transfer end before (an error, a panic in `visit`), the lane keeps the buffer until `drain` or
        // `is_settled` has seen the completions, and leaks it if it is dropped earlier. The file is open until the operation is
        // submitted, which is within this transfer, or while its caller drains the lane, or never.
        unsafe { self.ring.submission().push(&asked.user_data(slot as u64)) }.map_err(io::Error::other)?;
        *entry = Some(op);
        Ok(())
    }
}

impl Drop for IoRing {
    fn drop(&mut self) {
        if !self.is_idle() {
            std::mem::forget(std::mem::take(&mut self.buffers));
        }
    }
}

enum RingOperationResult {
    /// Not all was transferred.
    Partial(RingOperation),
    Complete(io::Result<()>),
}

fn advance(op: RingOperation, result: i32, len: usize) -> RingOperationResult {
    match usize::try_from(result) {
        Err(_) => {
            let problem = io::Error::from_raw_os_error(-result);
            match problem.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => RingOperationResult::Partial(op),
                _ => RingOperationResult::Complete(Err(problem)),
            }
        }
        Ok(0) => RingOperationResult::Complete(Err(io::ErrorKind::UnexpectedEof.into())),
        Ok(more) if op.done + more < len => {
            RingOperationResult::Partial(RingOperation { done: op.done + more, ..op })
        }
        Ok(_) => RingOperationResult::Complete(Ok(())),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CompletionWait {
    No,
    /// Until an operation has ended.
    ForOne,
}

/// Submits what is queued.
fn submit(ring: &mut IoUring, wait: CompletionWait) -> io::Result<()> {
    #[cfg(test)]
    faults::next()?;
    loop {
        match ring.submit_and_wait(usize::from(wait == CompletionWait::ForOne)) {
            Ok(_) => return Ok(()),
            Err(problem) if problem.kind() == io::ErrorKind::Interrupted => {}
            // The kernel wants its answers taken first.
            Err(problem) if problem.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => {
                return Ok(());
            }
            Err(problem) => return Err(problem),
        }
    }
}

/// Submissions of the current thread that fail without reaching the kernel.
#[cfg(test)]
pub(crate) mod faults {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static PLAN: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
    }

    /// After `successes` submissions, `failures` of them fail.
    pub(crate) fn plan(successes: usize, failures: usize) {
        PLAN.set((successes, failures));
    }

    pub(super) fn next() -> io::Result<()> {
        match PLAN.get() {
            (0, 0) => Ok(()),
            (0, failures) => {
                PLAN.set((0, failures - 1));
                Err(rustix::io::Errno::NXIO.into())
            }
            (successes, failures) => {
                PLAN.set((successes - 1, failures));
                Ok(())
            }
        }
    }
}
