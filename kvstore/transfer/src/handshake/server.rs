//! Server of the handshake port.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use moongate_runtime::net::TcpListener;
use moongate_runtime::{PeerTls, Supervisor, describe_tls_error};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

use super::frame::{self, HandshakeKind};
use crate::allowed_peers::AllowedPeers;
use crate::descriptor::SegmentDescriptor;

/// Pause after a failed accept, which mostly means that the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Produces the responses of the handshake port.
pub trait HandshakeHandler: Send + Sync + 'static {
    /// Returns the JSON of the response. `request` is the request's JSON, unvalidated.
    fn respond(&self, kind: HandshakeKind, request: &[u8]) -> Vec<u8>;
}

/// Responses of a node that supports TCP only.
#[derive(Debug)]
pub struct TcpHandshakeHandler {
    /// The node's descriptor, replaceable at run time.
    pub descriptor: ArcSwap<SegmentDescriptor>,
}

impl HandshakeHandler for TcpHandshakeHandler {
    fn respond(&self, kind: HandshakeKind, _: &[u8]) -> Vec<u8> {
        match kind {
            HandshakeKind::Metadata => serde_json::to_vec(&**self.descriptor.load()).unwrap_or_default(),
            HandshakeKind::Probe => br#"{"status":"success"}"#.to_vec(),
            HandshakeKind::Notify => br#"{"name":"","notify_msg":"success"}"#.to_vec(),
            HandshakeKind::Connection | HandshakeKind::Legacy => {
                br#"{"local_nic_path":"","peer_nic_path":"","qp_num":[],"reply_msg":"this node has no RDMA device"}"#
                    .to_vec()
            }
        }
    }
}

/// Connection and time limits of the handshake port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeLimits {
    /// Maximum number of open handshakes. A further one evicts the oldest that is already answered, or else the oldest that has not sent
    /// its request.
    pub connections: usize,
    /// Time limit for a whole handshake.
    pub time: Duration,
}

impl Default for HandshakeLimits {
    fn default() -> Self {
        Self { connections: 128, time: Duration::from_secs(10) }
    }
}

/// Who may send handshakes.
#[derive(Clone, Debug)]
pub struct HandshakeOptions {
    pub peers: AllowedPeers,
    /// With it, clients must present a certificate.
    pub tls: Option<PeerTls>,
    pub limits: HandshakeLimits,
}

/// Serves handshakes until the supervisor's shutdown.
pub fn listen(
    listener: TcpListener,
    handler: Arc<dyn HandshakeHandler>,
    options: HandshakeOptions,
    supervisor: &Supervisor,
) {
    let HandshakeOptions { peers, tls, limits } = options;
    let stop = supervisor.token();
    let open = Arc::new(OpenHandshakes { limit: limits.connections.max(1), queues: Mutex::default() });
    let tasks = supervisor.clone();
    supervisor.spawn_essential("handshake-listener", async move {
        let accept = async {
            loop {
                let (stream, peer) = match listener.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a handshake connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                };
                // It fails only if the connection is already gone.
                let _ = stream.set_nodelay(true);
                if !peers.allow(peer.ip()) {
                    tracing::warn!(%peer, allowed = %peers, "handshake rejected: address not allowed");
                    continue;
                }
                let (handler, tls) = (Arc::clone(&handler), tls.clone());
                let handshake = open.admit(&stop);
                tasks.spawn("handshake", async move {
                    let handled = async {
                        match tls {
                            None => handle(stream, &*handler, &handshake).await,
                            Some(tls) => handle(tls.accept(stream).await?.0, &*handler, &handshake).await,
                        }
                    };
                    let exchange = tokio::time::timeout(limits.time, handled);
                    let outcome = handshake.evicted.run_until_cancelled(exchange).await;
                    log_outcome(peer, outcome);
                });
            }
        };
        stop.run_until_cancelled(accept).await;
    });
}

fn log_outcome(peer: SocketAddr, outcome: Option<Result<io::Result<()>, tokio::time::error::Elapsed>>) {
    match outcome {
        // Port probes connect and close without a request.
        None | Some(Ok(Ok(()))) => {}
        Some(Ok(Err(error))) if error.kind() == io::ErrorKind::UnexpectedEof => {}
        Some(Ok(Err(error))) => {
            tracing::debug!(%peer, error = describe_tls_error(&error), "handshake failed");
        }
        Some(Err(_)) => tracing::debug!(%peer, "handshake timed out"),
    }
}

/// Registry of open handshakes, bounded by `limit`.
struct OpenHandshakes {
    limit: usize,
    queues: Mutex<HandshakeQueues>,
}

