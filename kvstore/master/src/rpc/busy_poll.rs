//! Staying awake after an answer: many callers send their next request within microseconds.
//!
//! A thread that stays awake looks for the next request again and again, and goes to sleep after
//! [`RpcLimits::busy_poll`](crate::server::Limits::awake). With several callers at a time there is always something to do, and
//! looking for one of them would keep the others waiting: then it is not tried.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::BytesMut;
use moongate_runtime::busy_poll::{self, BusyPoll};
use moongate_runtime::net::TcpStream;

/// Bytes that are received at once. Larger requests are worth waking up for.
const READ_CHUNK: usize = 4096;
/// Requests of one connection in a row before its thread looks after others.
const MAX_CONSECUTIVE_REQUESTS: u32 = 4;
/// Answers after which it is tried again on a core that others want.
const CONTENTION_BACKOFF: u32 = 4096;

/// All threads that serve connections.
#[derive(Debug)]
pub(super) struct RpcThreadPool {
    busy_poll: Arc<BusyPoll>,
    limit: Duration,
    connections: AtomicU64,
}

impl RpcThreadPool {
    pub(super) fn new(limit: Duration, awake: Arc<BusyPoll>) -> Arc<Self> {
        Arc::new(Self { busy_poll: awake, limit, connections: AtomicU64::new(0) })
    }
}

/// One thread that serves connections.
#[derive(Clone, Debug)]
pub(super) struct RpcThread {
    threads: Arc<RpcThreadPool>,
    /// The connection that was answered last.
    last: Arc<AtomicU64>,
}

impl RpcThread {
    pub(super) fn new(threads: &Arc<RpcThreadPool>) -> Self {
        Self { threads: Arc::clone(threads), last: Arc::default() }
    }
}

/// What one connection has learnt about its caller.
#[derive(Debug)]
pub(super) struct ConnectionPoller {
    thread: RpcThread,
    /// The connection.
    number: u64,
    poller: busy_poll::AdaptivePoller,
    consecutive: u32,
}

impl ConnectionPoller {
    pub(super) fn new(thread: RpcThread) -> Self {
        let threads = &thread.threads;
        let number = threads.connections.fetch_add(1, Relaxed) + 1;
        let poller =
            busy_poll::AdaptivePoller::new(Arc::clone(&threads.busy_poll), threads.limit, CONTENTION_BACKOFF);
        Self { thread, number, poller, consecutive: 0 }
    }

    /// Looks for what follows an answer. Returns how many bytes were added, if any came in time; none at the end.
    pub(super) async fn poll_next(
        &mut self,
        stream: &TcpStream,
        input: &mut BytesMut,
    ) -> io::Result<Option<usize>> {
        let is_alone = self.thread.last.swap(self.number, Relaxed) == self.number;
        if !is_alone || !self.poller.is_due() {
            return Ok(None);
        }
        if self.consecutive >= MAX_CONSECUTIVE_REQUESTS {
            self.consecutive = 0;
            tokio::task::yield_now().await;
        }
        self.consecutive += 1;
        let mut piece = [0; READ_CHUNK];
        let received = self.poller.poll(|| busy_poll::try_receive(stream, &mut piece))?;
        input.extend_from_slice(piece.get(..received.unwrap_or_default()).unwrap_or_default());
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;
    use tokio::io::AsyncWriteExt as _;

    const LONG: Duration = Duration::from_secs(60);

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    fn thread() -> RpcThread {
        RpcThread::new(&RpcThreadPool::new(LONG, BusyPoll::new(NonZero::new(2).unwrap())))
    }

    #[tokio::test]
    async fn what_comes_in_time_is_received_and_the_end_too() {
        let (mut near, far) = pair().await;
        let (mut habit, mut input) = (ConnectionPoller::new(thread()), BytesMut::new());
        assert_eq!(habit.poll_next(&far, &mut input).await.unwrap(), None, "it may have others");
        near.write_all(b"request").await.unwrap();
        assert_eq!(habit.poll_next(&far, &mut input).await.unwrap(), Some(7));
        assert_eq!(&input[..], b"request");
        drop(near);
        assert_eq!(habit.poll_next(&far, &mut input).await.unwrap(), Some(0));
    }

    #[tokio::test]
    async fn with_others_on_the_thread_it_is_not_tried() {
        let ((_a, far), (_b, other)) = (pair().await, pair().await);
        let (thread, mut input) = (thread(), BytesMut::new());
        let mut habits = [ConnectionPoller::new(thread.clone()), ConnectionPoller::new(thread.clone())];
        for _ in 0..10 {
            assert_eq!(habits[0].poll_next(&far, &mut input).await.unwrap(), None);
            assert_eq!(habits[1].poll_next(&other, &mut input).await.unwrap(), None);
        }
    }
}
