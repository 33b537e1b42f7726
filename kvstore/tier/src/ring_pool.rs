//! Rings and buffers that threads take turns with.
//!
//! All buffers are there from the beginning, and transfers share them. Were they each ring's own, or made as they are needed, a tier
//! would come to hold the memory of its busiest moment, spread over the heaps of all threads that ever used it.

use std::fs::File;
use std::io;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::buffer::AlignedBuffer;
use crate::engine::{IoChunk, IoDirection, IoVisitor};
use crate::ring::IoRing;

/// Transfers at a time; others wait for one.
const MAX_TRANSFERS: usize = 16;
/// Buffers of all transfers.
const BUFFERS: usize = 128;
/// Their bytes at most, whatever a block has.
const MAX_BYTES: usize = 64 << 20;
/// Buffers of one transfer at most.
const MAX_BUFFERS: usize = 64;
/// How long completions are polled after the ring of a failed transfer has refused to be waited on. Disks answer sooner, or report an
/// error after about as long.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Rings and buffers.
pub(crate) struct IoRingPool {
    free: Mutex<IoRingPoolState>,
    returned: Condvar,
    drain_limit: Duration,
}

struct IoRingPoolState {
    /// Made when they are needed, since they are small.
    rings: Vec<IoRing>,
    buffers: Vec<AlignedBuffer>,
    transfers: usize,
    /// Lanes of failed transfers with buffers that the kernel may still use. Each holds a buffer at least, and none is replaced, so
    /// there are at most [`BUFFERS`]. They are checked again whenever a transfer begins.
    quarantined: Vec<IoRing>,
}

impl IoRingPoolState {
    /// Takes back the buffers of quarantined lanes whose operations have completed meanwhile.
    fn recover(&mut self) {
        let Self { buffers, quarantined, .. } = self;
        quarantined.retain_mut(|lane| {
            let settled = lane.is_idle();
            if settled {
                tracing::warn!(
                    "io_uring has completed late: {} buffers are usable again",
                    lane.buffers.len()
                );
                buffers.append(&mut lane.buffers);
            }
            !settled
        });
    }
}

/// A transfer failed and left operations behind that the kernel has not completed: it may write to the file later.
#[derive(Debug, thiserror::Error)]
#[error("{0}; operations of the transfer are still under way")]
struct InFlightIoError(io::Error);

/// Whether blocks of the transfer that failed with this error may still be written.
pub(crate) fn has_in_flight_io(problem: &io::Error) -> bool {
    problem.get_ref().is_some_and(|cause| cause.is::<InFlightIoError>())
}

impl IoRingPool {
    /// With buffers of `bytes` bytes.
    ///
    /// # Errors
    /// When io_uring is not there, or not permitted.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let count = (MAX_BYTES / bytes.max(1)).clamp(2, BUFFERS);
        let lanes = vec![IoRing::new(MAX_BUFFERS)?];
        let buffers = AlignedBuffer::allocate(count, bytes);
        let free = IoRingPoolState { rings: lanes, buffers, transfers: 0, quarantined: Vec::new() };
        Ok(Self { free: Mutex::new(free), returned: Condvar::new(), drain_limit: DRAIN_LIMIT })
    }

    /// Transfers all pieces, and returns when each is over.
    ///
    /// # Errors
    /// When a ring fails, or no buffer is left because all are quarantined. What becomes of a piece is reported to `visit`.
    pub(crate) fn transfer(
        &self,
        file: &File,
        direction: IoDirection,
        pieces: &[IoChunk],
        visit: &mut dyn IoVisitor,
    ) -> io::Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        let mut turn = self.acquire(pieces.len())?;
        let outcome = turn.ring()?.transfer(file, direction, pieces, visit);
        match outcome {
            Ok(()) => turn.release(),
            Err(problem) if turn.drain_or_quarantine() => return Err(problem),
            Err(problem) => return Err(io::Error::new(problem.kind(), InFlightIoError(problem))),
        }
        Ok(())
    }

    /// Buffers that the kernel may still use after failed transfers.
    pub(crate) fn quarantined(&self) -> usize {
        self.free.lock().quarantined.iter().map(|lane| lane.buffers.len()).sum()
    }

    /// A turn with a ring if one is free, and buffers for so many pieces: at most half of the free ones, so that the next transfer,
    /// which may be of few pieces, does not wait for this one.
    fn acquire(&self, pieces: usize) -> io::Result<IoRingLease<'_>> {
        let mut free = self.free.lock();
        loop {
            free.recover();
            if free.transfers < MAX_TRANSFERS && !free.buffers.is_empty() {
                break;
            }
            if free.transfers == 0 {
                return Err(io::Error::other(
                    "io_uring has failed in all buffers and does not complete their operations; restart this process",
                ));
            }
            self.returned.wait(&mut free);
        }
        free.transfers += 1;
        let left = free.buffers.len();
        let taken = pieces.min(MAX_BUFFERS).min(left.div_ceil(2));
        let buffers = free.buffers.split_off(left - taken);
        Ok(IoRingLease { pool: self, ring: free.rings.pop(), buffers })
    }
}

