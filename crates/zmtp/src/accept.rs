//! Accept loop of a bound socket.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

use crate::{ZmtpEndpoint, ZmtpError};

/// Pause after a failed accept, usually caused by a lack of file descriptors.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// A listening socket that retries failed accepts.
#[derive(Debug)]
pub(crate) struct ZmtpAcceptor {
    listener: TcpListener,
}

impl ZmtpAcceptor {
    pub(crate) async fn bind(endpoint: &ZmtpEndpoint) -> Result<Self, ZmtpError> {
        let addresses = endpoint.addresses().await?;
        Ok(Self { listener: TcpListener::bind(&addresses[..]).await? })
    }

    pub(crate) fn local_addr(&self) -> Result<SocketAddr, ZmtpError> {
        Ok(self.listener.local_addr()?)
    }

    pub(crate) async fn accept(&self) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a ZeroMQ peer");
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
        }
    }
}
