//! A pool of rings and buffers, leased to one transfer at a time.
//!
//! All buffers are allocated at the start and shared by all transfers. With buffers per ring, or allocated on demand, a tier would keep the
//! memory of its peak load, spread over the heaps of all threads that ever used it.

use std::fs::File;
use std::io;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::buffer::AlignedBuffer;
use crate::io_chunk::{IoChunk, IoDirection, IoVisitor};
use crate::ring::IoRing;

/// Maximum number of concurrent transfers; others wait.
const MAX_TRANSFERS: usize = 16;
/// Number of buffers in the pool.
const BUFFERS: usize = 128;
/// Maximum total bytes of the buffers, for any block size.
const MAX_BYTES: usize = 64 << 20;
/// Maximum number of buffers per transfer.
const MAX_BUFFERS: usize = 64;
/// How long completions are polled when the ring of a failed transfer cannot be waited on. Disks complete sooner, or report an error after
/// about this time.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Pool of rings and buffers.
pub(crate) struct IoRingPool {
    free: Mutex<IoRingPoolState>,
    returned: Condvar,
    drain_limit: Duration,
}

struct IoRingPoolState {
    /// Idle rings, created on demand, since they are small.
    rings: Vec<IoRing>,
    buffers: Vec<AlignedBuffer>,
    transfers: usize,
    /// Rings of failed transfers with buffers that the kernel may still use. Each has at least one buffer, and buffers are never replaced,
    /// so there are at most [`BUFFERS`]. They are checked again at the start of each transfer.
    quarantined: Vec<IoRing>,
}

impl IoRingPoolState {
    /// Recovers the buffers of quarantined rings whose operations have completed.
    fn recover(&mut self) {
        let Self { buffers, quarantined, .. } = self;
        quarantined.retain_mut(|ring| {
            let is_idle = ring.is_idle();
            if is_idle {
                tracing::warn!(
                    "io_uring operations completed late: recovered {} buffers",
                    ring.buffers.len()
                );
                buffers.append(&mut ring.buffers);
            }
            !is_idle
        });
    }
}

/// A transfer failed with operations still in flight: the kernel may write to the file later.
#[derive(Debug, thiserror::Error)]
#[error("{0}; operations of the transfer are still in flight")]
struct InFlightIoError(io::Error);

/// Whether blocks of the failed transfer may still be written.
pub(crate) fn has_in_flight_io(problem: &io::Error) -> bool {
    problem.get_ref().is_some_and(|cause| cause.is::<InFlightIoError>())
}

impl IoRingPool {
    /// Creates a pool with buffers of `bytes` bytes.
    ///
    /// # Errors
    /// When io_uring is not available or not permitted.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let count = (MAX_BYTES / bytes.max(1)).clamp(2, BUFFERS);
        let rings = vec![IoRing::new(MAX_BUFFERS)?];
        let buffers = AlignedBuffer::allocate(count, bytes);
        let free = IoRingPoolState { rings, buffers, transfers: 0, quarantined: Vec::new() };
        Ok(Self { free: Mutex::new(free), returned: Condvar::new(), drain_limit: DRAIN_LIMIT })
    }

    /// Transfers all chunks; returns when all have completed.
    ///
    /// # Errors
    /// When a ring fails, or all buffers are quarantined. Errors of single chunks are passed to `visit`.
    pub(crate) fn transfer(
        &self,
        file: &File,
        direction: IoDirection,
        chunks: &[IoChunk],
        visit: &mut dyn IoVisitor,
    ) -> io::Result<()> {
        if chunks.is_empty() {
            return Ok(());
        }
        let mut lease = self.acquire(chunks.len())?;
        let outcome = lease.ring()?.transfer(file, direction, chunks, visit);
        match outcome {
            Ok(()) => lease.release(),
            Err(problem) if lease.drain_or_quarantine() => return Err(problem),
            Err(problem) => return Err(io::Error::new(problem.kind(), InFlightIoError(problem))),
        }
        Ok(())
    }

    pub(crate) fn quarantined(&self) -> usize {
        self.free.lock().quarantined.iter().map(|ring| ring.buffers.len()).sum()
    }

    /// Leases an idle ring, if any, and buffers for `chunks` chunks: at most half of the free buffers, so that a short transfer does not
    /// wait for this one.
    fn acquire(&self, chunks: usize) -> io::Result<IoRingLease<'_>> {
        let mut free = self.free.lock();
        loop {
            free.recover();
            if free.transfers < MAX_TRANSFERS && !free.buffers.is_empty() {
                break;
            }
            if free.transfers == 0 {
                return Err(io::Error::other(
                    "all buffers have io_uring operations that do not complete; restart this process",
                ));
            }
            self.returned.wait(&mut free);
        }
        free.transfers += 1;
        let available = free.buffers.len();
        let count = chunks.min(MAX_BUFFERS).min(available.div_ceil(2));
        let buffers = free.buffers.split_off(available - count);
        Ok(IoRingLease { pool: self, ring: free.rings.pop(), buffers })
    }
}