/// A transfer's turn. Ring and buffers go back however it ends; what the kernel may still use is quarantined.
struct IoRingLease<'a> {
    pool: &'a IoRingPool,
    ring: Option<IoRing>,
    /// Those that the lane does not have.
    buffers: Vec<AlignedBuffer>,
}

impl IoRingLease<'_> {
    /// The lane, with the buffers.
    fn ring(&mut self) -> io::Result<&mut IoRing> {
        let mut lane = self.ring.take().map_or_else(|| IoRing::new(MAX_BUFFERS), Ok)?;
        lane.buffers.append(&mut self.buffers);
        Ok(self.ring.insert(lane))
    }

    /// After a transfer that succeeded.
    fn release(mut self) {
        let Some(mut lane) = self.ring.take() else { return };
        self.buffers.append(&mut lane.buffers);
        self.pool.free.lock().rings.push(lane);
    }

    /// After a transfer that did not: waits until the kernel uses no buffer, and closes the ring. Returns whether it came to that.
    fn drain_or_quarantine(&mut self) -> bool {
        let Some(mut lane) = self.ring.take() else { return true };
        match lane.drain(self.pool.drain_limit) {
            Ok(()) => {
                self.buffers.append(&mut lane.buffers);
                true
            }
            Err(problem) => {
                tracing::warn!(
                    "io_uring fails ({problem}) and does not complete what is under way: {} buffers are not used until it does",
                    lane.buffers.len()
                );
                self.pool.free.lock().quarantined.push(lane);
                false
            }
        }
    }
}

