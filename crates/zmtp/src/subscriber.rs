//! The SUB socket: receives messages from publishers.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream, SelectAll};
use moongate_backoff::Backoff;
use tokio::net::TcpStream;

use crate::accept::ZmtpAcceptor;
use crate::codec::{ZmtpMessage, ZmtpSocketType};
use crate::connection::ZmtpConnection;
use crate::{ZmtpEndpoint, ZmtpError, ZmtpOptions};

/// One connection to a publisher. A publisher that reconnects is a new peer: messages sent in between are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublisherPeer {
    /// Unique id within its [`ZmtpSubscriber`].
    pub id: u64,
    /// Network address of the publisher.
    pub address: SocketAddr,
}

/// Event of a [`ZmtpSubscriber`].
#[derive(Debug)]
pub enum SubscriberEvent {
    /// A peer is connected and has been sent the subscriptions. It may have published messages before it applied them.
    Connected(PublisherPeer),
    /// A message of a connected peer, in order.
    Message(PublisherPeer, ZmtpMessage),
    /// A connected peer has disconnected. No more messages arrive from it.
    Disconnected(PublisherPeer, ZmtpError),
    /// A connection failed before `Connected`. `None`: the connection to the configured endpoint, which is retried.
    Failed(Option<SocketAddr>, ZmtpError),
}

/// Receives messages of one publisher that it connects to, or of all publishers that connect to it.
///
/// It reads only as fast as [`recv`](Self::recv) is called and queues nothing itself: with a slow caller the publisher's queue fills, and
/// the publisher drops messages.
pub struct ZmtpSubscriber {
    config: Arc<SubscriberConfig>,
    bound: Option<BoundSocket>,
    peers: SelectAll<BoxStream<'static, SubscriberEvent>>,
}

struct SubscriberConfig {
    topics: Vec<Bytes>,
    options: ZmtpOptions,
}

struct BoundSocket {
    address: SocketAddr,
    accepted: BoxStream<'static, (TcpStream, SocketAddr)>,
    next_id: u64,
}

impl ZmtpSubscriber {
    /// Connects to a publisher, with reconnects. `topics` are prefixes of a message's first part; an empty one matches all messages.
    pub fn connect(endpoint: ZmtpEndpoint, topics: Vec<Bytes>, options: ZmtpOptions) -> Self {
        let config = Arc::new(SubscriberConfig { topics, options });
        let dialer = PublisherDialer {
            backoff: Backoff::new(options.retry),
            config: Arc::clone(&config),
            endpoint,
            open: None,
            next_id: 0,
        };
        let events =
            stream::unfold(dialer, |mut dialer| async move { Some((dialer.next_event().await, dialer)) });
        let mut peers = SelectAll::new();
        peers.push(events.boxed());
        Self { config, bound: None, peers }
    }

    /// Accepts publishers that connect to this socket.
    ///
    /// # Errors
    /// If the endpoint cannot be bound.
    pub async fn bind(
        endpoint: &ZmtpEndpoint,
        topics: Vec<Bytes>,
        options: ZmtpOptions,
    ) -> Result<Self, ZmtpError> {
        let acceptor = ZmtpAcceptor::bind(endpoint).await?;
        let address = acceptor.local_addr()?;
        let accepted =
            stream::unfold(acceptor, |acceptor| async move { Some((acceptor.accept().await, acceptor)) });
        let bound = BoundSocket { address, accepted: accepted.boxed(), next_id: 0 };
        Ok(Self {
            config: Arc::new(SubscriberConfig { topics, options }),
            bound: Some(bound),
            peers: SelectAll::new(),
        })
    }

    /// The address that a bound socket listens on; `None` if it connects.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.bound.as_ref().map(|bound| bound.address)
    }

    /// Waits for the next event. Cancel-safe: no event is lost if the future is dropped.
    pub async fn recv(&mut self) -> SubscriberEvent {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<SubscriberEvent> {
        loop {
            self.poll_accept(cx);
            let peers = self.peers.len();
            match self.peers.poll_next_unpin(cx) {
                Poll::Ready(Some(event)) => return Poll::Ready(event),
                // The end of a peer allows accepting another.
                _ if self.peers.len() < peers => {}
                _ => return Poll::Pending,
            }
        }
    }

    fn poll_accept(&mut self, cx: &mut Context<'_>) {
        let Some(bound) = &mut self.bound else { return };
        while self.peers.len() < self.config.options.max_peers {
            let Poll::Ready(Some((stream, address))) = bound.accepted.poll_next_unpin(cx) else { return };
            let peer = PublisherPeer { id: bound.next_id, address };
            bound.next_id += 1;
            let publisher = InboundPublisher::Accepted(stream, peer, Arc::clone(&self.config));
            self.peers.push(stream::unfold(publisher, InboundPublisher::next_event).boxed());
        }
    }
}

