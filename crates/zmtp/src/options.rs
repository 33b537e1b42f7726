//! Settings of a socket. Each has a default that fits engines in one cluster.

use std::time::Duration;

use crate::codec::ZmtpLimits;

/// Settings of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZmtpOptions {
    /// What a peer may send at most.
    pub limits: ZmtpLimits,
    /// Time for resolving, connecting and the handshake together.
    pub connect_timeout: Duration,
    /// When to connect again.
    pub retry: ReconnectPolicy,
    /// How the kernel finds out that a peer has vanished.
    pub tcp: TcpKeepaliveOptions,
    /// Connections that a bound socket holds at once. Beyond that, new ones wait in the kernel's backlog.
    pub max_peers: usize,
    /// Messages that a [`ZmtpPublisher`](crate::Publisher) keeps for subscribers that are slower than it; the oldest is lost first.
    pub publish_queue: usize,
}

impl Default for ZmtpOptions {
    fn default() -> Self {
        Self {
            limits: ZmtpLimits::default(),
            connect_timeout: Duration::from_secs(5),
            retry: ReconnectPolicy::default(),
            tcp: TcpKeepaliveOptions::default(),
            max_peers: 1024,
            publish_queue: 8192,
        }
    }
}

/// When to connect again. The first attempt after a lost connection comes at once; then pauses double. Each pause is shortened by a
/// random part of up to a half, so that many subscribers of one restarted engine do not come in step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReconnectPolicy {
    /// The first pause.
    pub initial: Duration,
    /// The longest pause. A connection that ends sooner than this counts as failed.
    pub max: Duration,
}

impl Default for ReconnectPolicy {
    fn default() -> Self {
        Self { initial: Duration::from_millis(50), max: Duration::from_secs(1) }
    }
}

/// How the kernel finds out that a peer has vanished without a word, as a deleted pod's node does.
///
/// With the defaults, an idle connection ends some 11 s after its peer has vanished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpKeepaliveOptions {
    /// Idle time before the first keepalive probe.
    pub keepalive_idle: Duration,
    /// Pause between probes.
    pub keepalive_interval: Duration,
    /// Probes without an answer that end the connection.
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
