//! An idle connection to a node, whose end signals the node's death.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, BoxStream, StreamExt as _};
use moongate_runtime::{Backoff, PeerTls};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::TcpStream;

use super::NodeLossReason;
use super::NodeWatchOptions;
use super::descriptor::{DescriptorLookup, DescriptorLookupError};

/// Idle time before the first TCP keepalive probe, and between probes. They detect a host that is gone without closing connections.
const PROBE_AFTER: Duration = Duration::from_secs(1);
const PROBES: u32 = 3;
/// Connections that last shorter than this count as closed by a node that rejects idle connections.
const MIN_LIFETIME: Duration = Duration::from_secs(1);
/// Number of consecutive short connections after which the node is no longer watched.
const MAX_SHORT_CONNECTIONS: u32 = 3;

/// Why no connection to a node's transfer port was opened.
#[derive(Debug, thiserror::Error)]
pub enum NodeConnectError {
    #[error("the lookup of its transfer port took longer than {0:?}")]
    LookupTimedOut(Duration),
    #[error(transparent)]
    Lookup(#[from] DescriptorLookupError),
    #[error("the connection to its transfer port took longer than {0:?}")]
    ConnectTimedOut(Duration),
    #[error(transparent)]
    Connect(#[from] io::Error),
}

/// How an idle connection to a node ended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum IdleConnectionError {
    /// The node closed it.
    #[error("end of stream")]
    EndOfStream,
    /// A node sends nothing before it receives a request, so another program listens there.
    #[error("it sent data without a request")]
    UnexpectedData,
    #[error("{0}")]
    Io(#[source] Arc<io::Error>),
}

/// Why a node cannot be watched by a connection.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum UnwatchableNodeError {
    #[error(transparent)]
    NoPort(Arc<DescriptorLookupError>),
    #[error("it closes idle connections: {0}")]
    ClosesIdle(#[source] IdleConnectionError),
}

/// An event of a node's connection.
#[derive(Clone, Debug)]
pub(super) enum NodeConnectionEvent {
    /// The connection to the node was established.
    Connected,
    /// The connection ended, and the node could not be reached again.
    Closed(NodeLossReason),
    /// The node cannot be watched by a connection. This is the last event.
    Unwatchable(UnwatchableNodeError),
}

/// Keeps a connection to the node at `endpoint` while the stream is polled.
pub(super) fn events(
    endpoint: String,
    lookup: DescriptorLookup,
    options: &NodeWatchOptions,
) -> BoxStream<'static, NodeConnectionEvent> {
    let connection = NodeConnection {
        endpoint,
        lookup,
        limit: options.connect_timeout,
        backoff: Backoff::new(options.retry),
        stream: None,
        address: None,
        short_connections: 0,
        finished: false,
    };
    stream::unfold(connection, |mut connection| async move {
        let event = connection.step().await?;
        Some((event, connection))
    })
    .boxed()
}

/// The stream of a connection on which nothing is sent.
type IdleStream = Box<dyn AsyncRead + Send + Unpin>;

struct NodeConnection {
    endpoint: String,
    lookup: DescriptorLookup,
    limit: Duration,
    backoff: Backoff,
    stream: Option<(IdleStream, Instant)>,
    /// Address of the last connection.
    address: Option<(String, u16)>,
    short_connections: u32,
    finished: bool,
}

impl NodeConnection {
    async fn step(&mut self) -> Option<NodeConnectionEvent> {
        if self.finished {
            return None;
        }
        loop {
            match self.stream.take() {
                None => {
                    tokio::time::sleep(self.backoff.jittered_pause()).await;
                    match self.open().await {
                        Ok(_) => return Some(NodeConnectionEvent::Connected),
                        Err(NodeConnectError::Lookup(error @ DescriptorLookupError::NoPort(_))) => {
                            return Some(self.give_up(UnwatchableNodeError::NoPort(Arc::new(error))));
                        }
                        Err(error) => {
                            tracing::debug!(
                                endpoint = self.endpoint,
                                reason = %error,
                                "no connection to a store node"
                            );
                            self.backoff.record_failure();
                        }
                    }
                }
                Some((stream, since)) => {
                    let ended = wait_closed(stream).await;
                    if let Some(event) = self.reconnect(ended, since).await {
                        return Some(event);
                    }
                }
            }
        }
    }

    /// Reconnects after the connection ended. No event if the same port is reachable at once.
    async fn reconnect(&mut self, ended: IdleConnectionError, since: Instant) -> Option<NodeConnectionEvent> {
        self.short_connections = if since.elapsed() < MIN_LIFETIME { self.short_connections + 1 } else { 0 };
        let before = self.address.take();
        match self.open().await {
            Ok(()) if self.address != before => {
                // The next step connects again and emits Connected.
                self.stream = None;
                Some(NodeConnectionEvent::Closed(NodeLossReason::Replaced))
            }
            Ok(()) if self.short_connections >= MAX_SHORT_CONNECTIONS => {
                Some(self.give_up(UnwatchableNodeError::ClosesIdle(ended)))
            }
            Ok(()) => None,
            Err(error) => {
                self.backoff.record_failure();
                let reason = NodeLossReason::Unreachable { ended, source: Arc::new(error) };
                Some(NodeConnectionEvent::Closed(reason))
            }
        }
    }

    async fn open(&mut self) -> Result<(), NodeConnectError> {
        let lookup = self.lookup.transfer_address(&self.endpoint);
        let address = tokio::time::timeout(self.limit, lookup)
            .await
            .map_err(|_| NodeConnectError::LookupTimedOut(self.limit))??;
        let connecting = connect(address.0.as_str(), address.1, self.lookup.tls());
        let stream = tokio::time::timeout(self.limit, connecting)
            .await
            .map_err(|_| NodeConnectError::ConnectTimedOut(self.limit))??;
        self.backoff.reset();
        self.stream = Some((stream, Instant::now()));
        self.address = Some(address);
        Ok(())
    }

    fn give_up(&mut self, reason: UnwatchableNodeError) -> NodeConnectionEvent {
        self.finished = true;
        self.stream = None;
        NodeConnectionEvent::Unwatchable(reason)
    }
}

async fn connect(host: &str, port: u16, tls: Option<&PeerTls>) -> io::Result<IdleStream> {
    let stream = TcpStream::connect((host, port)).await?;
    enable_keepalive(&stream)?;
    Ok(match tls {
        None => Box::new(stream),
        Some(tls) => Box::new(tls.connect(host, stream).await?),
    })
}

/// Enables TCP keepalive, so that the kernel detects when the remote host is gone.
fn enable_keepalive(stream: &TcpStream) -> io::Result<()> {
    let probes = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_AFTER).with_retries(PROBES);
    SockRef::from(stream).set_tcp_keepalive(&probes)
}

/// Waits until a connection ends, and returns how. A node sends nothing before it receives a request.
async fn wait_closed(mut stream: IdleStream) -> IdleConnectionError {
    match stream.read(&mut [0]).await {
        Ok(0) => IdleConnectionError::EndOfStream,
        Ok(_) => IdleConnectionError::UnexpectedData,
        Err(error) => IdleConnectionError::Io(Arc::new(error)),
    }
}
