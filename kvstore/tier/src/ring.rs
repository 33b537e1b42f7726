//! Reads and writes with io_uring: some operations run while the bytes of others are processed.
#![expect(unsafe_code, reason = "passes addresses of buffers to the kernel, which accesses them later")]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::thread;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use crate::buffer::AlignedBuffer;
use crate::io_chunk::{IoChunk, IoDirection, IoVisitor};

/// Maximum number of operations in flight: a longer queue does not make disks faster.
const QUEUE_DEPTH: usize = 32;

/// Poll interval for completions while the ring cannot be waited on.
const DRAIN_POLL: Duration = Duration::from_millis(2);

/// A ring, and during a transfer the buffers of its operations.
///
/// After a transfer that failed or panicked, the kernel may still use some buffers until [`IoRing::drain`] succeeds. A ring that is dropped
/// before that leaks its buffers.
pub(crate) struct IoRing {
    ring: IoUring,
    pub(crate) buffers: Vec<AlignedBuffer>,
    /// The operation in flight of each buffer.
    ops: Vec<Option<RingOperation>>,
}

/// What a transfer reads or writes.
#[derive(Clone, Copy)]
struct RingTransfer<'a> {
    file: &'a File,
    direction: IoDirection,
    chunks: &'a [IoChunk],
}

#[derive(Clone, Copy)]
struct RingOperation {
    chunk: usize,
    /// Number of bytes transferred so far.
    done: usize,
}

impl IoRing {
    /// Creates a ring for at most `buffers` buffers.
    ///
    /// # Errors
    /// When io_uring is not available or not permitted.
    pub(crate) fn new(buffers: usize) -> io::Result<Self> {
        let ring = IoUring::new(u32::try_from(buffers).unwrap_or(u32::MAX).next_power_of_two())?;
        Ok(Self { ring, buffers: Vec::new(), ops: Vec::new() })
    }

    /// Transfers all chunks. Each is passed to `visit` before its write, or after its completion.
    ///
    /// # Errors
    /// When the ring itself fails; then it must be drained before its buffers are reused. Errors of single chunks are passed to `visit`.
    pub(crate) fn transfer(
        &mut self,
        file: &File,
        direction: IoDirection,
        chunks: &[IoChunk],
        visit: &mut dyn IoVisitor,
    ) -> io::Result<()> {
        let transfer = RingTransfer { file, direction, chunks };
        let buffers = self.buffers.len();
        // With fewer buffers than chunks, half of the buffers hold bytes that are being processed.
        let max_in_flight =
            if buffers < chunks.len() { buffers.div_ceil(2) } else { buffers }.min(QUEUE_DEPTH);
        let mut free: Vec<usize> = (0..buffers).collect();
        self.ops.clear();
        self.ops.resize(buffers, None);
        let mut completed = VecDeque::new();
        let (mut next, mut in_flight) = (0, 0);
        loop {
            // Submit first, so that the disk works while completed bytes are processed.
            while next < chunks.len()
                && in_flight < max_in_flight
                && let Some(slot) = free.pop()
            {
                if direction == IoDirection::Write
                    && let (Some(buffer), Some(chunk)) = (self.buffers.get_mut(slot), chunks.get(next))
                {
                    visit.fill(next, buffer.get_mut().get_mut(..chunk.len).unwrap_or_default());
                }
                self.push(transfer, slot, RingOperation { chunk: next, done: 0 })?;
                submit(&mut self.ring, CompletionWait::No)?;
                next += 1;
                in_flight += 1;
            }
            if in_flight > 0 && completed.is_empty() {
                submit(&mut self.ring, CompletionWait::ForOne)?;
            }
            let mut results = Vec::new();
            for entry in self.ring.completion() {
                let slot = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
                results.push((slot, self.ops.get_mut(slot).and_then(Option::take), entry.result()));
            }
            for (slot, op, result) in results {
                let Some(op) = op else {
                    return Err(io::Error::other("io_uring reported an unknown completion"));
                };
                let len = chunks.get(op.chunk).map_or(0, |chunk| chunk.len);
                match advance(op, result, len) {
                    RingOperationResult::Partial(op) => self.push(transfer, slot, op)?,
                    RingOperationResult::Complete(outcome) => {
                        in_flight -= 1;
                        completed.push_back((slot, op.chunk, len, outcome));
                    }
                }
            }
            match completed.pop_front() {
                Some((slot, chunk, len, outcome)) => {
                    let buffer = self.buffers.get(slot).map(AlignedBuffer::get).unwrap_or_default();
                    visit.complete(chunk, outcome.map(|()| buffer.get(..len).unwrap_or_default()));
                    free.push(slot);
                }
                None if in_flight == 0 && next >= chunks.len() => return Ok(()),
                None => {}
            }
        }
    }

