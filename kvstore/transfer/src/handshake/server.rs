//! Answering handshakes.

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

/// What is answered to a question.
pub trait HandshakeHandler: Send + Sync + 'static {
    /// The JSON of the answer. `question` is the JSON of the question as it came, unchecked.
    fn respond(&self, kind: HandshakeKind, question: &[u8]) -> Vec<u8>;
}

/// What a node answers that is reached over TCP only.
#[derive(Debug)]
pub struct TcpHandshakeHandler {
    /// Its descriptor, which may change.
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

/// What the handshake port takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeLimits {
    /// Handshakes at once. A further one takes the place of the oldest that is answered already, or else of the oldest that has
    /// not sent its question.
    pub connections: usize,
    /// Time for a whole handshake.
    pub time: Duration,
}

impl Default for HandshakeLimits {
    fn default() -> Self {
        Self { connections: 128, time: Duration::from_secs(10) }
    }
}

/// Answers the handshakes of `peers` until `stop` is cancelled. With `tls`, they must show a certificate.
pub fn listen(
    listener: TcpListener,
    answers: Arc<dyn HandshakeHandler>,
    peers: AllowedPeers,
    tls: Option<PeerTls>,
    limits: HandshakeLimits,
    stop: CancellationToken,
    supervisor: &Supervisor,
) {
    let open = Arc::new(OpenHandshakes { limit: limits.connections.max(1), queues: Mutex::default() });
    let tasks = supervisor.clone();
    supervisor.spawn_essential("handshake-listener", async move {
        let accept = async {
            loop {
                let (stream, peer) = match listener.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "cannot take a handshake");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                };
                // Where it fails, the connection is gone.
                let _ = stream.set_nodelay(true);
                if !peers.allow(peer.ip()) {
                    tracing::warn!(%peer, allowed = %peers, "a handshake from elsewhere is refused");
                    continue;
                }
                let (answers, tls) = (Arc::clone(&answers), tls.clone());
                let handshake = open.admit(&stop);
                tasks.spawn("handshake", async move {
                    let handled = async {
                        match tls {
                            None => handle(stream, &*answers, &handshake).await,
                            Some(tls) => handle(tls.accept(stream).await?.0, &*answers, &handshake).await,
                        }
                    };
                    let exchange = tokio::time::timeout(limits.time, handled);
                    let ended = handshake.evicted.run_until_cancelled(exchange).await;
                    log_outcome(peer, ended);
                });
            }
        };
        stop.run_until_cancelled(accept).await;
    });
}

fn log_outcome(peer: SocketAddr, ended: Option<Result<io::Result<()>, tokio::time::error::Elapsed>>) {
    match ended {
        // Whoever looks whether the port is open says nothing.
        None | Some(Ok(Ok(()))) => {}
        Some(Ok(Err(error))) if error.kind() == io::ErrorKind::UnexpectedEof => {}
        Some(Ok(Err(error))) => {
            tracing::debug!(%peer, error = describe_tls_error(&error), "a handshake has failed");
        }
        Some(Err(_)) => tracing::debug!(%peer, "a handshake has taken too long"),
    }
}

/// Handshakes that are open.
struct OpenHandshakes {
    limit: usize,
    queues: Mutex<HandshakeQueues>,
}

/// In the order in which they came.
#[derive(Default)]
struct HandshakeQueues {
    next: u64,
    /// Those that have not been answered.
    pending: VecDeque<(u64, CancellationToken)>,
    /// Those that have, and wait for their peer to close.
    answered: VecDeque<(u64, CancellationToken)>,
}

/// A handshake that is open, until it is dropped.
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
    answers: &dyn HandshakeHandler,
    handshake: &HandshakeGuard,
) -> io::Result<()> {
    let (kind, question) = frame::read(&mut stream).await?;
    let answer = answers.respond(kind, &question);
    stream.write_all(&frame::encode(kind, &answer)).await?;
    stream.shutdown().await?;
    handshake.has_answered();
    // Closing before the peer has read could destroy what it has not read yet.
    stream.read(&mut [0]).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;
    use crate::handshake::request;

    async fn node(peers: &str, limits: HandshakeLimits) -> (String, Supervisor) {
        let supervisor = Supervisor::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let descriptor = SegmentDescriptor { name: address.clone(), ..Default::default() };
        let node = Arc::new(TcpHandshakeHandler { descriptor: ArcSwap::from_pointee(descriptor) });
        listen(listener, node, peers.parse().unwrap(), None, limits, supervisor.token(), &supervisor);
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
            let answer = String::from_utf8(request(&address, kind, b"{}").await.unwrap()).unwrap();
            assert!(answer.contains(&expected), "{kind:?}: {answer}");
        }
        supervisor.shutdown(Duration::from_secs(30)).await.unwrap();
    }

    #[tokio::test]
    async fn strangers_are_turned_away() {
        let (address, _supervisor) = node("10.0.0.0/8", HandshakeLimits::default()).await;
        assert!(request(&address, HandshakeKind::Metadata, b"{}").await.is_err());
    }

    #[tokio::test]
    async fn silent_connections_delay_nobody() {
        // Longer than the test may take.
        let limits = HandshakeLimits { time: Duration::from_secs(600), ..HandshakeLimits::default() };
        let (address, _supervisor) = node("127.0.0.1", limits).await;
        let mut silent = Vec::new();
        for _ in 0..140 {
            silent.push(TcpStream::connect(&address).await.unwrap());
        }
        for _ in 0..10 {
            let asked =
                tokio::time::timeout(Duration::from_secs(60), request(&address, HandshakeKind::Probe, b"{}"))
                    .await;
            assert!(asked.unwrap().is_ok());
        }
        // The oldest made room, and the youngest are still there.
        let mut oldest = silent.remove(0);
        assert_eq!(oldest.read(&mut [0]).await.unwrap_or(0), 0);
        let mut youngest = silent.pop().unwrap();
        youngest.write_all(&frame::encode(HandshakeKind::Probe, b"{}")).await.unwrap();
        assert_eq!(frame::read(&mut youngest).await.unwrap().0, HandshakeKind::Probe);
    }
}
