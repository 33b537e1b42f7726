//! Connections that are open.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// What an idle connection has as the time by which it must be done.
const IDLE: u64 = u64::MAX;

/// All connections of a data plane.
#[derive(Debug)]
pub(super) struct Registry {
    open: Mutex<Open>,
    /// Times are counted from here.
    began: Instant,
    /// Told when the last connection has gone.
    empty: Notify,
    draining: AtomicBool,
}

#[derive(Debug, Default)]
struct Open {
    connections: HashMap<u64, Entry>,
    by_peer: HashMap<IpAddr, usize>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    /// To end a connection whose thread waits.
    stream: TcpStream,
    until: Arc<AtomicU64>,
}

/// A connection's place among the others, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    registry: Arc<Registry>,
    id: u64,
    peer: IpAddr,
    /// Milliseconds by which the transfer in progress must be done.
    until: Arc<AtomicU64>,
}

/// There is no place for a further connection.
#[derive(Debug)]
pub(super) enum Refused {
    Full,
    Broken(io::Error),
}

impl Registry {
    pub(super) fn new() -> Self {
        Self {
            open: Mutex::default(),
            began: Instant::now(),
            empty: Notify::new(),
            draining: AtomicBool::new(false),
        }
    }

    /// Takes a connection in, unless there are `most` already, or `most_of_peer` of this peer.
    pub(super) fn enter(
        self: &Arc<Self>,
        stream: &TcpStream,
        peer: IpAddr,
        most: usize,
        most_of_peer: usize,
    ) -> Result<Place, Refused> {
        let stream = stream.try_clone().map_err(Refused::Broken)?;
        let mut open = self.open.lock();
        let of_peer = open.by_peer.get(&peer).copied().unwrap_or_default();
        if self.is_draining() || open.connections.len() >= most || of_peer >= most_of_peer {
            return Err(Refused::Full);
        }
        let id = open.next;
        open.next += 1;
        open.by_peer.insert(peer, of_peer + 1);
        let until = Arc::new(AtomicU64::new(IDLE));
        open.connections.insert(id, Entry { stream, until: Arc::clone(&until) });
        Ok(Place { registry: Arc::clone(self), id, peer, until })
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    pub(super) fn len(&self) -> usize {
        self.open.lock().connections.len()
    }

    /// Takes no more transfers. Idle connections end now, the others after what they are doing.
    pub(super) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        for entry in self.open.lock().connections.values() {
            if entry.until.load(Ordering::SeqCst) == IDLE {
                // What the peer has sent already can still be read, so a request that is under way is not lost.
                let _ = entry.stream.shutdown(Shutdown::Read);
            }
        }
    }

    /// Ends connections whose transfer takes too long.
    pub(super) fn end_overdue(&self) {
        let now = self.after(Duration::ZERO);
        for entry in self.open.lock().connections.values() {
            if entry.until.load(Ordering::SeqCst) < now {
                let _ = entry.stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Milliseconds from the beginning until `time` from now.
    fn after(&self, time: Duration) -> u64 {
        let millis = (self.began.elapsed() + time).as_millis();
        u64::try_from(millis).unwrap_or(IDLE - 1)
    }

    /// Ends all connections, whatever they are doing.
    pub(super) fn cut(&self) {
        self.draining.store(true, Ordering::SeqCst);
        for entry in self.open.lock().connections.values() {
            let _ = entry.stream.shutdown(Shutdown::Both);
        }
    }

    /// Resolves when there is no connection.
    pub(super) async fn emptied(&self) {
        loop {
            let mut told = std::pin::pin!(self.empty.notified());
            // Enlisted before the count is read, so that an end in between is not missed.
            told.as_mut().enable();
            if self.len() == 0 {
                return;
            }
            told.await;
        }
    }
}

impl Place {
    /// A transfer begins, and must be done within `time`.
    pub(super) fn busy_for(&self, time: Duration) {
        self.until.store(self.registry.after(time), Ordering::SeqCst);
    }

    /// No transfer is in progress.
    pub(super) fn idle(&self) {
        self.until.store(IDLE, Ordering::SeqCst);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.registry.is_draining()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.registry.open.lock();
        open.connections.remove(&self.id);
        if let Some(number) = open.by_peer.get_mut(&self.peer) {
            *number -= 1;
            if *number == 0 {
                open.by_peer.remove(&self.peer);
            }
        }
        if open.connections.is_empty() {
            drop(open);
            self.registry.empty.notify_waiters();
        }
    }
}
