//! Server of the data plane: peers read and write this process's memory.
//!
//! Each connection has its own thread: a transfer is a few long system calls between the socket and the memory.

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

pub use counts::{TransferCounters, TransferCountersSnapshot};
#[cfg(not(feature = "simulation"))]
pub use listener::{TransferServer, listen};
#[cfg(feature = "simulation")]
pub use simulated::{DataSocket, TransferServer, listen};
#[cfg(not(feature = "simulation"))]
pub use std::net::TcpStream as DataSocket;
pub use transfer_target::{AddressRange, TransferTarget};

/// Authorises the transfers of authenticated peers.
pub trait TransferAuthorizer: Send + Sync + 'static {
    /// Checks whether the capability sent by the peer with this certificate allows a transfer.
    ///
    /// # Errors
    /// [`CapabilityError`].
    fn check(
        &self,
        operation: TransferOperation,
        range: AddressRange,
        capability: &Capability,
        peer: &CertificateFingerprint,
    ) -> Result<(), CapabilityError>;
}

/// Authentication and authorisation of peers.
#[derive(Clone)]
pub struct TransferAuthentication {
    /// TLS settings; peers must present a certificate.
    pub tls: PeerTls,
    /// Checks the capability of each transfer.
    pub authorizer: Arc<dyn TransferAuthorizer>,
}

impl std::fmt::Debug for TransferAuthentication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authentication").field("tls", &self.tls).finish_non_exhaustive()
    }
}

/// Limits and access control of the data plane server.
#[derive(Clone, Debug)]
pub struct TransferServerOptions {
    /// Authentication of peers. With `None`, any peer from the networks in `peers` may read and write, as in Mooncake.
    pub authentication: Option<TransferAuthentication>,
    /// Networks from which connections are accepted.
    pub peers: AllowedPeers,
    /// Maximum number of open connections. Further ones are closed.
    pub connections: usize,
    /// Maximum number of open connections per address, so that one peer cannot use all of them.
    pub connections_per_peer: usize,
    /// Maximum time without progress of at least one byte.
    pub stall: Duration,
    /// Minimum transfer rate in bytes per second. A whole transfer may take its size divided by this rate, plus `stall`.
    pub slowest: u64,
    /// Maximum time that a read waits for unacknowledged writes in its range. Then the read is rejected, because the range holds a mixture
    /// of old and new bytes.
    pub write_wait: Duration,
    /// Idle time after which the kernel sends TCP keepalive probes.
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
