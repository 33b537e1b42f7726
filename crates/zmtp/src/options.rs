//! Settings of a socket. Each has a default that fits engines in one cluster.

use std::time::Duration;

use crate::codec::Limits;

/// Settings of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// What a peer may send at most.
    pub limits: Limits,
    /// Time for resolving, connecting and the handshake together.
    pub connect_timeout: Duration,
    /// When to connect again.
    pub retry: Retry,
    /// How the kernel finds out that a peer has vanished.
    pub tcp: TcpOptions,
    /// Connections that a bound socket holds at once. Beyond that, new ones wait in the kernel's backlog.
    pub peers: usize,
    /// Messages that a [`Publisher`](crate::Publisher) keeps for subscribers that are slower than it; the oldest is lost first.
    pub publish_queue: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            connect_timeout: Duration::from_secs(5),
            retry: Retry::default(),
            tcp: TcpOptions::default(),
            peers: 1024,
            publish_queue: 8192,
        }
    }
}

/// When to connect again. The first attempt after a lost connection comes at once; then pauses double. Each pause is shortened by a
/// random part of up to a half, so that many subscribers of one restarted engine do not come in step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// The first pause.
    pub first: Duration,
    /// The longest pause. A connection that ends sooner than this counts as failed.
    pub longest: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { first: Duration::from_millis(50), longest: Duration::from_secs(1) }
    }
}

/// How the kernel finds out that a peer has vanished without a word, as a deleted pod's node does.
///
/// With the defaults, an idle connection ends some 11 s after its peer has vanished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpOptions {
    /// Idle time before the first keepalive probe.
    pub keepalive_idle: Duration,
    /// Pause between probes.
    pub keepalive_interval: Duration,
    /// Probes without an answer that end the connection.
    pub keepalive_probes: u32,
    /// How long sent bytes may stay unacknowledged.
    pub user_timeout: Duration,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            keepalive_idle: Duration::from_secs(5),
            keepalive_interval: Duration::from_secs(2),
            keepalive_probes: 3,
            user_timeout: Duration::from_secs(11),
        }
    }
}
