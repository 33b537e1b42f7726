//! TCP and HTTP as the operating system provides them, or a simulated network.
//!
//! Components take their sockets from here. With the feature `simulation`, which only the package `moongate-simulation` turns on, the
//! same names stand for sockets of a network in memory whose delays and faults follow a seed. Without it this module is
//! re-exports, and costs nothing.

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
