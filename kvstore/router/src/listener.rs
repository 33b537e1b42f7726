//! Accepts the connections of clients.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use moongate_runtime::net::{TcpListener, TcpStream};
use moongate_runtime::{LogRateLimiter, Supervisor};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::connection::{ClientConnection, RouterState};

/// Pause after a failed accept, such as one without free file descriptors.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

pub(crate) struct RouterListener {
    pub(crate) listener: TcpListener,
    pub(crate) router: Arc<RouterState>,
    pub(crate) max_connections: usize,
    pub(crate) supervisor: Supervisor,
    pub(crate) stop: CancellationToken,
}

impl RouterListener {
    /// Accepts connections until `stop` is cancelled.
    pub(crate) async fn run(self) {
        let slots = Arc::new(Semaphore::new(self.max_connections.clamp(1, Semaphore::MAX_PERMITS)));
        let warnings = LogRateLimiter::new();
        loop {
            if slots.available_permits() == 0 && warnings.is_due() {
                tracing::warn!(
                    connections = self.max_connections,
                    "the limit of connections is reached, new ones have to wait; raise --max-connections"
                );
            }
            let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
            let (stream, peer) = tokio::select! {
                accepted = accept(&self.listener) => accepted,
                () = self.stop.cancelled() => return,
            };
            let serving = self.serve(stream, peer);
            self.supervisor.spawn("router-connection", async move {
                serving.await;
                drop(slot);
            });
        }
    }

    fn serve(&self, stream: TcpStream, peer: SocketAddr) -> impl Future<Output = ()> + Send + use<> {
        let connection = ClientConnection::new(Arc::clone(&self.router), peer.ip().to_canonical());
        let (counters, stop) = (Arc::clone(&self.router.masters.counters), self.stop.clone());
        async move {
            counters.connections.fetch_add(1, Relaxed);
            let served = match stream.set_nodelay(true) {
                Ok(()) => connection.run(stream, stop).await,
                Err(error) => Err(error),
            };
            if let Err(error) = served {
                tracing::debug!(%peer, %error, "a client's connection ended");
            }
            counters.connections.fetch_sub(1, Relaxed);
        }
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections; retrying");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }
}
