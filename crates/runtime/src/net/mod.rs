//! TCP and HTTP as the operating system provides them, or a simulated network.
//!
//! Components use the sockets of this module. With the feature `simulation`, which only the package `moongate-simulation` enables, the same
//! names are sockets of an in-memory network with seeded delays and faults. Without it this module only re-exports, at no cost.

#[cfg(not(feature = "simulation"))]
mod system;
#[cfg(not(feature = "simulation"))]
use system as provider;

#[cfg(feature = "simulation")]
mod http;
#[cfg(feature = "simulation")]
pub mod simulated;
#[cfg(feature = "simulation")]
mod simulation_trace;
#[cfg(feature = "simulation")]
use simulated as provider;

pub(crate) use provider::listen;
pub use provider::{DetachedStream, ReadHalf, TcpListener, TcpStream, attach, detach, send_request};
