//! The SUB socket.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream, SelectAll};
use tokio::net::TcpStream;

use crate::accept::Acceptor;
use crate::backoff::Backoff;
use crate::codec::{Message, SocketType};
use crate::connection::Connection;
use crate::{Endpoint, Error, Options};

/// One connection to a publisher. A publisher that comes back is a new peer: what it sent meanwhile is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Unique within its [`Subscriber`].
    pub id: u64,
    /// The publisher's address.
    pub address: SocketAddr,
}

/// What a [`Subscriber`] tells.
#[derive(Debug)]
pub enum Event {
    /// A peer is there, and has been sent our subscriptions. It may already have missed to send messages.
    Connected(Peer),
    /// A message of a connected peer, in its order.
    Message(Peer, Message),
    /// A connected peer is gone. Nothing more comes from it.
    Disconnected(Peer, Error),
    /// A connection could not be had; no peer was announced. `None` is the endpoint that we connect to, which is tried again.
    Failed(Option<SocketAddr>, Error),
}

/// Receives what publishers send, from one that it connects to or from all that connect to it.
///
/// It reads as fast as [`recv`](Self::recv) is called and queues nothing itself: with a slow caller the publisher's queue fills, and
/// the publisher loses messages.
pub struct Subscriber {
    shared: Arc<Shared>,
    bound: Option<Bound>,
    peers: SelectAll<BoxStream<'static, Event>>,
}

struct Shared {
    topics: Vec<Bytes>,
    options: Options,
}

struct Bound {
    address: SocketAddr,
    accepted: BoxStream<'static, (TcpStream, SocketAddr)>,
    next_id: u64,
}

impl Subscriber {
    /// Connects to a publisher, again and again. `topics` are prefixes of a message's first part; an empty one takes all.
    pub fn connect(endpoint: Endpoint, topics: Vec<Bytes>, options: Options) -> Self {
        let shared = Arc::new(Shared { topics, options });
        let dialer = Dialer {
            backoff: Backoff::new(options.retry),
            shared: Arc::clone(&shared),
            endpoint,
            open: None,
            next_id: 0,
        };
        let events = stream::unfold(dialer, |mut dialer| async move { Some((dialer.step().await, dialer)) });
        let mut peers = SelectAll::new();
        peers.push(events.boxed());
        Self { shared, bound: None, peers }
    }

    /// Takes publishers that connect to us.
    ///
    /// # Errors
    /// If the endpoint cannot be bound.
    pub async fn bind(endpoint: &Endpoint, topics: Vec<Bytes>, options: Options) -> Result<Self, Error> {
        let acceptor = Acceptor::bind(endpoint).await?;
        let address = acceptor.local_addr()?;
        let accepted =
            stream::unfold(acceptor, |acceptor| async move { Some((acceptor.accept().await, acceptor)) });
        let bound = Bound { address, accepted: accepted.boxed(), next_id: 0 };
        Ok(Self { shared: Arc::new(Shared { topics, options }), bound: Some(bound), peers: SelectAll::new() })
    }

    /// The address that a bound socket listens on; `None` if it connects.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.bound.as_ref().map(|bound| bound.address)
    }

    /// What happens next. Cancel-safe: no event is lost if the future is dropped.
    pub async fn recv(&mut self) -> Event {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        loop {
            self.poll_accept(cx);
            let peers = self.peers.len();
            match self.peers.poll_next_unpin(cx) {
                Poll::Ready(Some(event)) => return Poll::Ready(event),
                // A peer that has ended makes room for another.
                _ if self.peers.len() < peers => {}
                _ => return Poll::Pending,
            }
        }
    }

    fn poll_accept(&mut self, cx: &mut Context<'_>) {
        let Some(bound) = &mut self.bound else { return };
        while self.peers.len() < self.shared.options.peers {
            let Poll::Ready(Some((stream, address))) = bound.accepted.poll_next_unpin(cx) else { return };
            let peer = Peer { id: bound.next_id, address };
            bound.next_id += 1;
            let visit = Visit::New(stream, peer, Arc::clone(&self.shared));
            self.peers.push(stream::unfold(visit, Visit::step).boxed());
        }
    }
}

impl Shared {
    /// Sends the subscriptions on a new connection.
    async fn subscribe(&self, connection: &mut Connection) -> Result<(), Error> {
        for topic in &self.topics {
            connection.subscribe(topic);
        }
        connection.flush().await
    }
}

/// A publisher that connected to us, for as long as it stays.
enum Visit {
    New(TcpStream, Peer, Arc<Shared>),
    Open(Connection, Peer),
    Over,
}

impl Visit {
    async fn step(self) -> Option<(Event, Self)> {
        match self {
            Self::New(stream, peer, shared) => {
                let shaken = async {
                    let mut connection =
                        Connection::accepted(stream, SocketType::Sub, &shared.options).await?;
                    shared.subscribe(&mut connection).await?;
                    Ok(connection)
                };
                Some(match shaken.await {
                    Ok(connection) => (Event::Connected(peer), Self::Open(connection, peer)),
                    Err(error) => (Event::Failed(Some(peer.address), error), Self::Over),
                })
            }
            Self::Open(mut connection, peer) => Some(match connection.message().await {
                Ok(message) => (Event::Message(peer, message), Self::Open(connection, peer)),
                Err(error) => (Event::Disconnected(peer, error), Self::Over),
            }),
            Self::Over => None,
        }
    }
}

/// Keeps a connection to one publisher.
struct Dialer {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    backoff: Backoff,
    open: Option<(Connection, Peer, Instant)>,
    next_id: u64,
}

impl Dialer {
    async fn step(&mut self) -> Event {
        let Some((connection, peer, since)) = &mut self.open else {
            tokio::time::sleep(self.backoff.pause(fastrand::f64())).await;
            return self.dial().await.unwrap_or_else(|error| {
                self.backoff.failed();
                Event::Failed(None, error)
            });
        };
        match connection.message().await {
            Ok(message) => Event::Message(*peer, message),
            Err(error) => {
                let event = Event::Disconnected(*peer, error);
                self.backoff.ended(since.elapsed());
                self.open = None;
                event
            }
        }
    }

    async fn dial(&mut self) -> Result<Event, Error> {
        let mut connection = Connection::dial(&self.endpoint, SocketType::Sub, &self.shared.options).await?;
        self.shared.subscribe(&mut connection).await?;
        let peer = Peer { id: self.next_id, address: connection.peer_addr()? };
        self.next_id += 1;
        self.open = Some((connection, peer, Instant::now()));
        Ok(Event::Connected(peer))
    }
}
