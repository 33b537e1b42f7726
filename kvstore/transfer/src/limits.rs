//! Limits of a client's connection to a data plane.

use std::time::Duration;

/// Timeouts and buffer sizes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferLimits {
    /// Timeout for connecting and the TLS handshake.
    pub connect: Duration,
    /// Maximum time without progress of at least one byte.
    pub stall: Duration,
    /// Kernel socket buffer in bytes for each direction. With `None` the kernel chooses; it may grant less than requested.
    pub kernel_buffer: Option<usize>,
    /// Busy-poll time for expected bytes on connections with [`crate::TransferConnection::set_busy_poll`]; zero disables it.
    pub busy_poll: Duration,
}

impl Default for TransferLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            stall: Duration::from_secs(10),
            kernel_buffer: None,
            busy_poll: Duration::ZERO,
        }
    }
}
