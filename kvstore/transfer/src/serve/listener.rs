//! Taking connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use moongate_runtime::Supervisor;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::Options;
use super::connection::Connection;
use super::counts::Counts;
use super::registry::{Refused, Registry};
use super::target::Target;

/// Bytes of a thread's stack. A connection keeps nothing large on it.
const STACK: usize = 256 << 10;
/// Pause after a failed accept, which mostly means that the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time between two looks for transfers that take too long.
const WATCH: Duration = Duration::from_millis(250);

/// A data plane that is served.
#[derive(Debug)]
pub struct Serving {
    registry: Arc<Registry>,
    counts: Arc<Counts>,
    /// No further connections.
    stop: CancellationToken,
    /// Nothing at all.
    ended: CancellationToken,
}

/// Serves `target` until [`Serving::drain`]. When the supervisor shuts down, everything is cut.
pub fn listen(
    listener: TcpListener,
    target: Arc<dyn Target>,
    options: Options,
    supervisor: &Supervisor,
) -> Serving {
    let ended = supervisor.token().child_token();
    let registry = Arc::new(Registry::new());
    let serving = Serving { registry, counts: Arc::default(), stop: ended.child_token(), ended };
    let accepting = Accepting {
        listener,
        target,
        options: Arc::new(options),
        registry: Arc::clone(&serving.registry),
        counts: Arc::clone(&serving.counts),
    };
    let registry = Arc::clone(&serving.registry);
    let ended = serving.ended.clone();
    supervisor.spawn("transfer-watch", async move {
        ended.run_until_cancelled(watch(&registry)).await;
        registry.cut();
    });
    let stop = serving.stop.clone();
    supervisor.spawn("transfer-listener", async move {
        stop.run_until_cancelled(accepting.run()).await;
    });
    serving
}

impl Serving {
    /// What has been done.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Connections that are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.registry.len()
    }

    /// Takes no more transfers, and waits until those in progress have ended, but no longer than `limit`: then they
    /// are cut. Returns how many had to be.
    pub async fn drain(&self, limit: Duration) -> usize {
        self.stop.cancel();
        self.registry.drain();
        if tokio::time::timeout(limit, self.registry.emptied()).await.is_ok() {
            return 0;
        }
        let left = self.registry.len();
        self.registry.cut();
        self.registry.emptied().await;
        left
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.ended.cancel();
        self.registry.cut();
    }
}

/// Ends what takes too long. The kernel's limits are for single calls, which a peer can make many of.
async fn watch(registry: &Registry) {
    loop {
        tokio::time::sleep(WATCH).await;
        registry.end_overdue();
    }
}

struct Accepting {
    listener: TcpListener,
    target: Arc<dyn Target>,
    options: Arc<Options>,
    registry: Arc<Registry>,
    counts: Arc<Counts>,
}

impl Accepting {
    async fn run(self) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => self.take(stream, peer),
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection for transfers");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn take(&self, stream: TcpStream, peer: SocketAddr) {
        let options = &self.options;
        if !options.peers.allow(peer.ip()) {
            self.counts.strangers.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(%peer, allowed = %options.peers, "a connection from elsewhere is refused");
            return;
        }
        let Ok(stream) = stream.into_std() else { return };
        let place = self.registry.enter(
            &stream,
            peer.ip().to_canonical(),
            options.connections,
            options.connections_per_peer,
        );
        let place = match place {
            Ok(place) => place,
            Err(Refused::Full) => {
                self.counts.crowded.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(%peer, open = self.registry.len(), "a connection too many is refused");
                return;
            }
            Err(Refused::Broken(error)) => {
                tracing::warn!(%peer, %error, "cannot take a connection for transfers");
                return;
            }
        };
        let connection = Connection {
            stream,
            peer,
            target: Arc::clone(&self.target),
            options: Arc::clone(options),
            counts: Arc::clone(&self.counts),
            place,
        };
        let counts = Arc::clone(&self.counts);
        counts.opened.fetch_add(1, Ordering::Relaxed);
        let started = thread::Builder::new().name("transfer".to_owned()).stack_size(STACK).spawn(move || {
            connection.run();
            counts.closed.fetch_add(1, Ordering::Relaxed);
        });
        if let Err(error) = started {
            self.counts.closed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%peer, %error, "no thread for a connection: it is closed");
        }
    }
}
