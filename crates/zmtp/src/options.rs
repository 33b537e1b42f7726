//! Socket options, with defaults for engines in one cluster.

use std::time::Duration;

use moongate_backoff::BackoffPolicy;

use crate::codec::ZmtpLimits;

/// Options of all socket types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZmtpOptions {
    /// Limits on received data.
    pub limits: ZmtpLimits,
    /// Timeout for resolving, connecting and the handshake together.
    pub connect_timeout: Duration,
    /// Jittered pauses between connection attempts. The first attempt after a lost connection follows at once, unless the connection
    /// ended sooner than the maximum pause, which counts as a failure.
    pub retry: BackoffPolicy,
    /// Detection of vanished peers by the kernel.
    pub tcp: TcpKeepaliveOptions,
    /// Maximum number of connections of a bound socket. Further ones wait in the kernel's backlog.
    pub max_peers: usize,
    /// Messages that a [`ZmtpPublisher`](crate::ZmtpPublisher) queues per slow subscriber; the oldest is dropped first.
    pub publish_queue: usize,
}

impl Default for ZmtpOptions {
    fn default() -> Self {
        Self {
            limits: ZmtpLimits::default(),
            connect_timeout: Duration::from_secs(5),
            retry: BackoffPolicy { initial: Duration::from_millis(50), max: Duration::from_secs(1) },
            tcp: TcpKeepaliveOptions::default(),
            max_peers: 1024,
            publish_queue: 8192,
        }
    }
}

/// TCP settings that detect peers which vanish without closing the connection, as when a pod's node fails.
///
/// With the defaults, an idle connection ends about 11 s after its peer has vanished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpKeepaliveOptions {
    /// Idle time before the first keepalive probe.
    pub keepalive_idle: Duration,
    /// Interval between keepalive probes.
    pub keepalive_interval: Duration,
    /// Number of unanswered probes that ends the connection.
    pub keepalive_probes: u32,
    /// How long sent bytes may stay unacknowledged.
    pub user_timeout: Duration,
}

impl Default for TcpKeepaliveOptions {
    fn default() -> Self {
        Self {
            keepalive_idle: Duration::from_secs(5),
            keepalive_interval: Duration::from_secs(2),
            keepalive_probes: 3,
            user_timeout: Duration::from_secs(11),
        }
    }
}
