//! Registry of open connections: limits, eviction, deadlines and drain.

use std::collections::HashMap;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Deadline of an idle connection: never.
const IDLE: u64 = u64::MAX;
/// A connection without a request for this time may be evicted.
const SILENT_TIMEOUT: Duration = Duration::from_secs(1);

/// All open connections of a data plane.
#[derive(Debug)]
pub(super) struct ConnectionRegistry {
    open: Mutex<OpenConnections>,
    /// Deadlines are relative to this time.
    started: Instant,
    /// Notified when the last connection is closed.
    empty: Notify,
    draining: AtomicBool,
}

#[derive(Debug, Default)]
struct OpenConnections {
    connections: HashMap<u64, OpenConnection>,
    by_peer: HashMap<IpAddr, usize>,
    next: u64,
}

#[derive(Debug)]
struct OpenConnection {
    /// Allows a shutdown while the connection's thread blocks.
    stream: Arc<TcpStream>,
    peer: IpAddr,
    accepted: Instant,
    activity: Arc<ConnectionActivity>,
}

/// State of a connection, shared with its thread.
#[derive(Debug)]
struct ConnectionActivity {
    /// Deadline of the transfer in progress, in milliseconds since `started`.
    deadline_ms: AtomicU64,
    /// Whether the peer has sent a complete header.
    has_requested: AtomicBool,
}

/// Registration of a connection, removed on drop.
#[derive(Debug)]
pub(super) struct ConnectionGuard {
    registry: Arc<ConnectionRegistry>,
    id: u64,
    activity: Arc<ConnectionActivity>,
}

/// Result of a successful admission.
#[derive(Debug)]
pub(super) struct AdmittedConnection {
    pub(super) guard: ConnectionGuard,
    /// Whether another connection was evicted for it.
    pub(super) has_evicted: bool,
}

/// The connection limit is reached, or the server drains.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionLimitError;

impl ConnectionRegistry {
    pub(super) fn new() -> Self {
        Self {
            open: Mutex::default(),
            started: Instant::now(),
            empty: Notify::new(),
            draining: AtomicBool::new(false),
        }
    }

    /// Registers a connection unless `max` are open, or `max_per_peer` of this peer. At a limit the oldest connection without a request is
    /// evicted.
    pub(super) fn admit(
        self: &Arc<Self>,
        stream: &Arc<TcpStream>,
        peer: IpAddr,
        max: usize,
        max_per_peer: usize,
    ) -> Result<AdmittedConnection, ConnectionLimitError> {
        let mut open = self.open.lock();
        if self.is_draining() {
            return Err(ConnectionLimitError);
        }
        let of_peer = open.by_peer.get(&peer).copied().unwrap_or_default();
        let has_evicted = if of_peer >= max_per_peer {
            open.evict_silent(Some(peer))?
        } else if open.connections.len() >= max {
            open.evict_silent(None)?
        } else {
            false
        };
        let id = open.next;
        open.next += 1;
        *open.by_peer.entry(peer).or_default() += 1;
        let activity = Arc::new(ConnectionActivity {
            deadline_ms: AtomicU64::new(IDLE),
            has_requested: AtomicBool::new(false),
        });
        let (stream, accepted) = (Arc::clone(stream), Instant::now());
        open.connections
            .insert(id, OpenConnection { stream, peer, accepted, activity: Arc::clone(&activity) });
        Ok(AdmittedConnection {
            guard: ConnectionGuard { registry: Arc::clone(self), id, activity },
            has_evicted,
        })
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    pub(super) fn len(&self) -> usize {
        self.open.lock().connections.len()
    }

    /// Stops accepting transfers. Idle connections end now, busy ones after their transfer.
    pub(super) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        for entry in self.open.lock().connections.values() {
            if entry.activity.deadline_ms.load(Ordering::SeqCst) == IDLE {
                // Bytes that the peer has sent can still be read, so a request in flight is not lost.
                let _ = entry.stream.shutdown(Shutdown::Read);
            }
        }
    }

    /// Closes connections whose transfer is overdue.
    pub(super) fn end_overdue(&self) {
        let now = self.deadline_in_ms(Duration::ZERO);
        for entry in self.open.lock().connections.values() {
            if entry.activity.deadline_ms.load(Ordering::SeqCst) < now {
                let _ = entry.stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Milliseconds from `started` to `time` from now.
    fn deadline_in_ms(&self, time: Duration) -> u64 {
        let millis = (self.started.elapsed() + time).as_millis();
        u64::try_from(millis).unwrap_or(IDLE - 1)
    }

    /// Closes all connections, also those with a transfer in progress.
    pub(super) fn close_all(&self) {
        self.draining.store(true, Ordering::SeqCst);
        for entry in self.open.lock().connections.values() {
            let _ = entry.stream.shutdown(Shutdown::Both);
        }
    }

    /// Resolves when no connection is open.
    pub(super) async fn wait_empty(&self) {
        loop {
            let mut notified = std::pin::pin!(self.empty.notified());
            // Registered before the count is read, so that a close in between is not missed.
            notified.as_mut().enable();
            if self.len() == 0 {
                return;
            }
            notified.await;
        }
    }
}

impl OpenConnections {
    /// Closes the oldest connection without a request, only of `peer` if given.
    fn evict_silent(&mut self, peer: Option<IpAddr>) -> Result<bool, ConnectionLimitError> {
        let silent = self
            .connections
            .iter()
            .filter(|(_, entry)| peer.is_none_or(|peer| peer == entry.peer) && entry.is_silent());
        let (id, _) = silent.min_by_key(|(id, _)| **id).ok_or(ConnectionLimitError)?;
        let id = *id;
        if let Some(entry) = self.remove(id) {
            let _ = entry.stream.shutdown(Shutdown::Both);
        }
        Ok(true)
    }

    fn remove(&mut self, id: u64) -> Option<OpenConnection> {
        let entry = self.connections.remove(&id)?;
        if let Some(number) = self.by_peer.get_mut(&entry.peer) {
            *number -= 1;
            if *number == 0 {
                self.by_peer.remove(&entry.peer);
            }
        }
        Some(entry)
    }
}

impl OpenConnection {
    /// Whether the connection has neither sent a request nor unread bytes.
    fn is_silent(&self) -> bool {
        !self.activity.has_requested.load(Ordering::SeqCst)
            && self.accepted.elapsed() >= SILENT_TIMEOUT
            && rustix::io::ioctl_fionread(&*self.stream).is_ok_and(|unread| unread == 0)
    }
}

impl ConnectionGuard {
    /// Sequence number of the connection.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Sets a deadline `time` from now for the transfer that starts.
    pub(super) fn busy_for(&self, time: Duration) {
        self.activity.deadline_ms.store(self.registry.deadline_in_ms(time), Ordering::SeqCst);
    }

    /// Clears the deadline: no transfer is in progress.
    pub(super) fn idle(&self) {
        self.activity.deadline_ms.store(IDLE, Ordering::SeqCst);
    }

    /// Records that the peer has sent a complete header.
    pub(super) fn mark_requested(&self) {
        self.activity.has_requested.store(true, Ordering::SeqCst);
    }

    /// Whether the peer has sent no complete header yet.
    pub(super) fn is_silent(&self) -> bool {
        !self.activity.has_requested.load(Ordering::SeqCst)
    }

    pub(super) fn is_draining(&self) -> bool {
        self.registry.is_draining()
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut open = self.registry.open.lock();
        open.remove(self.id);
        if open.connections.is_empty() {
            drop(open);
            self.registry.empty.notify_waiters();
        }
    }
}
