//! Orders reads behind writes that the protocol does not acknowledge.
//!
//! A v1 client reports an object to the master as complete when the last byte is in its own kernel's send buffer. A reader that the master
//! then directs here uses another connection, and so another thread. So before a read is served, everything that had arrived by then must
//! be in memory: connections in the accept queue are accepted, received headers are parsed, and the writes that they started have ended.
//! Bytes that wait in a sender's kernel for space in the receive buffer count too, as long as the sender makes progress: its connection is
//! followed until it has caught up.
//!
//! Only connections that may carry such writes are tracked: new ones, and those that use v1. Without any, the ordering costs a read one
//! system call.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use moongate_runtime::net::TcpListener;
use parking_lot::{Condvar, Mutex};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::time::Timespec;

use super::transfer_target::AddressRange;
use crate::plane::{HEADER, TransferHeader, TransferOperation, TransferProtocol, UnknownOperationError};

/// Bytes copied by a writer's thread are not signalled, so waiters poll at this interval; all other progress is signalled.
const RECHECK: Duration = Duration::from_millis(1);
/// A peer that sends nothing for this time in the middle of a body no longer delays readers of other ranges.
const WRITER_STALL: Duration = Duration::from_millis(250);
/// Maximum bytes in a sender's kernel while our receive buffer is full: Linux' default limit.
const SENDER_BUFFER: u64 = 4 << 20;
/// Event id of the listener. Connection ids count from 0.
const LISTENER: u64 = u64::MAX;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// All connections of a data plane that may carry unacknowledged writes, and the reads that wait for them.
#[derive(Debug)]
pub(super) struct ReadBarrier {
    /// An epoll instance, readable while the listener has connections to accept or a tracked connection has unread bytes.
    arrivals: OwnedFd,
    /// Odd while connections move from the accept queue to `tracked`.
    accepts: AtomicU64,
    tracked: Mutex<HashMap<u64, Arc<TrackedConnection>>>,
    /// Number of threads that are parsing a header: incremented before the first byte leaves the socket, decremented when the header's
    /// effect is visible here.
    parsing: AtomicUsize,
    writes: Mutex<WritesInProgress>,
    /// Number of entries in `writes`.
    writing: AtomicUsize,
    /// Number of reads that wait.
    waiting: AtomicUsize,
    progress_lock: Mutex<()>,
    progress: Condvar,
}

#[derive(Debug, Default)]
struct WritesInProgress {
    next: u64,
    writes: Vec<WriteInProgress>,
}

#[derive(Debug)]
struct WriteInProgress {
    number: u64,
    range: AddressRange,
    connection: Arc<TrackedConnection>,
}

/// A connection that may carry unacknowledged writes.
#[derive(Debug)]
pub(super) struct TrackedConnection {
    id: u64,
    socket: Arc<TcpStream>,
    /// Locked while bytes of a header are taken from the socket.
    position: Mutex<StreamPosition>,
}

/// Parse position in a connection's byte stream.
#[derive(Debug)]
struct StreamPosition {
    /// Stream offset at the end of the last completed request.
    completed: u64,
    /// Stream offset of the next header; during a request, the offset of the request's end.
    next_header: u64,
    header: [u8; HEADER],
    /// Number of bytes of the next header taken from the socket.
    filled: usize,
    stage: StreamStage,
    /// Value of `completed` when a reader gave up waiting.
    stalled: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamStage {
    /// Between two requests, or within a header.
    Header,
    /// Receiving the body of a write.
    Body,
    /// Sending the body of a read. A client sends nothing more until it has all of it, so bytes that arrive now are parsed soon.
    Response,
    /// No further unacknowledged write can arrive.
    Ended,
}

/// Result of reading header bytes from a tracked connection.
pub(super) enum HeaderProgress {
    /// A complete header, and the write in progress if it started an unacknowledged one.
    Header(TransferHeader, Option<UnacknowledgedWrite>),
    /// An incomplete header, or no bytes.
    Part,
    End {
        within_header: bool,
    },
    Malformed(UnknownOperationError),
}

/// A read timed out while waiting for earlier writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an unacknowledged write in this range did not complete within {0:?}")]
pub(super) struct UnfinishedWriteError(Duration);

/// Whether a read had to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarrierOutcome {
    Immediate,
    Waited,
}