/// Lease of one transfer. Ring and buffers are returned on drop; those that the kernel may still use are quarantined.
struct IoRingLease<'a> {
    pool: &'a IoRingPool,
    ring: Option<IoRing>,
    /// Buffers that are not with the ring.
    buffers: Vec<AlignedBuffer>,
}

impl IoRingLease<'_> {
    /// Returns the ring with the buffers, creating it if needed.
    fn ring(&mut self) -> io::Result<&mut IoRing> {
        let mut ring = self.ring.take().map_or_else(|| IoRing::new(MAX_BUFFERS), Ok)?;
        ring.buffers.append(&mut self.buffers);
        Ok(self.ring.insert(ring))
    }

    /// Returns the ring after a successful transfer.
    fn release(mut self) {
        let Some(mut ring) = self.ring.take() else { return };
        self.buffers.append(&mut ring.buffers);
        self.pool.free.lock().rings.push(ring);
    }

    /// After a failed transfer: waits until the kernel uses no buffer, then closes the ring. Returns false if the ring was quarantined
    /// instead.
    fn drain_or_quarantine(&mut self) -> bool {
        let Some(mut ring) = self.ring.take() else { return true };
        match ring.drain(self.pool.drain_limit) {
            Ok(()) => {
                self.buffers.append(&mut ring.buffers);
                true
            }
            Err(problem) => {
                tracing::warn!(
                    "io_uring failed ({problem}) with operations in flight: quarantined {} buffers until they complete",
                    ring.buffers.len()
                );
                self.pool.free.lock().quarantined.push(ring);
                false
            }
        }
    }
}