impl Drop for IoRingLease<'_> {
    fn drop(&mut self) {
        // There is a lane after a panic only.
        self.drain_or_quarantine();
        let mut free = self.pool.free.lock();
        free.buffers.append(&mut self.buffers);
        free.transfers -= 1;
        // A transfer may return buffers for several.
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

    /// Open rings are counted in the whole process, so one test at a time.
    static ONE_TEST: Mutex<()> = Mutex::new(());

    struct DiscardingVisitor;

    impl IoVisitor for DiscardingVisitor {
        fn fill(&mut self, _: usize, _: &mut [u8]) {}
        fn complete(&mut self, _: usize, outcome: io::Result<&[u8]>) {
            outcome.unwrap();
        }
    }

    struct PanickingVisitor;

    impl IoVisitor for PanickingVisitor {
        fn fill(&mut self, piece: usize, _: &mut [u8]) {
            assert!(piece < 5, "a panic in a transfer");
        }
        fn complete(&mut self, _: usize, _: io::Result<&[u8]>) {}
    }

    fn pieces(count: usize) -> Vec<IoChunk> {
        (0..count).map(|at| IoChunk { offset: (at * ALIGN) as u64, len: ALIGN }).collect()
    }

    fn open_rings() -> usize {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        let targets = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        targets.filter(|target| target.to_string_lossy().contains("io_uring")).count()
    }

    /// A ring or None where the kernel permits none, and a file with room for 20 pieces.
    fn lanes() -> Option<(IoRingPool, File)> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(20 * ALIGN as u64).unwrap();
        Some((IoRingPool::new(ALIGN).ok()?, file))
    }

    #[test]
    fn failures_of_rings_leave_no_ring_and_no_buffer_behind() {
        let _one = ONE_TEST.lock();
        let Some((lanes, file)) = lanes() else { return };
        lanes.transfer(&file, IoDirection::Write, &pieces(20), &mut DiscardingVisitor).unwrap();
        let rings = open_rings();
        let addresses = |lanes: &IoRingPool| {
            let mut all: Vec<usize> =
                lanes.free.lock().buffers.iter().map(|buffer| buffer.get().as_ptr().addr()).collect();
            all.sort_unstable();
            all
        };
        let buffers = addresses(&lanes);
        for failure in 0..40 {
            faults::plan(failure % 21, 1);
            let direction = if failure % 2 == 0 { IoDirection::Read } else { IoDirection::Write };
            lanes.transfer(&file, direction, &pieces(20), &mut DiscardingVisitor).unwrap_err();
            faults::plan(0, 0);
        }
        for _ in 0..5 {
            let panics = std::panic::AssertUnwindSafe(|| {
                lanes.transfer(&file, IoDirection::Write, &pieces(20), &mut PanickingVisitor)
            });
            std::panic::catch_unwind(panics).unwrap_err();
        }
        assert_eq!(lanes.free.lock().transfers, 0);
        assert!(addresses(&lanes) == buffers, "buffers were replaced, so the old ones have leaked");
        lanes.transfer(&file, IoDirection::Read, &pieces(20), &mut DiscardingVisitor).unwrap();
        assert_eq!(open_rings(), rings);
    }

    /// Reads of this file last until something is written into the pipe.
    fn pipe() -> (File, io::PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        (File::from(OwnedFd::from(reader)), writer)
    }

    #[test]
    fn a_transfer_that_fails_waits_for_operations_under_way() {
        let _one = ONE_TEST.lock();
        let Some((lanes, _)) = lanes() else { return };
        let (pipe, mut writer) = pipe();
        let written = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                // Time for an implementation that does not wait to return too early.
                thread::sleep(Duration::from_millis(100));
                written.store(true, Ordering::SeqCst);
                writer.write_all(&[7; 2 * ALIGN]).unwrap();
            });
            // The second operation is submitted when the ring, after one more refusal, can be waited on.
            faults::plan(1, 2);
            let problem =
                lanes.transfer(&pipe, IoDirection::Read, &pieces(2), &mut DiscardingVisitor).unwrap_err();
            assert!(!has_in_flight_io(&problem), "{problem}");
            assert!(written.load(Ordering::SeqCst), "the kernel had a buffer that was given back");
        });
        assert_eq!((lanes.quarantined(), lanes.free.lock().buffers.len()), (0, BUFFERS));
    }

    #[test]
    fn buffers_in_kernel_use_stay_quarantined() {
        let _one = ONE_TEST.lock();
        let Some((mut lanes, file)) = lanes() else { return };
        lanes.drain_limit = Duration::ZERO;
        let rings = open_rings();
        let (pipe, mut writer) = pipe();
        let mut failures = 0;
        while !lanes.free.lock().buffers.is_empty() {
            faults::plan(1, usize::MAX);
            let problem = lanes
                .transfer(&pipe, IoDirection::Read, &pieces(MAX_BUFFERS), &mut DiscardingVisitor)
                .unwrap_err();
            faults::plan(0, 0);
            assert!(has_in_flight_io(&problem), "{problem}");
            failures += 1;
        }
        assert_eq!(lanes.quarantined(), BUFFERS, "none is replaced");
        let problem =
            lanes.transfer(&file, IoDirection::Read, &pieces(1), &mut DiscardingVisitor).unwrap_err();
        assert!(problem.to_string().contains("restart this process"), "{problem}");
        assert_eq!(lanes.quarantined(), BUFFERS);

        for _ in 0..failures {
            writer.write_all(&[7; ALIGN]).unwrap();
        }
        while lanes.transfer(&file, IoDirection::Read, &pieces(20), &mut DiscardingVisitor).is_err() {
            thread::yield_now();
        }
        while lanes.quarantined() > 0 {
            lanes.free.lock().recover();
        }
        assert_eq!(lanes.free.lock().buffers.len(), BUFFERS);
        assert_eq!(open_rings(), rings);
    }
}