/// Queues in order of arrival.
#[derive(Default)]
struct HandshakeQueues {
    next: u64,
    /// Handshakes without a response yet.
    pending: VecDeque<(u64, CancellationToken)>,
    /// Answered handshakes that wait for the peer to close.
    answered: VecDeque<(u64, CancellationToken)>,
}

/// Registration of an open handshake, removed on drop.
struct HandshakeGuard {
    open: Arc<OpenHandshakes>,
    number: u64,
    evicted: CancellationToken,
}

impl OpenHandshakes {
    fn admit(self: &Arc<Self>, stop: &CancellationToken) -> HandshakeGuard {
        let mut queues = self.queues.lock();
        if queues.pending.len() + queues.answered.len() >= self.limit
            && let Some((_, oldest)) = queues.answered.pop_front().or_else(|| queues.pending.pop_front())
        {
            oldest.cancel();
        }
        let (number, evicted) = (queues.next, stop.child_token());
        queues.next += 1;
        queues.pending.push_back((number, evicted.clone()));
        HandshakeGuard { open: Arc::clone(self), number, evicted }
    }
}

impl HandshakeGuard {
    fn has_answered(&self) {
        let mut queues = self.open.queues.lock();
        queues.remove(self.number);
        queues.answered.push_back((self.number, self.evicted.clone()));
    }
}

impl Drop for HandshakeGuard {
    fn drop(&mut self) {
        self.open.queues.lock().remove(self.number);
    }
}

impl HandshakeQueues {
    fn remove(&mut self, number: u64) {
        self.pending.retain(|(other, _)| *other != number);
        self.answered.retain(|(other, _)| *other != number);
    }
}

async fn handle(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    handler: &dyn HandshakeHandler,
    handshake: &HandshakeGuard,
) -> io::Result<()> {
    let (kind, request) = frame::read(&mut stream).await?;
    let response = handler.respond(kind, &request);
    stream.write_all(&frame::encode(kind, &response)).await?;
    stream.shutdown().await?;
    handshake.has_answered();
    // Closing before the peer has read could discard unread bytes of the response.
    stream.read(&mut [0]).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;
    use crate::handshake::request as send_request;

    async fn node(peers: &str, limits: HandshakeLimits) -> (String, Supervisor) {
        let supervisor = Supervisor::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let descriptor = SegmentDescriptor { name: address.clone(), ..Default::default() };
        let node = Arc::new(TcpHandshakeHandler { descriptor: ArcSwap::from_pointee(descriptor) });
        let options = HandshakeOptions { peers: peers.parse().unwrap(), tls: None, limits };
        listen(listener, node, options, &supervisor);
        (address, supervisor)
    }

    #[tokio::test]
    async fn all_kinds_are_answered() {
        let (address, supervisor) = node("127.0.0.1", HandshakeLimits::default()).await;
        for (kind, expected) in [
            (HandshakeKind::Metadata, format!(r#""name":"{address}""#)),
            (HandshakeKind::Probe, r#"{"status":"success"}"#.to_owned()),
            (HandshakeKind::Notify, "success".to_owned()),
            (HandshakeKind::Connection, "no RDMA device".to_owned()),
            (HandshakeKind::Legacy, "no RDMA device".to_owned()),
        ] {
            let response = String::from_utf8(send_request(&address, kind, b"{}").await.unwrap()).unwrap();
            assert!(response.contains(&expected), "{kind:?}: {response}");
        }
        supervisor.shutdown(Duration::from_secs(30)).await.unwrap();
    }

    #[tokio::test]
    async fn peers_outside_the_allowed_networks_are_rejected() {
        let (address, _supervisor) = node("10.0.0.0/8", HandshakeLimits::default()).await;
        assert!(send_request(&address, HandshakeKind::Metadata, b"{}").await.is_err());
    }

    #[tokio::test]
    async fn silent_connections_do_not_delay_others() {
        // Longer than the test's timeout.
        let limits = HandshakeLimits { time: Duration::from_secs(600), ..HandshakeLimits::default() };
        let (address, _supervisor) = node("127.0.0.1", limits).await;
        let mut silent = Vec::new();
        for _ in 0..140 {
            silent.push(TcpStream::connect(&address).await.unwrap());
        }
        for _ in 0..10 {
            let probe = tokio::time::timeout(
                Duration::from_secs(60),
                send_request(&address, HandshakeKind::Probe, b"{}"),
            )
            .await;
            assert!(probe.unwrap().is_ok());
        }
        // The oldest was evicted, and the newest are still open.
        let mut oldest = silent.remove(0);
        assert_eq!(oldest.read(&mut [0]).await.unwrap_or(0), 0);
        let mut youngest = silent.pop().unwrap();
        youngest.write_all(&frame::encode(HandshakeKind::Probe, b"{}")).await.unwrap();
        assert_eq!(frame::read(&mut youngest).await.unwrap().0, HandshakeKind::Probe);
    }
}