impl Drop for IoRingLease<'_> {
    fn drop(&mut self) {
        // The ring is still here only after a panic.
        self.drain_or_quarantine();
        let mut free = self.pool.free.lock();
        free.buffers.append(&mut self.buffers);
        free.transfers -= 1;
        // The returned buffers may suffice for several transfers.
        self.pool.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::OwnedFd;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::buffer::ALIGN;
    use crate::ring::faults;

    /// Open rings are counted per process, so run one test at a time.
    static TEST_LOCK: Mutex<()> = Mutex::new(());

    struct DiscardingVisitor;

    impl IoVisitor for DiscardingVisitor {
        fn fill(&mut self, _: usize, _: &mut [u8]) {}
        fn complete(&mut self, _: usize, outcome: io::Result<&[u8]>) {
            outcome.unwrap();
        }
    }

    struct PanickingVisitor;

    impl IoVisitor for PanickingVisitor {
        fn fill(&mut self, chunk: usize, _: &mut [u8]) {
            assert!(chunk < 5, "a panic in a transfer");
        }
        fn complete(&mut self, _: usize, _: io::Result<&[u8]>) {}
    }

    fn chunks(count: usize) -> Vec<IoChunk> {
        (0..count).map(|index| IoChunk { offset: (index * ALIGN) as u64, len: ALIGN }).collect()
    }

    fn open_rings() -> usize {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        let targets = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        targets.filter(|target| target.to_string_lossy().contains("io_uring")).count()
    }

    /// A pool, or `None` if the kernel does not permit io_uring, and a file of 20 chunks.
    fn pool_and_file() -> Option<(IoRingPool, File)> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(20 * ALIGN as u64).unwrap();
        Some((IoRingPool::new(ALIGN).ok()?, file))
    }

    #[test]
    fn failed_rings_leak_no_ring_and_no_buffer() {
        let _lock = TEST_LOCK.lock();
        let Some((pool, file)) = pool_and_file() else { return };
        pool.transfer(&file, IoDirection::Write, &chunks(20), &mut DiscardingVisitor).unwrap();
        let rings = open_rings();
        let addresses = |pool: &IoRingPool| {
            let mut all: Vec<usize> =
                pool.free.lock().buffers.iter().map(|buffer| buffer.get().as_ptr().addr()).collect();
            all.sort_unstable();
            all
        };
        let buffers = addresses(&pool);
        for failure in 0..40 {
            faults::plan(failure % 21, 1);
            let direction = if failure % 2 == 0 { IoDirection::Read } else { IoDirection::Write };
            pool.transfer(&file, direction, &chunks(20), &mut DiscardingVisitor).unwrap_err();
            faults::plan(0, 0);
        }
        for _ in 0..5 {
            let panics = std::panic::AssertUnwindSafe(|| {
                pool.transfer(&file, IoDirection::Write, &chunks(20), &mut PanickingVisitor)
            });
            std::panic::catch_unwind(panics).unwrap_err();
        }
        assert_eq!(pool.free.lock().transfers, 0);
        assert!(addresses(&pool) == buffers, "buffers were replaced, so the old ones leaked");
        pool.transfer(&file, IoDirection::Read, &chunks(20), &mut DiscardingVisitor).unwrap();
        assert_eq!(open_rings(), rings);
    }

    /// A file whose reads block until bytes are written to the pipe.
    fn pipe() -> (File, io::PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        (File::from(OwnedFd::from(reader)), writer)
    }

    #[test]
    fn a_failed_transfer_waits_for_operations_in_flight() {
        let _lock = TEST_LOCK.lock();
        let Some((pool, _)) = pool_and_file() else { return };
        let (pipe, mut writer) = pipe();
        let written = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                // Time for an incorrect implementation to return too early.
                thread::sleep(Duration::from_millis(100));
                written.store(true, Ordering::SeqCst);
                writer.write_all(&[7; 2 * ALIGN]).unwrap();
            });
            // The second operation is submitted when the ring can be waited on after one more failure.
            faults::plan(1, 2);
            let problem =
                pool.transfer(&pipe, IoDirection::Read, &chunks(2), &mut DiscardingVisitor).unwrap_err();
            assert!(!has_in_flight_io(&problem), "{problem}");
            assert!(written.load(Ordering::SeqCst), "a returned buffer was still in use by the kernel");
        });
        assert_eq!((pool.quarantined(), pool.free.lock().buffers.len()), (0, BUFFERS));
    }

    #[test]
    fn buffers_in_kernel_use_stay_quarantined() {
        let _lock = TEST_LOCK.lock();
        let Some((mut pool, file)) = pool_and_file() else { return };
        pool.drain_limit = Duration::ZERO;
        let rings = open_rings();
        let (pipe, mut writer) = pipe();
        let mut failures = 0;
        while !pool.free.lock().buffers.is_empty() {
            faults::plan(1, usize::MAX);
            let problem = pool
                .transfer(&pipe, IoDirection::Read, &chunks(MAX_BUFFERS), &mut DiscardingVisitor)
                .unwrap_err();
            faults::plan(0, 0);
            assert!(has_in_flight_io(&problem), "{problem}");
            failures += 1;
        }
        assert_eq!(pool.quarantined(), BUFFERS, "no buffer is replaced");
        let problem =
            pool.transfer(&file, IoDirection::Read, &chunks(1), &mut DiscardingVisitor).unwrap_err();
        assert!(problem.to_string().contains("restart this process"), "{problem}");
        assert_eq!(pool.quarantined(), BUFFERS);

        for _ in 0..failures {
            writer.write_all(&[7; ALIGN]).unwrap();
        }
        while pool.transfer(&file, IoDirection::Read, &chunks(20), &mut DiscardingVisitor).is_err() {
            thread::yield_now();
        }
        while pool.quarantined() > 0 {
            pool.free.lock().recover();
        }
        assert_eq!(pool.free.lock().buffers.len(), BUFFERS);
        assert_eq!(open_rings(), rings);
    }
}
