//! The PUB socket.

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

/// Subscriptions that one subscriber may have at once.
const MAX_SUBSCRIPTIONS: usize = 1024;

/// Publishes messages to everyone who has subscribed. Clones publish on the same socket.
#[derive(Debug, Clone)]
pub struct ZmtpPublisher {
    channel: broadcast::Sender<Arc<ZmtpMessage>>,
    counts: Arc<PublisherCounters>,
}

/// What a [`ZmtpPublisher`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZmtpPublisherStats {
    /// Peers that are connected now.
    pub subscribers: usize,
    /// Subscriptions of these peers.
    pub subscriptions: usize,
    /// Messages on their way to a subscriber, counted for each subscriber.
    pub sent: u64,
    /// Messages that a subscriber was too slow for, counted for each subscriber. Those that were published while the
    /// [`ZmtpPublisherServer`] was not polled for long count for every subscriber, whatever it has subscribed to.
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
    /// Opens the socket. It works while the [`ZmtpPublisherServer`] runs.
    ///
    /// # Errors
    /// If the endpoint cannot be bound.
    pub async fn bind(
        endpoint: &ZmtpEndpoint,
        options: ZmtpOptions,
    ) -> Result<(Self, ZmtpPublisherServer), ZmtpError> {
        let acceptor = ZmtpAcceptor::bind(endpoint).await?;
        let local_addr = acceptor.local_addr()?;
        let feed = broadcast::Sender::new(options.publish_queue.max(1));
        let publisher = Self { channel: feed, counts: Arc::default() };
        let server = ZmtpPublisherServer { acceptor, local_addr, publisher: publisher.clone(), options };
        Ok((publisher, server))
    }

    /// Sends a message to those who have subscribed to a prefix of its first part. Never waits: a subscriber that is slower than
    /// [`ZmtpOptions::publish_queue`] allows loses the oldest messages, which [`stats`](Self::stats) counts.
    pub fn publish(&self, message: ZmtpMessage) {
        // An error says that nobody listens, which is fine for a publisher.
        let _ = self.channel.send(Arc::new(message));
    }

    /// What has been done so far.
    pub fn stats(&self) -> ZmtpPublisherStats {
        ZmtpPublisherStats {
            subscribers: self.counts.subscribers.load(Ordering::Relaxed),
            subscriptions: self.counts.subscriptions.load(Ordering::Relaxed),
            sent: self.counts.sent.load(Ordering::Relaxed),
            dropped: self.counts.dropped.load(Ordering::Relaxed),
        }
    }
}

/// The part of a [`ZmtpPublisher`] that does the work.
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

    /// Serves subscribers until it is dropped. Messages that are not sent by then are lost.
    pub async fn run(self) {
        let mut subscribers = FuturesUnordered::new();
        loop {
            tokio::select! {
                (stream, address) = self.acceptor.accept(), if subscribers.len() < self.options.max_peers => {
                    let serving = serve(stream, self.publisher.clone(), self.options);
                    subscribers.push(async move { (address, serving.await) });
                }
                Some((address, Err(error))) = subscribers.next(), if !subscribers.is_empty() => {
                    tracing::debug!(%address, %error, "a subscriber has gone");
                }
            }
        }
    }
}

/// Ends with an error only: the peer's going is one.
async fn serve(
    stream: TcpStream,
    publisher: ZmtpPublisher,
    options: ZmtpOptions,
) -> Result<Infallible, ZmtpError> {
    let mut connection = ZmtpConnection::accepted(stream, ZmtpSocketType::Pub, &options).await?;
    let mut feed = publisher.channel.subscribe();
    let mut subscriber = SubscriberTopics::new(&publisher.counts);
    let mut waiting = VecDeque::<Arc<ZmtpMessage>>::new();
    loop {
        while connection.can_queue()
            && let Some(message) = waiting.pop_front()
        {
            connection.queue(&[], &message);
            publisher.counts.sent.fetch_add(1, Ordering::Relaxed);
        }
        tokio::select! {
            // Messages first: what is queued together is sent together.
            biased;
            received = feed.recv() => match received {
                Ok(message) if subscriber.matches(&message) => {
                    if waiting.len() >= options.publish_queue {
                        waiting.pop_front();
                        publisher.counts.dropped.fetch_add(1, Ordering::Relaxed);
                    }
                    waiting.push_back(message);
                }
                Ok(_) => {}
                Err(RecvError::Lagged(lost)) => {
                    publisher.counts.dropped.fetch_add(lost, Ordering::Relaxed);
                }
                Err(RecvError::Closed) => return Err(ZmtpError::Closed),
            },
            turn = connection.next_event() => match turn? {
                ZmtpConnectionEvent::Message(message) => subscriber.apply_message(&message)?,
                ZmtpConnectionEvent::Subscription(add, topic) => subscriber.apply_subscription(add, &topic)?,
                ZmtpConnectionEvent::Flushed => {}
            },
        }
    }
}

/// What one subscriber wants; counted while it is there.
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

    /// A subscription as ZMTP 3.0 sends it: a message of 1 or 0 and the topic. Other messages are nothing that a PUB socket reads.
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
            // A copy, because a slice would keep the read buffer.
            self.topics.push(Bytes::copy_from_slice(topic));
            self.counts.subscriptions.fetch_add(1, Ordering::Relaxed);
        } else if let Some(index) = self.topics.iter().position(|known| known == topic) {
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
