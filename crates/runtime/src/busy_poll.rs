//! Busy polling for bytes that are due within microseconds: waking a sleeping thread takes longer than the bytes take to arrive.
//!
//! A busy-polling thread retries up to a time limit. After fruitless polls it tries less and less often, so a slow peer, or one that needs
//! this very core, costs next to nothing.

use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

#[cfg(not(feature = "simulation"))]
use rustix::{io::Errno, net::RecvFlags};

use crate::net::TcpStream;

/// Maximum number of polls skipped in a row.
const MAX_SKIPS: u32 = 64;
/// CPU pause instructions between two polls.
const SPINS_PER_POLL: u32 = 8;
/// A poll that overran its limit by this much was preempted: the thread shares its core.
const PREEMPTION_THRESHOLD: Duration = Duration::from_micros(140);

/// Limits how many threads busy-poll at a time.
#[derive(Debug)]
pub struct BusyPoll {
    max_threads: usize,
    active_threads: AtomicUsize,
}

impl BusyPoll {
    /// Allows at most half of `cores` to busy-poll.
    #[must_use]
    pub fn new(cores: NonZero<usize>) -> Arc<Self> {
        Arc::new(Self { max_threads: (cores.get() / 2).max(1), active_threads: AtomicUsize::new(0) })
    }

    /// The limit shared by this process: at most half of its available cores.
    #[must_use]
    pub fn process_wide() -> Arc<Self> {
        static PROCESS: LazyLock<Arc<BusyPoll>> = LazyLock::new(|| {
            BusyPoll::new(std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN))
        });
        Arc::clone(&PROCESS)
    }

    /// Reserves one polling thread, unless the limit is reached.
    pub fn try_acquire(&self) -> Option<PollGuard<'_>> {
        let more = |active| (active < self.max_threads).then_some(active + 1);
        self.active_threads.fetch_update(Relaxed, Relaxed, more).is_ok().then(|| PollGuard(self))
    }
}

/// A reservation for one polling thread, released on drop.
#[derive(Debug)]
pub struct PollGuard<'a>(&'a BusyPoll);

impl Drop for PollGuard<'_> {
    fn drop(&mut self) {
        self.0.active_threads.fetch_sub(1, Relaxed);
    }
}

/// Per-peer history that decides whether busy polling is worthwhile.
#[derive(Debug)]
pub struct AdaptivePoller {
    busy_poll: Arc<BusyPoll>,
    limit: Duration,
    skips_when_preempted: u32,
    /// Number of polls to skip, and how many were skipped so far.
    skips_due: u32,
    skips_done: u32,
}

impl AdaptivePoller {
    /// Polls for up to `limit` at a time; never if it is zero. After a preemption, `skips_when_preempted` polls are skipped.
    #[must_use]
    pub fn new(busy_poll: Arc<BusyPoll>, limit: Duration, skips_when_preempted: u32) -> Self {
        Self { busy_poll, limit, skips_when_preempted, skips_due: 0, skips_done: 0 }
    }

    /// A poller with the process-wide thread limit.
    #[must_use]
    pub fn for_process(limit: Duration) -> Self {
        Self::new(BusyPoll::process_wide(), limit, MAX_SKIPS)
    }

    /// Whether to poll this time.
    pub fn is_due(&mut self) -> bool {
        // Simulated time does not advance while a thread runs.
        if cfg!(feature = "simulation") || self.limit.is_zero() {
            return false;
        }
        let is_due = self.skips_done >= self.skips_due;
        self.skips_done += u32::from(!is_due);
        is_due
    }

    /// Calls `try_once` until it returns a value or the limit has passed. Returns `None` at once if too many threads poll.
    ///
    /// # Errors
    /// The error of `try_once`.
    pub fn poll<T>(&mut self, mut try_once: impl FnMut() -> io::Result<Option<T>>) -> io::Result<Option<T>> {
        let Some(_guard) = self.busy_poll.try_acquire() else { return Ok(None) };
        let started = Instant::now();
        loop {
            let found = try_once()?;
            let elapsed = started.elapsed();
            if elapsed < self.limit && found.is_none() {
                // Yielding instead (sched_yield) lowers the thread's priority when other threads compete for the core.
                (0..SPINS_PER_POLL).for_each(|_| std::hint::spin_loop());
                continue;
            }
            (self.skips_due, self.skips_done) = match elapsed {
                _ if elapsed >= self.limit + PREEMPTION_THRESHOLD => (self.skips_when_preempted, 0),
                _ if elapsed >= self.limit => ((self.skips_due * 2 + 1).min(MAX_SKIPS), 0),
                _ => (0, 0),
            };
            return Ok(found);
        }
    }
}

/// Receives available bytes without waiting: their number, 0 at the end of the stream, `None` if there are none.
///
/// # Errors
/// Errors of the connection.
#[cfg(not(feature = "simulation"))]
pub fn try_receive(stream: &TcpStream, into: &mut [u8]) -> io::Result<Option<usize>> {
    match rustix::net::recv(stream, into, RecvFlags::DONTWAIT) {
        Ok((_, bytes)) => Ok(Some(bytes)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Receives available bytes without waiting: their number, 0 at the end of the stream, `None` if there are none.
///
/// # Errors
/// Errors of the connection.
#[cfg(feature = "simulation")]
pub fn try_receive(stream: &TcpStream, into: &mut [u8]) -> io::Result<Option<usize>> {
    match stream.try_read(into) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        received => received.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt as _;

    fn test_poller(limit: Duration) -> AdaptivePoller {
        AdaptivePoller::new(BusyPoll::new(NonZero::new(2).unwrap()), limit, 0)
    }

    #[test]
    fn fruitless_polls_are_skipped_more_and_more() {
        let mut poller = test_poller(Duration::from_nanos(1));
        let mut tried = Vec::new();
        for time in 0..300 {
            if poller.is_due() {
                tried.push(time);
                assert_eq!(poller.poll(|| Ok(None::<()>)).unwrap(), None);
            }
        }
        assert!(tried.starts_with(&[0]) && tried.len() < 10, "{tried:?}");
        assert!(!test_poller(Duration::ZERO).is_due());
    }

    #[test]
    fn at_most_half_of_the_cores_poll() {
        let mut poller = test_poller(Duration::from_secs(60));
        let busy_poll = Arc::clone(&poller.busy_poll);
        let guard = busy_poll.try_acquire();
        assert!(guard.is_some());
        assert_eq!(poller.poll(|| Ok(Some(()))).unwrap(), None);
        drop(guard);
        assert_eq!(poller.poll(|| Ok(Some(()))).unwrap(), Some(()));
        assert_eq!(busy_poll.active_threads.load(Relaxed), 0);
    }

    #[tokio::test]
    async fn bytes_and_end_of_stream_are_received_without_waiting() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let far = listener.accept().await.unwrap().0;
        let (mut poller, mut into) = (test_poller(Duration::from_secs(60)), [0; 16]);
        assert_eq!(try_receive(&far, &mut into).unwrap(), None);
        near.write_all(b"bytes").await.unwrap();
        assert_eq!(poller.poll(|| try_receive(&far, &mut into)).unwrap(), Some(5));
        assert_eq!(&into[..5], b"bytes");
        drop(near);
        assert_eq!(poller.poll(|| try_receive(&far, &mut into)).unwrap(), Some(0));
    }
}
