//! Staying awake for bytes that are due within microseconds: a thread that sleeps until they come takes longer to wake
//! up than they take to come.
//!
//! A thread that stays awake looks again and again, up to a limit. Where that was in vain it is tried less and less
//! often, so that whoever takes its time, or needs the very core, costs next to nothing.

use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

#[cfg(not(feature = "simulation"))]
use rustix::{io::Errno, net::RecvFlags};

use crate::net::TcpStream;

/// The most times in a row that it is not tried.
const MAX_SKIPS: u32 = 64;
/// Pauses of the processor between two looks.
const SPINS_PER_POLL: u32 = 8;
/// A thread that looked for that much longer than it should was not on its core meanwhile: it has to share it.
const PREEMPTION_THRESHOLD: Duration = Duration::from_micros(140);

/// How many threads stay awake at a time.
#[derive(Debug)]
pub struct BusyPoll {
    max_threads: usize,
    active_threads: AtomicUsize,
}

impl BusyPoll {
    /// At most half of `cores` are kept awake.
    #[must_use]
    pub fn new(cores: NonZero<usize>) -> Arc<Self> {
        Arc::new(Self { max_threads: (cores.get() / 2).max(1), active_threads: AtomicUsize::new(0) })
    }

    /// For whoever waits for answers in this process: at most half of the cores that it may use.
    #[must_use]
    pub fn process_wide() -> Arc<Self> {
        static PROCESS: LazyLock<Arc<BusyPoll>> = LazyLock::new(|| {
            BusyPoll::new(std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN))
        });
        Arc::clone(&PROCESS)
    }

    /// One more thread stays awake, unless enough of them do.
    pub fn try_acquire(&self) -> Option<PollGuard<'_>> {
        let more = |now| (now < self.max_threads).then_some(now + 1);
        self.active_threads.fetch_update(Relaxed, Relaxed, more).is_ok().then(|| PollGuard(self))
    }
}

/// A thread that stays awake, until it is dropped.
#[derive(Debug)]
pub struct PollGuard<'a>(&'a BusyPoll);

impl Drop for PollGuard<'_> {
    fn drop(&mut self) {
        self.0.active_threads.fetch_sub(1, Relaxed);
    }
}

/// What has been learnt about one peer: whether it is worth to stay awake for it.
#[derive(Debug)]
pub struct AdaptivePoller {
    busy_poll: Arc<BusyPoll>,
    limit: Duration,
    skips_when_preempted: u32,
    /// Times not to try it, and how many of them there were.
    skips_due: u32,
    skips_done: u32,
}

impl AdaptivePoller {
    /// Stays awake for `limit` at a time; never if it is zero. `skipped_if_crowded` times it is not tried after the thread
    /// was found to share its core.
    #[must_use]
    pub fn new(busy_poll: Arc<BusyPoll>, limit: Duration, skips_when_preempted: u32) -> Self {
        Self { busy_poll, limit, skips_when_preempted, skips_due: 0, skips_done: 0 }
    }

    /// For whoever waits for answers in this process.
    #[must_use]
    pub fn for_process(limit: Duration) -> Self {
        Self::new(BusyPoll::process_wide(), limit, MAX_SKIPS)
    }

    /// Whether it is worth trying this time.
    pub fn is_due(&mut self) -> bool {
        // Simulated time does not pass while a thread runs.
        if cfg!(feature = "simulation") || self.limit.is_zero() {
            return false;
        }
        let is_due = self.skips_done >= self.skips_due;
        self.skips_done += u32::from(!is_due);
        is_due
    }

    /// Looks again and again, until there is something or the limit has passed. Nothing at once when enough threads
    /// are awake.
    ///
    /// # Errors
    /// What `look` gives.
    pub fn poll<T>(&mut self, mut look: impl FnMut() -> io::Result<Option<T>>) -> io::Result<Option<T>> {
        let Some(_stay) = self.busy_poll.try_acquire() else { return Ok(None) };
        let begun = Instant::now();
        loop {
            let found = look()?;
            let took = begun.elapsed();
            if took < self.limit && found.is_none() {
                // Giving the core away instead (sched_yield) is held against a thread when the core is wanted by
                // others.
                (0..SPINS_PER_POLL).for_each(|_| std::hint::spin_loop());
                continue;
            }
            (self.skips_due, self.skips_done) = match took {
                _ if took >= self.limit + PREEMPTION_THRESHOLD => (self.skips_when_preempted, 0),
                _ if took >= self.limit => ((self.skips_due * 2 + 1).min(MAX_SKIPS), 0),
                _ => (0, 0),
            };
            return Ok(found);
        }
    }
}

/// Receives what is there, without waiting: so many bytes, 0 at the end of the stream, nothing if nothing is there.
///
/// # Errors
/// Those of the connection.
#[cfg(not(feature = "simulation"))]
pub fn try_receive(stream: &TcpStream, into: &mut [u8]) -> io::Result<Option<usize>> {
    match rustix::net::recv(stream, into, RecvFlags::DONTWAIT) {
        Ok((_, bytes)) => Ok(Some(bytes)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Receives what is there, without waiting: so many bytes, 0 at the end of the stream, nothing if nothing is there.
///
/// # Errors
/// Those of the connection.
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
    fn what_was_in_vain_is_tried_less_often() {
        let mut habit = test_poller(Duration::from_nanos(1));
        let mut tried = Vec::new();
        for time in 0..300 {
            if habit.is_due() {
                tried.push(time);
                assert_eq!(habit.poll(|| Ok(None::<()>)).unwrap(), None);
            }
        }
        assert!(tried.starts_with(&[0]) && tried.len() < 10, "{tried:?}");
        assert!(!test_poller(Duration::ZERO).is_due());
    }

    #[test]
    fn no_more_than_half_of_the_cores_are_kept_awake() {
        let mut habit = test_poller(Duration::from_secs(60));
        let awake = Arc::clone(&habit.busy_poll);
        let stay = awake.try_acquire();
        assert!(stay.is_some());
        assert_eq!(habit.poll(|| Ok(Some(()))).unwrap(), None);
        drop(stay);
        assert_eq!(habit.poll(|| Ok(Some(()))).unwrap(), Some(()));
        assert_eq!(awake.active_threads.load(Relaxed), 0);
    }

    #[tokio::test]
    async fn bytes_and_the_end_are_received_without_waiting() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let far = listener.accept().await.unwrap().0;
        let (mut habit, mut into) = (test_poller(Duration::from_secs(60)), [0; 16]);
        assert_eq!(try_receive(&far, &mut into).unwrap(), None);
        near.write_all(b"bytes").await.unwrap();
        assert_eq!(habit.poll(|| try_receive(&far, &mut into)).unwrap(), Some(5));
        assert_eq!(&into[..5], b"bytes");
        drop(near);
        assert_eq!(habit.poll(|| try_receive(&far, &mut into)).unwrap(), Some(0));
    }
}
