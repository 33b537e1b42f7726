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
mod target;

use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::capability::{Capability, Fingerprint, Refusal};
use moongate_runtime::PeerTls;

use crate::peers::Peers;
use crate::plane::Operation;

pub use counts::{Counts, Snapshot};
#[cfg(not(feature = "simulation"))]
pub use listener::{Serving, listen};
#[cfg(feature = "simulation")]
pub use simulated::{DataSocket, Serving, listen};
#[cfg(not(feature = "simulation"))]
pub use std::net::TcpStream as DataSocket;
pub use target::{Span, Target};

/// Checks what an authenticated peer may do.
pub trait Authorizer: Send + Sync + 'static {
    /// Whether the capability that the peer with this certificate has sent allows a transfer.
    ///
    /// # Errors
    /// [`Refusal`].
    fn check(
        &self,
        operation: Operation,
        span: Span,
        capability: &Capability,
        peer: &Fingerprint,
    ) -> Result<(), Refusal>;
}

/// How peers are authenticated.
#[derive(Clone)]
pub struct Authentication {
    /// Connections are TLS, and the peer shows a certificate.
    pub tls: PeerTls,
    /// Each transfer needs a capability.
    pub authorizer: Arc<dyn Authorizer>,
}

impl std::fmt::Debug for Authentication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authentication").field("tls", &self.tls).finish_non_exhaustive()
    }
}

/// What the data plane takes.
#[derive(Clone, Debug)]
pub struct Options {
    /// How peers are authenticated; `None`: anyone from the networks of `peers` may read and write, as the protocol has it.
    pub authentication: Option<Authentication>,
    /// Who may connect.
    pub peers: Peers,
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

impl Default for Options {
    fn default() -> Self {
        Self {
            authentication: None,
            peers: Peers::all(),
            connections: 1024,
            connections_per_peer: 256,
            stall: Duration::from_secs(30),
            slowest: 1 << 20,
            write_wait: Duration::from_secs(10),
            keepalive: Duration::from_secs(30),
        }
    }
}
