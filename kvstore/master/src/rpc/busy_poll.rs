//! Busy-polling after a reply: many callers send their next request within microseconds.
//!
//! A busy-polling thread reads its socket repeatedly, and parks after [`RpcLimits::busy_poll`](crate::server::RpcLimits::busy_poll).
//! With several active callers on a thread there is always work, and polling one of them would delay the others: then the thread does
//! not poll.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::BytesMut;
use moongate_runtime::busy_poll::{self, BusyPoll};
use moongate_runtime::net::TcpStream;

/// Bytes that one poll receives. For larger requests the wake-up time does not matter.
const READ_CHUNK: usize = 4096;
/// Maximum number of consecutive requests of one connection before its thread serves others.
const MAX_CONSECUTIVE_REQUESTS: u32 = 4;
/// Number of replies without polling after the core was contended.
const CONTENTION_BACKOFF: u32 = 4096;

/// State shared by all threads that serve connections.
#[derive(Debug)]
pub(super) struct RpcThreadPool {
    busy_poll: Arc<BusyPoll>,
    limit: Duration,
    connections: AtomicU64,
}

impl RpcThreadPool {
    pub(super) fn new(limit: Duration, busy_poll: Arc<BusyPoll>) -> Arc<Self> {
        Arc::new(Self { busy_poll, limit, connections: AtomicU64::new(0) })
    }
}

/// One thread that serves connections.
#[derive(Clone, Debug)]
pub(super) struct RpcThread {
    threads: Arc<RpcThreadPool>,
    /// The connection that last received a reply.
    last: Arc<AtomicU64>,
}

impl RpcThread {
    pub(super) fn new(threads: &Arc<RpcThreadPool>) -> Self {
        Self { threads: Arc::clone(threads), last: Arc::default() }
    }
}

/// Adaptive polling state of one connection.
#[derive(Debug)]
pub(super) struct ConnectionPoller {
    thread: RpcThread,
    /// Number of the connection.
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

    /// Polls for the request that follows a reply. Returns the number of bytes received in time, 0 at the end of the stream.
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
        let mut chunk = [0; READ_CHUNK];
        let received = self.poller.poll(|| busy_poll::try_receive(stream, &mut chunk))?;
        input.extend_from_slice(chunk.get(..received.unwrap_or_default()).unwrap_or_default());
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
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    fn thread() -> RpcThread {
        RpcThread::new(&RpcThreadPool::new(LONG, BusyPoll::new(NonZero::new(2).unwrap())))
    }

    #[tokio::test]
    async fn polling_receives_bytes_and_the_end_of_the_stream() {
        let (mut client, server) = pair().await;
        let (mut poller, mut input) = (ConnectionPoller::new(thread()), BytesMut::new());
        assert_eq!(
            poller.poll_next(&server, &mut input).await.unwrap(),
            None,
            "the thread may have other callers"
        );
        client.write_all(b"request").await.unwrap();
        assert_eq!(poller.poll_next(&server, &mut input).await.unwrap(), Some(7));
        assert_eq!(&input[..], b"request");
        drop(client);
        assert_eq!(poller.poll_next(&server, &mut input).await.unwrap(), Some(0));
    }

    #[tokio::test]
    async fn a_thread_with_several_callers_does_not_poll() {
        let ((_a, server), (_b, other)) = (pair().await, pair().await);
        let (thread, mut input) = (thread(), BytesMut::new());
        let mut pollers = [ConnectionPoller::new(thread.clone()), ConnectionPoller::new(thread.clone())];
        for _ in 0..10 {
            assert_eq!(pollers[0].poll_next(&server, &mut input).await.unwrap(), None);
            assert_eq!(pollers[1].poll_next(&other, &mut input).await.unwrap(), None);
        }
    }
}
