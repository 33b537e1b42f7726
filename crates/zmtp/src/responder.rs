//! The ROUTER socket, as a server that responds to a request with any number of messages.

use std::convert::Infallible;
use std::net::SocketAddr;

use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt};
use tokio::net::TcpStream;

use crate::accept::ZmtpAcceptor;
use crate::codec::{ZmtpMessage, ZmtpSocketType};
use crate::connection::ZmtpConnection;
use crate::request::split_envelope;
use crate::{ZmtpEndpoint, ZmtpError, ZmtpOptions};

/// Responds to requests of REQ and DEALER sockets.
#[derive(Debug)]
pub struct ZmtpResponder {
    acceptor: ZmtpAcceptor,
    local_addr: SocketAddr,
    options: ZmtpOptions,
}

impl ZmtpResponder {
    /// Binds the socket. Requests wait until [`run`](Self::run) is polled.
    ///
    /// # Errors
    /// If the endpoint cannot be bound.
    pub async fn bind(endpoint: &ZmtpEndpoint, options: ZmtpOptions) -> Result<Self, ZmtpError> {
        let acceptor = ZmtpAcceptor::bind(endpoint).await?;
        let local_addr = acceptor.local_addr()?;
        Ok(Self { acceptor, local_addr, options })
    }

    /// The address that the socket listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Serves until dropped. `respond` receives a request without its envelope; the messages of its stream are sent with that envelope, as
    /// fast as the peer receives them. Requests of one peer are processed in sequence, those of several peers concurrently.
    pub async fn run<A, S>(self, respond: A)
    where
        A: Fn(ZmtpMessage) -> S,
        S: Stream<Item = ZmtpMessage>,
    {
        let mut peers = FuturesUnordered::new();
        loop {
            tokio::select! {
                (stream, address) = self.acceptor.accept(), if peers.len() < self.options.max_peers => {
                    let connection = serve_peer(stream, &respond, &self.options);
                    peers.push(async move { (address, connection.await) });
                }
                Some((address, Err(error))) = peers.next(), if !peers.is_empty() => {
                    tracing::debug!(%address, %error, "requester disconnected");
                }
            }
        }
    }
}

/// Serves one peer. Always ends with an error, at the latest when the peer disconnects.
async fn serve_peer<S>(
    stream: TcpStream,
    respond: &impl Fn(ZmtpMessage) -> S,
    options: &ZmtpOptions,
) -> Result<Infallible, ZmtpError>
where
    S: Stream<Item = ZmtpMessage>,
{
    let mut connection = ZmtpConnection::accepted(stream, ZmtpSocketType::Router, options).await?;
    loop {
        let (envelope, request) = split_envelope(connection.next_message().await?);
        let mut replies = std::pin::pin!(respond(request));
        while let Some(reply) = replies.next().await {
            connection.queue(&envelope, &reply);
            if !connection.can_queue() {
                connection.flush().await?;
            }
        }
        connection.flush().await?;
    }
}
