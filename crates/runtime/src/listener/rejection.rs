//! Rejects connections beyond a listener's limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::net::TcpStream;
use crate::{LogRateLimiter, Supervisor};

/// Maximum number of concurrent rejections. Further connections wait in the kernel's backlog.
const MAX_CONCURRENT_REJECTIONS: usize = 16;
/// Time for a client to read the response and end its request.
const REJECTION_TIMEOUT: Duration = Duration::from_millis(200);

/// Response for connections beyond the limit.
#[derive(Debug, Clone)]
pub struct ConnectionRejection {
    /// A complete HTTP/1.1 response that closes the connection. TLS connections are closed without a response.
    pub response: Arc<[u8]>,
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

    /// Rejects a connection in the background; waits while too many rejections are running.
    pub(super) async fn reject(&self, stream: TcpStream, is_tls: bool) {
        self.rejection.rejected.fetch_add(1, Ordering::Relaxed);
        if self.warnings.is_due() {
            tracing::warn!("connection limit reached: further connections are rejected");
        }
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(&self.running).acquire_owned().await else { return };
        if is_tls {
            return;
        }
        let response = Arc::clone(&self.rejection.response);
        self.supervisor.spawn("connection rejection", async move {
            // A slow client is disconnected.
            drop(timeout(REJECTION_TIMEOUT, respond(stream, &response)).await);
            drop(permit);
        });
    }
}

async fn respond(mut stream: TcpStream, response: &[u8]) -> std::io::Result<()> {
    stream.write_all(response).await?;
    stream.shutdown().await?;
    // Closing with unread bytes would reset the connection, and the client might lose the response.
    let mut discarded = [0; 4096];
    while stream.read(&mut discarded).await? > 0 {}
    Ok(())
}
