//! A silent connection to one node.

use std::time::{Duration, Instant};

use futures_util::stream::{self, BoxStream, StreamExt as _};
use moongate_runtime::PeerTls;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::TcpStream;

use super::Loss;
use super::Options;
use super::descriptor::{Lookup, LookupError};
use crate::backoff::Backoff;

/// A host that vanishes says nothing. Its kernel is asked after this time of silence, and so often.
const PROBE_AFTER: Duration = Duration::from_secs(1);
const PROBES: u32 = 3;
/// A connection that lasted for less was closed by a node that keeps none.
const LASTED: Duration = Duration::from_secs(1);
/// So many such connections in a row, and the node is left alone.
const SHORT_ONES: u32 = 3;

/// What happens on a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LineEvent {
    /// The node is connected.
    Open,
    /// The node was connected, and cannot be reached again.
    Closed(Loss),
    /// The node cannot be watched in this way, and this is the last event.
    Useless(String),
}

/// Holds a line to the node at `endpoint` for as long as the stream is polled.
pub(super) fn events(endpoint: String, lookup: Lookup, options: &Options) -> BoxStream<'static, LineEvent> {
    let line = Line {
        endpoint,
        lookup,
        limit: options.connect_limit,
        backoff: Backoff::new(options.retry),
        held: None,
        address: None,
        short_ones: 0,
        over: false,
    };
    stream::unfold(line, |mut line| async move {
        let event = line.step().await?;
        Some((event, line))
    })
    .boxed()
}

/// A connection on which nothing is sent.
type HeldStream = Box<dyn AsyncRead + Send + Unpin>;

struct Line {
    endpoint: String,
    lookup: Lookup,
    limit: Duration,
    backoff: Backoff,
    held: Option<(HeldStream, Instant)>,
    /// Where the node was connected last.
    address: Option<(String, u16)>,
    short_ones: u32,
    over: bool,
}

impl Line {
    async fn step(&mut self) -> Option<LineEvent> {
        if self.over {
            return None;
        }
        loop {
            match self.held.take() {
                None => {
                    tokio::time::sleep(self.backoff.pause()).await;
                    match self.open().await {
                        Ok(_) => return Some(LineEvent::Open),
                        Err(LookupError::NoPort(protocol)) => {
                            return Some(self.useless(LookupError::NoPort(protocol).to_string()));
                        }
                        Err(LookupError::Unknown(reason)) => {
                            tracing::debug!(
                                endpoint = self.endpoint,
                                reason,
                                "no connection to a store node"
                            );
                            self.backoff.failed();
                        }
                    }
                }
                Some((stream, since)) => {
                    let ended = end_of(stream).await;
                    if let Some(event) = self.again(&ended, since).await {
                        return Some(event);
                    }
                }
            }
        }
    }

    /// A connection has ended. Nothing has happened if the same port can be reached at once.
    async fn again(&mut self, ended: &str, since: Instant) -> Option<LineEvent> {
        self.short_ones = if since.elapsed() < LASTED { self.short_ones + 1 } else { 0 };
        let before = self.address.take();
        match self.open().await {
            Ok(()) if self.address != before => {
                // The next step tells that the node is there.
                self.held = None;
                Some(LineEvent::Closed(Loss::Replaced))
            }
            Ok(()) if self.short_ones >= SHORT_ONES => {
                Some(self.useless(format!("it closes silent connections: {ended}")))
            }
            Ok(()) => None,
            Err(error) => {
                self.backoff.failed();
                Some(LineEvent::Closed(Loss::Unreachable(format!("{ended}, then {error}"))))
            }
        }
    }

    async fn open(&mut self) -> Result<(), LookupError> {
        let late = |what: &str| LookupError::Unknown(format!("{what} took longer than {:?}", self.limit));
        let lookup = self.lookup.transfer_address(&self.endpoint);
        let address = tokio::time::timeout(self.limit, lookup)
            .await
            .map_err(|_| late("asking for its transfer port"))??;
        let connecting = connect(address.0.as_str(), address.1, self.lookup.tls());
        let stream = tokio::time::timeout(self.limit, connecting)
            .await
            .map_err(|_| late("connecting to its transfer port"))?
            .map_err(|error| LookupError::Unknown(error.to_string()))?;
        self.backoff.succeeded();
        self.held = Some((stream, Instant::now()));
        self.address = Some(address);
        Ok(())
    }

    fn useless(&mut self, reason: String) -> LineEvent {
        self.over = true;
        self.held = None;
        LineEvent::Useless(reason)
    }
}

async fn connect(host: &str, port: u16, tls: Option<&PeerTls>) -> std::io::Result<HeldStream> {
    let stream = TcpStream::connect((host, port)).await?;
    probed(&stream)?;
    Ok(match tls {
        None => Box::new(stream),
        Some(tls) => Box::new(tls.connect(host, stream).await?),
    })
}

/// Has the kernel find out when the host at the other end is gone.
fn probed(stream: &TcpStream) -> std::io::Result<()> {
    let probes = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_AFTER).with_retries(PROBES);
    SockRef::from(stream).set_tcp_keepalive(&probes)
}

/// Waits for a connection to end; tells how it did. A node does not speak before it is asked for something.
async fn end_of(mut stream: HeldStream) -> String {
    match stream.read(&mut [0]).await {
        Ok(0) => "end of stream".to_owned(),
        Ok(_) => "it spoke without being asked".to_owned(),
        Err(error) => error.to_string(),
    }
}