/// Registration of an unacknowledged write in progress, removed on drop.
#[derive(Debug)]
pub(super) struct UnacknowledgedWrite {
    barrier: Arc<ReadBarrier>,
    number: u64,
}

impl Drop for UnacknowledgedWrite {
    fn drop(&mut self) {
        self.barrier.writes.lock().writes.retain(|write| write.number != self.number);
        self.barrier.writing.fetch_sub(1, Ordering::SeqCst);
        self.barrier.signal();
    }
}

/// Marks that connections are being accepted.
pub(super) struct AcceptGuard<'a>(&'a ReadBarrier);

impl Drop for AcceptGuard<'_> {
    fn drop(&mut self) {
        self.0.accepts.fetch_add(1, Ordering::SeqCst);
    }
}

impl ReadBarrier {
    /// Creates the barrier for the connections of `listener`.
    ///
    /// # Errors
    /// When the process has no file descriptors left.
    pub(super) fn new(listener: &TcpListener) -> io::Result<Self> {
        let arrivals = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&arrivals, listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        Ok(Self {
            arrivals,
            accepts: AtomicU64::new(0),
            tracked: Mutex::default(),
            parsing: AtomicUsize::new(0),
            writes: Mutex::default(),
            writing: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            progress_lock: Mutex::default(),
            progress: Condvar::new(),
        })
    }

