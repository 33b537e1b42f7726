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

use crate::accept::Acceptor;
use crate::codec::{Message, SocketType};
use crate::connection::{Connection, Turn};
use crate::{Endpoint, Error, Options};

/// Subscriptions that one subscriber may have at once.
const SUBSCRIPTIONS: usize = 1024;

/// Publishes messages to everyone who has subscribed. Clones publish on the same socket.
#[derive(Debug, Clone)]
pub struct Publisher {
    feed: broadcast::Sender<Arc<Message>>,
    counts: Arc<Counts>,
}

/// What a [`Publisher`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PublisherStats {
    /// Peers that are connected now.
    pub subscribers: usize,
    /// Subscriptions of these peers.
    pub subscriptions: usize,
    /// Messages on their way to a subscriber, counted for each subscriber.
    pub sent: u64,
    /// Messages that a subscriber was too slow for, counted for each subscriber. Those that were published while the
    /// [`PublisherServer`] was not polled for long count for every subscriber, whatever it has subscribed to.
    pub lost: u64,
}

#[derive(Debug, Default)]
struct Counts {
    subscribers: AtomicUsize,
    subscriptions: AtomicUsize,
    sent: AtomicU64,
    lost: AtomicU64,
}

impl Publisher {
    /// Opens the socket. It works while the [`PublisherServer`] runs.
    ///
    /// # Errors
    /// If the endpoint cannot be bound.
    pub async fn bind(endpoint: &Endpoint, options: Options) -> Result<(Self, PublisherServer), Error> {
        let acceptor = Acceptor::bind(endpoint).await?;
        let local_addr = acceptor.local_addr()?;
        let feed = broadcast::Sender::new(options.publish_queue.max(1));
        let publisher = Self { feed, counts: Arc::default() };
        let server = PublisherServer { acceptor, local_addr, publisher: publisher.clone(), options };
        Ok((publisher, server))
    }

    /// Sends a message to those who have subscribed to a prefix of its first part. Never waits: a subscriber that is slower than
    /// [`Options::publish_queue`] allows loses the oldest messages, which [`stats`](Self::stats) counts.
    pub fn publish(&self, message: Message) {
        // An error says that nobody listens, which is fine for a publisher.
        let _ = self.feed.send(Arc::new(message));
    }

    /// What has been done so far.
    pub fn stats(&self) -> PublisherStats {
        PublisherStats {
            subscribers: self.counts.subscribers.load(Ordering::Relaxed),
            subscriptions: self.counts.subscriptions.load(Ordering::Relaxed),
            sent: self.counts.sent.load(Ordering::Relaxed),
            lost: self.counts.lost.load(Ordering::Relaxed),
        }
    }
}

/// The part of a [`Publisher`] that does the work.
#[derive(Debug)]
pub struct PublisherServer {
    acceptor: Acceptor,
    local_addr: SocketAddr,
    publisher: Publisher,
    options: Options,
}

impl PublisherServer {
    /// The address that the socket listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Serves subscribers until it is dropped. Messages that are not sent by then are lost.
    pub async fn run(self) {
        let mut subscribers = FuturesUnordered::new();
        loop {
            tokio::select! {
                (stream, address) = self.acceptor.accept(), if subscribers.len() < self.options.peers => {
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
async fn serve(stream: TcpStream, publisher: Publisher, options: Options) -> Result<Infallible, Error> {
    let mut connection = Connection::accepted(stream, SocketType::Pub, &options).await?;
    let mut feed = publisher.feed.subscribe();
    let mut subscriber = Subscriptions::new(&publisher.counts);
    let mut waiting = VecDeque::<Arc<Message>>::new();
    loop {
        while connection.has_room()
            && let Some(message) = waiting.pop_front()
        {
            connection.queue(&[], &message);
            publisher.counts.sent.fetch_add(1, Ordering::Relaxed);
        }
        tokio::select! {
            // Messages first: what is queued together is sent together.
            biased;
            received = feed.recv() => match received {
                Ok(message) if subscriber.want(&message) => {
                    if waiting.len() >= options.publish_queue {
                        waiting.pop_front();
                        publisher.counts.lost.fetch_add(1, Ordering::Relaxed);
                    }
                    waiting.push_back(message);
                }
                Ok(_) => {}
                Err(RecvError::Lagged(lost)) => {
                    publisher.counts.lost.fetch_add(lost, Ordering::Relaxed);
                }
                Err(RecvError::Closed) => return Err(Error::Closed),
            },
            turn = connection.turn() => match turn? {
                Turn::Message(message) => subscriber.message(&message)?,
                Turn::Subscription(add, topic) => subscriber.change(add, &topic)?,
                Turn::Flushed => {}
            },
        }
    }
}

/// What one subscriber wants; counted while it is there.
struct Subscriptions<'a> {
    topics: Vec<Bytes>,
    counts: &'a Counts,
}

impl<'a> Subscriptions<'a> {
    fn new(counts: &'a Counts) -> Self {
        counts.subscribers.fetch_add(1, Ordering::Relaxed);
        Self { topics: Vec::new(), counts }
    }

    fn want(&self, message: &Message) -> bool {
        let first = message.parts().first();
        first.is_some_and(|first| self.topics.iter().any(|topic| first.starts_with(topic)))
    }

    /// A subscription as ZMTP 3.0 sends it: a message of 1 or 0 and the topic. Other messages are nothing that a PUB socket reads.
    fn message(&mut self, message: &Message) -> Result<(), Error> {
        match message.parts().first().and_then(|part| part.split_first()) {
            Some((&flag @ (0 | 1), topic)) => self.change(flag == 1, topic),
            _ => Ok(()),
        }
    }

    fn change(&mut self, add: bool, topic: &[u8]) -> Result<(), Error> {
        if add {
            if self.topics.len() >= SUBSCRIPTIONS {
                return Err(Error::Subscriptions(SUBSCRIPTIONS));
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

impl Drop for Subscriptions<'_> {
    fn drop(&mut self) {
        self.counts.subscribers.fetch_sub(1, Ordering::Relaxed);
        self.counts.subscriptions.fetch_sub(self.topics.len(), Ordering::Relaxed);
    }
}