    /// After a transfer that failed or panicked: waits until the kernel uses no buffer of this ring. While the ring cannot be waited on,
    /// completions are polled for at most `limit`, since the kernel may still report them.
    ///
    /// # Errors
    /// Why the ring cannot be waited on. The kernel may still use the buffers; a later call may succeed.
    pub(crate) fn drain(&mut self, limit: Duration) -> io::Result<()> {
        let mut deadline = None;
        while !self.is_idle() {
            let Err(problem) = submit(&mut self.ring, CompletionWait::ForOne) else { continue };
            if Instant::now() >= *deadline.get_or_insert_with(|| Instant::now() + limit) {
                return if self.is_idle() { Ok(()) } else { Err(problem) };
            }
            thread::sleep(DRAIN_POLL);
        }
        Ok(())
    }

    /// Processes completions; returns whether the kernel uses no buffer any more. Operations that were queued but never submitted do not
    /// count, so the ring must not be used for another transfer.
    pub(crate) fn is_idle(&mut self) -> bool {
        for entry in self.ring.completion() {
            if let Some(op) = usize::try_from(entry.user_data()).ok().and_then(|slot| self.ops.get_mut(slot))
            {
                *op = None;
            }
        }
        self.ops.iter().flatten().count() <= self.ring.submission().len()
    }

    /// Queues the rest of a chunk, which the next wait submits.
    fn push(&mut self, transfer: RingTransfer<'_>, slot: usize, op: RingOperation) -> io::Result<()> {
        let RingTransfer { file, direction, chunks } = transfer;
        let (Some(chunk), Some(buffer), Some(entry)) =
            (chunks.get(op.chunk), self.buffers.get_mut(slot), self.ops.get_mut(slot))
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let rest = buffer.get_mut().get_mut(op.done..chunk.len).ok_or(io::ErrorKind::InvalidInput)?;
        let (fd, offset) = (types::Fd(file.as_raw_fd()), chunk.offset + op.done as u64);
        let (address, len) = (rest.as_mut_ptr(), u32::try_from(rest.len()).unwrap_or(u32::MAX));
        let operation = match direction {
            IoDirection::Read => opcode::Read::new(fd, address, len).offset(offset).build(),
            IoDirection::Write => opcode::Write::new(fd, address, len).offset(offset).build(),
        };
        // SAFETY: `rest` is in a buffer of this ring that is not accessed until its operation has ended: `ops` reserves the slot until
        // then. If the transfer ends earlier (an error, a panic in `visit`), the ring keeps the buffer until `drain` or `is_idle` has seen
        // the completions, and leaks it if dropped earlier. The file stays open until the operation is submitted, which happens during this
        // transfer, while its caller drains the ring, or never.
        unsafe { self.ring.submission().push(&operation.user_data(slot as u64)) }
            .map_err(io::Error::other)?;
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
    /// Only a part was transferred.
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
        Ok(bytes) if op.done + bytes < len => {
            RingOperationResult::Partial(RingOperation { done: op.done + bytes, ..op })
        }
        Ok(_) => RingOperationResult::Complete(Ok(())),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CompletionWait {
    No,
    /// Until one operation has completed.
    ForOne,
}

fn submit(ring: &mut IoUring, wait: CompletionWait) -> io::Result<()> {
    #[cfg(test)]
    faults::next()?;
    loop {
        match ring.submit_and_wait(usize::from(wait == CompletionWait::ForOne)) {
            Ok(_) => return Ok(()),
            Err(problem) if problem.kind() == io::ErrorKind::Interrupted => {}
            // The completion queue must be emptied first.
            Err(problem) if problem.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => {
                return Ok(());
            }
            Err(problem) => return Err(problem),
        }
    }
}

/// Injects submission failures that do not reach the kernel, per thread.
#[cfg(test)]
pub(crate) mod faults {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static PLAN: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
    }

    /// After `successes` submissions, the next `failures` fail.
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
