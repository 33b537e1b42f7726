//! The PUB socket: sends messages to subscribers.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::net::TcpStream;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::accept::ZmtpAcceptor;
use crate::codec::{ZmtpMessage, ZmtpSocketType};
use crate::connection::{ZmtpConnection, ZmtpConnectionEvent};
use crate::{ZmtpEndpoint, ZmtpError, ZmtpOptions};

/// Maximum number of subscriptions per subscriber.
const MAX_SUBSCRIPTIONS: usize = 1024;

/// Publishes messages to all matching subscribers. Clones publish on the same socket.
#[derive(Debug, Clone)]
pub struct ZmtpPublisher {
    channel: broadcast::Sender<Arc<ZmtpMessage>>,
    counts: Arc<PublisherCounters>,
}

/// Counters of a [`ZmtpPublisher`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZmtpPublisherStats {
    /// Number of connected peers.
    pub subscribers: usize,
    /// Subscriptions of the connected peers.
    pub subscriptions: usize,
    /// Messages queued to connections, counted per subscriber.
    pub sent: u64,
    /// Messages dropped for slow subscribers, counted per subscriber. Messages published while the [`ZmtpPublisherServer`] was not polled
    /// for long count for every subscriber, regardless of subscriptions.
    pub dropped: u64,
}

#[derive(Debug, Default)]
struct PublisherCounters {
    subscribers: AtomicUsize,
    subscriptions: AtomicUsize,
    sent: AtomicU64,
    dropped: AtomicU64,
}

impl ZmtpPublisher {
    /// Binds the socket. It serves subscribers while the [`ZmtpPublisherServer`] runs.
    ///
    /// # Errors
    /// If the endpoint cannot be bound.
    pub async fn bind(
        endpoint: &ZmtpEndpoint,
        options: ZmtpOptions,
    ) -> Result<(Self, ZmtpPublisherServer), ZmtpError> {
        let acceptor = ZmtpAcceptor::bind(endpoint).await?;
        let local_addr = acceptor.local_addr()?;
        let channel = broadcast::Sender::new(options.publish_queue.max(1));
        let publisher = Self { channel, counts: Arc::default() };
        let server = ZmtpPublisherServer { acceptor, local_addr, publisher: publisher.clone(), options };
        Ok((publisher, server))
    }

    /// Sends a message to the subscribers of a prefix of its first part. Never waits: for a subscriber that lags by more than
    /// [`ZmtpOptions::publish_queue`], the oldest messages are dropped and counted in [`stats`](Self::stats).
    pub fn publish(&self, message: ZmtpMessage) {
        // An error means that there are no subscribers, which is not a failure.
        let _ = self.channel.send(Arc::new(message));
    }

    /// Counters since the socket was bound.
    pub fn stats(&self) -> ZmtpPublisherStats {
        ZmtpPublisherStats {
            subscribers: self.counts.subscribers.load(Ordering::Relaxed),
            subscriptions: self.counts.subscriptions.load(Ordering::Relaxed),
            sent: self.counts.sent.load(Ordering::Relaxed),
            dropped: self.counts.dropped.load(Ordering::Relaxed),
        }
    }
}

/// The server of a [`ZmtpPublisher`]: accepts subscribers and sends to them.
#[derive(Debug)]
pub struct ZmtpPublisherServer {
    acceptor: ZmtpAcceptor,
    local_addr: SocketAddr,
    publisher: ZmtpPublisher,
    options: ZmtpOptions,
}

impl ZmtpPublisherServer {
    /// The address that the socket listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Serves subscribers until dropped. Unsent messages are lost then.
    pub async fn run(self) {
        let mut subscribers = FuturesUnordered::new();
        loop {
            tokio::select! {
                (stream, address) = self.acceptor.accept(), if subscribers.len() < self.options.max_peers => {
                    let connection = serve(stream, self.publisher.clone(), self.options);
                    subscribers.push(async move { (address, connection.await) });
                }
                Some((address, Err(error))) = subscribers.next(), if !subscribers.is_empty() => {
                    tracing::debug!(%address, %error, "subscriber disconnected");
                }
            }
        }
    }
}