impl SubscriberConfig {
    /// Sends the subscriptions on a new connection.
    async fn subscribe(&self, connection: &mut ZmtpConnection) -> Result<(), ZmtpError> {
        for topic in &self.topics {
            connection.subscribe(topic);
        }
        connection.flush().await
    }
}

/// State of a publisher that connected to this socket.
enum InboundPublisher {
    Accepted(TcpStream, PublisherPeer, Arc<SubscriberConfig>),
    Open(ZmtpConnection, PublisherPeer),
    Closed,
}

impl InboundPublisher {
    async fn next_event(self) -> Option<(SubscriberEvent, Self)> {
        match self {
            Self::Accepted(stream, peer, config) => {
                let handshake = async {
                    let mut connection =
                        ZmtpConnection::accepted(stream, ZmtpSocketType::Sub, &config.options).await?;
                    config.subscribe(&mut connection).await?;
                    Ok(connection)
                };
                Some(match handshake.await {
                    Ok(connection) => (SubscriberEvent::Connected(peer), Self::Open(connection, peer)),
                    Err(error) => (SubscriberEvent::Failed(Some(peer.address), error), Self::Closed),
                })
            }
            Self::Open(mut connection, peer) => Some(match connection.next_message().await {
                Ok(message) => (SubscriberEvent::Message(peer, message), Self::Open(connection, peer)),
                Err(error) => (SubscriberEvent::Disconnected(peer, error), Self::Closed),
            }),
            Self::Closed => None,
        }
    }
}

/// Keeps a connection to one publisher open, with reconnects.
struct PublisherDialer {
    config: Arc<SubscriberConfig>,
    endpoint: ZmtpEndpoint,
    backoff: Backoff,
    open: Option<(ZmtpConnection, PublisherPeer, Instant)>,
    next_id: u64,
}

impl PublisherDialer {
    async fn next_event(&mut self) -> SubscriberEvent {
        let Some((connection, peer, since)) = &mut self.open else {
            tokio::time::sleep(self.backoff.jittered_pause()).await;
            return self.dial().await.unwrap_or_else(|error| {
                self.backoff.record_failure();
                SubscriberEvent::Failed(None, error)
            });
        };
        match connection.next_message().await {
            Ok(message) => SubscriberEvent::Message(*peer, message),
            Err(error) => {
                let event = SubscriberEvent::Disconnected(*peer, error);
                let lifetime = since.elapsed();
                self.record_end(lifetime);
                self.open = None;
                event
            }
        }
    }

    /// Records the end of a connection. One that broke at once counts as a failure: a peer that accepts and closes must not be redialled
    /// without a pause.
    fn record_end(&mut self, lifetime: Duration) {
        if lifetime >= self.config.options.retry.max {
            self.backoff.reset();
        } else {
            self.backoff.record_failure();
        }
    }

    async fn dial(&mut self) -> Result<SubscriberEvent, ZmtpError> {
        let mut connection =
            ZmtpConnection::dial(&self.endpoint, ZmtpSocketType::Sub, &self.config.options).await?;
        self.config.subscribe(&mut connection).await?;
        let peer = PublisherPeer { id: self.next_id, address: connection.peer_addr()? };
        self.next_id += 1;
        self.open = Some((connection, peer, Instant::now()));
        Ok(SubscriberEvent::Connected(peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_long_connection_resets_the_backoff() {
        let options = ZmtpOptions::default();
        let mut dialer = PublisherDialer {
            config: Arc::new(SubscriberConfig { topics: Vec::new(), options }),
            endpoint: "tcp://127.0.0.1:1".parse().unwrap(),
            backoff: Backoff::new(options.retry),
            open: None,
            next_id: 0,
        };
        dialer.record_end(Duration::from_millis(3));
        assert_eq!(dialer.backoff.pause(), options.retry.initial);
        dialer.record_end(options.retry.max);
        assert_eq!(dialer.backoff.pause(), Duration::ZERO);
    }
}
