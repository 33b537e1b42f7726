//! Lets others read and write memory of one's own.
//!
//! Each connection has a thread: a transfer is a few long system calls, between the socket and the memory itself.

#[cfg(not(feature = "simulation"))]
mod barrier;
#[cfg(not(feature = "simulation"))]
mod connection;
mod counts;
#[cfg(not(feature = "simulation"))]
mod listener;
#[cfg(not(feature = "simulation"))]
mod registry;
#[cfg(not(feature = "simulation"))]
mod secured;
#[cfg(feature = "simulation")]
mod simulated;
mod transfer_target;

use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::capability::{Capability, CapabilityError, CertificateFingerprint};
use moongate_runtime::PeerTls;

use crate::allowed_peers::AllowedPeers;
use crate::plane::TransferOperation;

pub use counts::{Counts, Snapshot};
#[cfg(not(feature = "simulation"))]
pub use listener::{TransferServer, listen};
#[cfg(feature = "simulation")]
pub use simulated::{DataSocket, TransferServer, listen};
#[cfg(not(feature = "simulation"))]
pub use std::net::TcpStream as DataSocket;
pub use transfer_target::{AddressRange, TransferTarget};

/// Checks what an authenticated peer may do.
pub trait TransferAuthorizer: Send + Sync + 'static {
    /// Whether the capability that the peer with this certificate has sent allows a transfer.
    ///
    /// # Errors
    /// [`CapabilityError`].
    fn check(
        &self,
        operation: TransferOperation,
        span: AddressRange,
        capability: &Capability,
        peer: &CertificateFingerprint,
    ) -> Result<(), CapabilityError>;
}

/// How peers are authenticated.
#[derive(Clone)]
pub struct TransferAuthentication {
    /// Connections are TLS, and the peer shows a certificate.
    pub tls: PeerTls,
    /// Each transfer needs a capability.
    pub authorizer: Arc<dyn TransferAuthorizer>,
}

impl std::fmt::Debug for TransferAuthentication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authentication").field("tls", &self.tls).finish_non_exhaustive()
    }
}

/// What the data plane takes.
#[derive(Clone, Debug)]
pub struct TransferServerOptions {
    /// How peers are authenticated; `None`: anyone from the networks of `peers` may read and write, as the protocol has it.
    pub authentication: Option<TransferAuthentication>,
    /// Who may connect.
    pub peers: AllowedPeers,
    /// Connections open at once. Further ones are closed.
    pub connections: usize,
    /// Connections open at once from one address, so that one peer cannot take all of them.
    pub connections_per_peer: usize,
    /// Time in which a transfer must get on by at least a byte.
    pub stall: Duration,
    /// Slowest transfer in bytes per second. A whole transfer has the time that this gives it, and `stall`.
    pub slowest: u64,
    /// A read waits so long for writes in its range that the protocol does not acknowledge. Then it is refused: what is there is a
    /// mixture.
    pub write_wait: Duration,
    /// Silence on a connection without transfer after which the kernel begins to ask whether the peer lives.
    pub keepalive: Duration,
}

impl Default for TransferServerOptions {
    fn default() -> Self {
        Self {
            authentication: None,
            peers: AllowedPeers::all(),
            connections: 1024,
            connections_per_peer: 256,
            stall: Duration::from_secs(30),
            slowest: 1 << 20,
            write_wait: Duration::from_secs(10),
            keepalive: Duration::from_secs(30),
        }
    }
}