    /// Call before accepting connections, on one thread at a time; drop the guard when they are tracked.
    pub(super) fn begin_accept(&self) -> AcceptGuard<'_> {
        self.accepts.fetch_add(1, Ordering::SeqCst);
        AcceptGuard(self)
    }

    /// Registers a new connection.
    ///
    /// # Errors
    /// When the kernel is out of memory for the epoll entry.
    pub(super) fn track(&self, id: u64, socket: &Arc<TcpStream>) -> io::Result<Arc<TrackedConnection>> {
        let position = StreamPosition {
            completed: 0,
            next_header: 0,
            header: [0; HEADER],
            filled: 0,
            stage: StreamStage::Header,
            stalled: None,
        };
        let tracked =
            Arc::new(TrackedConnection { id, socket: Arc::clone(socket), position: Mutex::new(position) });
        self.tracked.lock().insert(id, Arc::clone(&tracked));
        if let Err(error) = epoll::add(&self.arrivals, &**socket, EventData::new_u64(id), EventFlags::IN) {
            self.tracked.lock().remove(&id);
            return Err(error.into());
        }
        Ok(tracked)
    }

    /// Call when the connection has ended or uses a protocol with acknowledgements.
    pub(super) fn untrack(&self, connection: &TrackedConnection) {
        if self.tracked.lock().remove(&connection.id).is_none() {
            return;
        }
        connection.position.lock().stage = StreamStage::Ended;
        // Closing the socket has the same effect.
        let _ = epoll::delete(&self.arrivals, &*connection.socket);
        self.signal();
    }

    /// Reads available bytes of the next header without blocking.
    ///
    /// # Errors
    /// Errors of the socket.
    pub(super) fn receive_header(
        self: &Arc<Self>,
        connection: &Arc<TrackedConnection>,
    ) -> io::Result<HeaderProgress> {
        self.parsing.fetch_add(1, Ordering::SeqCst);
        let received = connection.receive(self);
        self.parsing.fetch_sub(1, Ordering::SeqCst);
        self.signal();
        received
    }

    /// Call when the last request has ended and the next header is expected.
    pub(super) fn expect_header(&self, connection: &TrackedConnection) {
        {
            let mut position = connection.position.lock();
            position.stage = StreamStage::Header;
            position.completed = position.next_header;
        }
        self.signal();
    }

    fn begin_write(
        self: &Arc<Self>,
        connection: &Arc<TrackedConnection>,
        range: AddressRange,
    ) -> UnacknowledgedWrite {
        let mut in_progress = self.writes.lock();
        let number = in_progress.next;
        in_progress.next += 1;
        in_progress.writes.push(WriteInProgress { number, range, connection: Arc::clone(connection) });
        self.writing.fetch_add(1, Ordering::SeqCst);
        UnacknowledgedWrite { barrier: Arc::clone(self), number }
    }

    /// Waits up to `limit` until all bytes that have arrived for `range` are in memory. `accept` accepts the connections in the accept
    /// queue.
    ///
    /// # Errors
    /// [`UnfinishedWriteError`].
    pub(super) fn order(
        &self,
        range: AddressRange,
        limit: Duration,
        accept: impl FnOnce(),
    ) -> Result<BarrierOutcome, UnfinishedWriteError> {
        // Check in the order in which bytes move: from the socket, through a header, to a write. A connection that moves from the accept
        // queue to its socket meanwhile could be missed in both, so `accepts` is checked on either side.
        let accepts = self.accepts.load(Ordering::SeqCst);
        if accepts.is_multiple_of(2)
            && !self.has_arrivals()
            && self.accepts.load(Ordering::SeqCst) == accepts
            && self.parsing.load(Ordering::SeqCst) == 0
            && self.writing.load(Ordering::SeqCst) == 0
        {
            return Ok(BarrierOutcome::Immediate);
        }
        let deadline = Instant::now() + limit;
        let has_waited = self.catch_up(deadline, accept);
        let ordered = self.wait_for_writes(range, deadline).ok_or(UnfinishedWriteError(limit))?;
        Ok(if has_waited { BarrierOutcome::Waited } else { ordered })
    }

    /// Waits until bytes that have arrived are in memory, on all connections. Returns whether it had to wait.
    fn catch_up(&self, deadline: Instant, accept: impl FnOnce()) -> bool {
        accept();
        let arrived = self.arrivals();
        let mut behind: Vec<_> =
            self.active(&arrived).into_iter().filter_map(ConnectionFollower::new).collect();
        behind.retain_mut(|follow| !follow.has_caught_up());
        if behind.is_empty() {
            return false;
        }
        let has_caught_up = self.wait(deadline, || {
            behind.retain_mut(|follow| !follow.has_caught_up());
            behind.is_empty()
        });
        if !has_caught_up {
            tracing::warn!(
                connections = behind.len(),
                "clients with unacknowledged writes send faster than this node receives: a read may return data from before a write"
            );
        }
        true
    }

    /// Connections with unread bytes, a header being parsed, or a write in progress.
    fn active(&self, arrived: &[u64]) -> Vec<Arc<TrackedConnection>> {
        let mut active: Vec<_> = {
            let tracked = self.tracked.lock();
            if self.parsing.load(Ordering::SeqCst) > 0 {
                return tracked.values().map(Arc::clone).collect();
            }
            arrived.iter().filter_map(|id| tracked.get(id).map(Arc::clone)).collect()
        };
        // Must follow the arrivals: a header may have become a write meanwhile.
        let in_progress = self.writes.lock();
        active.extend(in_progress.writes.iter().map(|write| Arc::clone(&write.connection)));
        active
    }

    /// `None` on timeout.
    fn wait_for_writes(&self, range: AddressRange, deadline: Instant) -> Option<BarrierOutcome> {
        let next = self.writes.lock().next;
        // Later writes are excluded, or a reader could wait for one after another.
        let is_ended = || {
            let in_progress = self.writes.lock();
            in_progress.writes.iter().all(|write| write.number >= next || !write.range.overlaps(range))
        };
        if is_ended() {
            return Some(BarrierOutcome::Immediate);
        }
        self.wait(deadline, is_ended).then_some(BarrierOutcome::Waited)
    }

    /// Waits until `condition` holds. Returns false at the deadline.
    fn wait(&self, deadline: Instant, mut condition: impl FnMut() -> bool) -> bool {
        if condition() {
            return true;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut progress_lock = self.progress_lock.lock();
        let mut holds = condition();
        while !holds && Instant::now() < deadline {
            self.progress.wait_for(&mut progress_lock, RECHECK);
            holds = condition();
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        holds
    }

    fn signal(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let _guard = self.progress_lock.lock();
            self.progress.notify_all();
        }
    }

    /// Whether any source has unread bytes or connections to accept.
    fn has_arrivals(&self) -> bool {
        let mut events = [const { MaybeUninit::<Event>::uninit() }; 1];
        match epoll::wait(&self.arrivals, &mut events[..], Some(&NO_WAIT)) {
            Ok((found, _)) => !found.is_empty(),
            // Unknown: let the slow path decide.
            Err(_) => true,
        }
    }

    fn arrivals(&self) -> Vec<u64> {
        let max_events = self.tracked.lock().len() + 1;
        let mut events: Vec<Event> = Vec::with_capacity(max_events);
        while let Err(error) = epoll::wait(&self.arrivals, spare_capacity(&mut events), Some(&NO_WAIT)) {
            if error != Errno::INTR {
                tracing::error!(%error, "cannot poll connections: reads may return data from before an unacknowledged write");
                break;
            }
        }
        let sources = events.iter().map(|event| event.data.u64());
        sources.filter(|source| *source != LISTENER).collect()
    }
}

