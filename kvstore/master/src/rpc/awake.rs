//! Staying awake after an answer: many callers send their next request within microseconds, and a thread that sleeps
//! until then takes longer to wake up than the call itself.
//!
//! A thread that stays awake looks for the next request again and again, and goes to sleep after
//! [`Limits::awake`](crate::server::Limits::awake). Where that was in vain it is tried less and less often, so that
//! callers who take their time, or who wait for the very core, cost next to nothing. With several callers at a time
//! there is always something to do, and looking for one of them would keep the others waiting: then it is not tried.

use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use tokio::net::TcpStream;

/// Bytes that are received at once. Larger requests are worth waking up for.
const PIECE: usize = 4096;
/// Requests of one connection in a row before its thread looks after others.
const IN_A_ROW: u32 = 4;
/// The most answers after which it is not tried again.
const MOST_SKIPPED: u32 = 64;
/// Pauses of the processor between two looks.
const PAUSES: u32 = 8;
/// A thread that was not on its core for that long has to share it.
const CROWDED: Duration = Duration::from_micros(200);
/// Answers after which it is tried again on a crowded core.
const SKIPPED_IF_CROWDED: u32 = 4096;

/// How long threads stay awake, and how many of them at a time.
#[derive(Debug)]
pub(super) struct Awake {
    limit: Duration,
    threads: usize,
    now: AtomicUsize,
    connections: AtomicU64,
}

impl Awake {
    /// At most half of `cores` are kept awake.
    pub(super) fn new(limit: Duration, cores: NonZero<usize>) -> Arc<Self> {
        let threads = (cores.get() / 2).max(1);
        Arc::new(Self { limit, threads, now: AtomicUsize::new(0), connections: AtomicU64::new(0) })
    }

    /// One more thread stays awake, unless enough of them do.
    fn enter(&self) -> Option<Stay<'_>> {
        let more = |now| (now < self.threads).then_some(now + 1);
        self.now.fetch_update(Relaxed, Relaxed, more).is_ok().then(|| Stay(self))
    }
}

/// A thread that stays awake, until it is dropped.
struct Stay<'a>(&'a Awake);

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Relaxed);
    }
}

/// One thread that serves connections.
#[derive(Clone, Debug)]
pub(super) struct Thread {
    awake: Arc<Awake>,
    /// The connection that was answered last.
    last: Arc<AtomicU64>,
}

impl Thread {
    pub(super) fn new(awake: &Arc<Awake>) -> Self {
        Self { awake: Arc::clone(awake), last: Arc::default() }
    }
}

/// What one connection has learnt about its caller.
#[derive(Debug)]
pub(super) struct Habit {
    thread: Thread,
    /// The connection.
    number: u64,
    /// Answers after which to go to sleep at once, and how many of them there were.
    skip: u32,
    skipped: u32,
    in_a_row: u32,
}

impl Habit {
    pub(super) fn new(thread: Thread) -> Self {
        let number = thread.awake.connections.fetch_add(1, Relaxed) + 1;
        Self { thread, number, skip: 0, skipped: 0, in_a_row: 0 }
    }

    /// Looks for what follows an answer. Returns how many bytes were added, if any came in time; none at the end.
    pub(super) async fn next(
        &mut self,
        stream: &TcpStream,
        input: &mut BytesMut,
    ) -> io::Result<Option<usize>> {
        let is_alone = self.thread.last.swap(self.number, Relaxed) == self.number;
        if self.thread.awake.limit.is_zero() || !is_alone {
            return Ok(None);
        }
        if self.skipped < self.skip {
            self.skipped += 1;
            return Ok(None);
        }
        if self.in_a_row >= IN_A_ROW {
            self.in_a_row = 0;
            tokio::task::yield_now().await;
        }
        self.in_a_row += 1;
        self.look(stream, input)
    }

    fn look(&mut self, stream: &TcpStream, input: &mut BytesMut) -> io::Result<Option<usize>> {
        let awake = &self.thread.awake;
        let Some(_stay) = awake.enter() else { return Ok(None) };
        let begun = Instant::now();
        loop {
            // Giving the core away instead (sched_yield) is held against a thread when the core is wanted by others.
            (0..PAUSES).for_each(|_| std::hint::spin_loop());
            let received = receive(stream, input)?;
            let took = begun.elapsed();
            if took < awake.limit && received.is_none() {
                continue;
            }
            (self.skip, self.skipped) = match took {
                _ if took >= CROWDED => (SKIPPED_IF_CROWDED, 0),
                _ if took >= awake.limit => ((self.skip * 2 + 1).min(MOST_SKIPPED), 0),
                _ => (0, 0),
            };
            return Ok(received);
        }
    }
}

/// Receives what is there, without waiting.
fn receive(stream: &TcpStream, input: &mut BytesMut) -> io::Result<Option<usize>> {
    let mut piece = [0; PIECE];
    match rustix::net::recv(stream, &mut piece[..], RecvFlags::DONTWAIT) {
        Ok((_, bytes)) => {
            input.extend_from_slice(piece.get(..bytes).unwrap_or_default());
            Ok(Some(bytes))
        }
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt as _;

    const LONG: Duration = Duration::from_secs(60);

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    fn thread(limit: Duration) -> Thread {
        Thread::new(&Awake::new(limit, NonZero::new(2).unwrap()))
    }

    #[tokio::test]
    async fn what_comes_in_time_is_received_and_the_end_too() {
        let (mut near, far) = pair().await;
        let (mut habit, mut input) = (Habit::new(thread(LONG)), BytesMut::new());
        assert_eq!(habit.next(&far, &mut input).await.unwrap(), None, "it may have others");
        near.write_all(b"request").await.unwrap();
        assert_eq!(habit.next(&far, &mut input).await.unwrap(), Some(7));
        assert_eq!(&input[..], b"request");
        drop(near);
        habit.skip = 0;
        assert_eq!(habit.next(&far, &mut input).await.unwrap(), Some(0));
    }

    #[tokio::test]
    async fn what_was_in_vain_is_tried_less_often() {
        let (_near, far) = pair().await;
        let (mut habit, mut input) = (Habit::new(thread(Duration::from_nanos(1))), BytesMut::new());
        let mut tried = Vec::new();
        for answer in 0..300 {
            let before = habit.skipped;
            assert_eq!(habit.next(&far, &mut input).await.unwrap(), None);
            if answer > 0 && habit.skipped <= before {
                tried.push(answer);
            }
        }
        assert!(tried.starts_with(&[1]) && tried.len() < 10, "{tried:?}");
    }

    #[tokio::test]
    async fn with_others_on_the_thread_or_enough_threads_awake_it_is_not_tried() {
        let ((_a, far), (_b, other)) = (pair().await, pair().await);
        let (thread, mut input) = (thread(LONG), BytesMut::new());
        let mut habits = [Habit::new(thread.clone()), Habit::new(thread.clone())];
        for _ in 0..10 {
            assert_eq!(habits[0].next(&far, &mut input).await.unwrap(), None);
            assert_eq!(habits[1].next(&other, &mut input).await.unwrap(), None);
        }
        let stay = thread.awake.enter();
        assert!(stay.is_some());
        assert_eq!(habits[1].next(&other, &mut input).await.unwrap(), None);
        drop(stay);
        assert_eq!(thread.awake.now.load(Relaxed), 0);
    }
}
