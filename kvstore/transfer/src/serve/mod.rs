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
#[cfg(feature = "simulation")]
mod simulated;
mod target;

use std::time::Duration;

use crate::peers::Peers;

pub use counts::{Counts, Snapshot};
#[cfg(not(feature = "simulation"))]
pub use listener::{Serving, listen};
#[cfg(feature = "simulation")]
pub use simulated::{DataSocket, Serving, listen};
#[cfg(not(feature = "simulation"))]
pub use std::net::TcpStream as DataSocket;
pub use target::{Span, Target};

/// What the data plane takes.
#[derive(Clone, Debug)]
pub struct Options {
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