/// Serves one subscriber. Always ends with an error, at the latest when the peer disconnects.
async fn serve(
    stream: TcpStream,
    publisher: ZmtpPublisher,
    options: ZmtpOptions,
) -> Result<Infallible, ZmtpError> {
    let mut connection = ZmtpConnection::accepted(stream, ZmtpSocketType::Pub, &options).await?;
    let mut messages = publisher.channel.subscribe();
    let mut subscriber = SubscriberTopics::new(&publisher.counts);
    let mut queued = VecDeque::<Arc<ZmtpMessage>>::new();
    loop {
        while connection.can_queue()
            && let Some(message) = queued.pop_front()
        {
            connection.queue(&[], &message);
            publisher.counts.sent.fetch_add(1, Ordering::Relaxed);
        }
        tokio::select! {
            // Messages first: messages queued together are sent together.
            biased;
            received = messages.recv() => match received {
                Ok(message) if subscriber.matches(&message) => {
                    if queued.len() >= options.publish_queue {
                        queued.pop_front();
                        publisher.counts.dropped.fetch_add(1, Ordering::Relaxed);
                    }
                    queued.push_back(message);
                }
                Ok(_) => {}
                Err(RecvError::Lagged(missed)) => {
                    publisher.counts.dropped.fetch_add(missed, Ordering::Relaxed);
                }
                Err(RecvError::Closed) => return Err(ZmtpError::Closed),
            },
            event = connection.next_event() => match event? {
                ZmtpConnectionEvent::Message(message) => subscriber.apply_message(&message)?,
                ZmtpConnectionEvent::Subscription(add, topic) => subscriber.apply_subscription(add, &topic)?,
                ZmtpConnectionEvent::Flushed => {}
            },
        }
    }
}

/// Subscriptions of one connected subscriber, included in the counters.
struct SubscriberTopics<'a> {
    topics: Vec<Bytes>,
    counts: &'a PublisherCounters,
}

impl<'a> SubscriberTopics<'a> {
    fn new(counts: &'a PublisherCounters) -> Self {
        counts.subscribers.fetch_add(1, Ordering::Relaxed);
        Self { topics: Vec::new(), counts }
    }

    fn matches(&self, message: &ZmtpMessage) -> bool {
        let first = message.parts().first();
        first.is_some_and(|first| self.topics.iter().any(|topic| first.starts_with(topic)))
    }

    /// Applies a subscription in ZMTP 3.0 form: a message of 1 or 0 followed by the topic. A PUB socket ignores other messages.
    fn apply_message(&mut self, message: &ZmtpMessage) -> Result<(), ZmtpError> {
        match message.parts().first().and_then(|part| part.split_first()) {
            Some((&flag @ (0 | 1), topic)) => self.apply_subscription(flag == 1, topic),
            _ => Ok(()),
        }
    }

    fn apply_subscription(&mut self, add: bool, topic: &[u8]) -> Result<(), ZmtpError> {
        if add {
            if self.topics.len() >= MAX_SUBSCRIPTIONS {
                return Err(ZmtpError::Subscriptions(MAX_SUBSCRIPTIONS));
            }
            // Copied, because a slice would keep the read buffer in memory.
            self.topics.push(Bytes::copy_from_slice(topic));
            self.counts.subscriptions.fetch_add(1, Ordering::Relaxed);
        } else if let Some(index) = self.topics.iter().position(|existing| existing == topic) {
            self.topics.swap_remove(index);
            self.counts.subscriptions.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Drop for SubscriberTopics<'_> {
    fn drop(&mut self) {
        self.counts.subscribers.fetch_sub(1, Ordering::Relaxed);
        self.counts.subscriptions.fetch_sub(self.topics.len(), Ordering::Relaxed);
    }
}
