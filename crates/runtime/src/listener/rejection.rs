//! What a connection gets for which a listener has no slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::net::TcpStream;
use crate::{LogRateLimiter, Supervisor};

/// Connections that are refused at once. Further ones wait in the kernel's backlog.
const MAX_CONCURRENT_REJECTIONS: usize = 16;
/// Time for a client to take the response and to end its request.
const REJECTION_TIMEOUT: Duration = Duration::from_millis(200);

/// A response for connections that are too many.
#[derive(Debug, Clone)]
pub struct ConnectionRejection {
    /// A whole HTTP/1.1 response that closes the connection. A TLS client gets no response: its connection is closed.
    pub response: Arc<[u8]>,
    /// Counts them.
    pub rejected: Arc<AtomicU64>,
}

pub(super) struct ConnectionRejector {
    rejection: ConnectionRejection,
    running: Arc<Semaphore>,
    warnings: LogRateLimiter,
    supervisor: Supervisor,
}

impl ConnectionRejector {
    pub(super) fn new(rejection: ConnectionRejection, supervisor: Supervisor) -> Self {
        Self {
            rejection,
            running: Arc::new(Semaphore::new(MAX_CONCURRENT_REJECTIONS)),
            warnings: LogRateLimiter::new(),
            supervisor,
        }
    }

    /// Refuses a connection in the background, as soon as there are few enough.
    pub(super) async fn reject(&self, stream: TcpStream, is_tls: bool) {
        self.rejection.rejected.fetch_add(1, Ordering::Relaxed);
        if self.warnings.is_due() {
            tracing::warn!("as many connections are open as allowed: further ones are refused");
        }
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(&self.running).acquire_owned().await else { return };
        if is_tls {
            return;
        }
        let response = Arc::clone(&self.rejection.response);
        self.supervisor.spawn("refuse a connection", async move {
            // A slow client is disconnected.
            drop(timeout(REJECTION_TIMEOUT, respond(stream, &response)).await);
            drop(permit);
        });
    }
}

async fn respond(mut stream: TcpStream, response: &[u8]) -> std::io::Result<()> {
    stream.write_all(response).await?;
    stream.shutdown().await?;
    // With unread bytes the connection would be reset, and the client might lose the response.
    let mut discarded = [0; 4096];
    while stream.read(&mut discarded).await? > 0 {}
    Ok(())
}