impl TrackedConnection {
    fn receive(self: &Arc<Self>, barrier: &Arc<ReadBarrier>) -> io::Result<HeaderProgress> {
        let mut position = self.position.lock();
        let filled = position.filled;
        let received =
            match rustix::net::recv(&*self.socket, &mut position.header[filled..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Ok(HeaderProgress::End { within_header: filled > 0 }),
                Ok((_, received)) => received,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(HeaderProgress::Part),
                Err(error) => return Err(error.into()),
            };
        position.filled += received;
        if position.filled < HEADER {
            return Ok(HeaderProgress::Part);
        }
        let header = match TransferHeader::decode(&position.header) {
            Ok(header) => header,
            Err(error) => return Ok(HeaderProgress::Malformed(error)),
        };
        position.filled = 0;
        position.next_header += HEADER as u64;
        let is_unacknowledged =
            header.protocol == TransferProtocol::V1 && header.operation == TransferOperation::Write;
        position.stage = if is_unacknowledged { StreamStage::Body } else { StreamStage::Response };
        if !is_unacknowledged {
            return Ok(HeaderProgress::Header(header, None));
        }
        position.next_header = position.next_header.saturating_add(header.size);
        let write = barrier.begin_write(self, AddressRange { start: header.address, size: header.size });
        Ok(HeaderProgress::Header(header, Some(write)))
    }

    /// Stream offset of the last byte in this kernel, and the number of unread bytes. Within a body the offset is too high by the part of
    /// the body received so far. `None` if no reader must wait for this connection.
    fn arrived(&self, position: &StreamPosition) -> Option<(u64, u64)> {
        if position.stage == StreamStage::Ended || position.stalled == Some(position.completed) {
            return None;
        }
        let unread = rustix::io::ioctl_fionread(&*self.socket).unwrap_or(0);
        let read = position.next_header.saturating_add(position.filled as u64);
        Some((read.saturating_add(unread), unread))
    }
}

/// Progress of a connection that a read waits for.
struct ConnectionFollower {
    connection: Arc<TrackedConnection>,
    /// Stream offset that covers everything sent before the read arrived.
    target_position: u64,
    /// Last observed progress while the peer has to send, and since when it is unchanged.
    silent_since: Option<((u64, u64), Instant)>,
}

impl ConnectionFollower {
    /// `None` if the connection has nothing that must be ordered before the read.
    fn new(connection: Arc<TrackedConnection>) -> Option<Self> {
        let target_position = {
            let position = connection.position.lock();
            let (arrived, unread) = connection.arrived(&position)?;
            if unread == 0 && position.stage != StreamStage::Body {
                return None;
            }
            arrived.saturating_add(SENDER_BUFFER)
        };
        Some(Self { connection, target_position, silent_since: None })
    }

    fn has_caught_up(&mut self) -> bool {
        let mut position = self.connection.position.lock();
        let Some((_, unread)) = self.connection.arrived(&position) else { return true };
        let waits_for_peer = match position.stage {
            StreamStage::Header | StreamStage::Response if unread == 0 => return true,
            _ if position.completed >= self.target_position => return true,
            // A peer that sends more before it has its response may never read that response.
            StreamStage::Response => true,
            StreamStage::Body => unread == 0,
            StreamStage::Header | StreamStage::Ended => false,
        };
        if !waits_for_peer {
            self.silent_since = None;
            return false;
        }
        let observed = (position.completed, unread);
        match self.silent_since {
            Some((last, since)) if last == observed && since.elapsed() >= WRITER_STALL => {
                position.stalled = Some(position.completed);
                true
            }
            Some((last, _)) if last == observed => false,
            _ => {
                self.silent_since = Some((observed, Instant::now()));
                false
            }
        }
    }
}
