//! Orders reads behind writes that the protocol does not acknowledge.
//!
//! A client of the first protocol reports an object to the master as complete when the last byte is in its kernel's buffer.
//! A reader that the master then sends here uses another connection, hence another thread. So before a read is served,
//! everything that had arrived by then is in memory: connections in the kernel's queue are accepted, headers that have
//! arrived are parsed, and the writes that they began have ended. Bytes that wait in a sender's kernel for room in ours
//! count too, as long as the sender continues: its connection is followed until it has caught up.
//!
//! Only connections that may carry such writes are tracked: new ones, and those of the first protocol. Where there are none,
//! the order costs a read one system call that finds nothing.

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

/// Bytes that a writer's thread copies are noticed after this time; all other progress is signalled.
const RECHECK: Duration = Duration::from_millis(1);
/// A peer that has sent nothing in the middle of a body for this time keeps no reader of other ranges waiting.
const WRITER_STALL: Duration = Duration::from_millis(250);
/// Bytes that a sender's kernel keeps at most while ours has no room: Linux' own limit unless it is configured.
const SENDER_BUFFER: u64 = 4 << 20;
/// The listener among the sources of events. Connections count from 0.
const LISTENER: u64 = u64::MAX;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// All connections of a data plane that may carry unacknowledged writes.
#[derive(Debug)]
pub(super) struct ReadBarrier {
    /// Readable while the listener or a tracked connection has unread bytes or connections to accept.
    arrivals: OwnedFd,
    /// Odd while connections move from the kernel's queue to where they are tracked.
    accepts: AtomicU64,
    tracked: Mutex<HashMap<u64, Arc<TrackedConnection>>>,
    /// Threads that are taking a header from their socket. Counted before the first byte leaves the socket, until what the header
    /// says can be seen here.
    parsing: AtomicUsize,
    /// Unacknowledged writes that have begun.
    writes: Mutex<WritesInProgress>,
    /// Their number.
    writing: AtomicUsize,
    /// Reads that wait.
    waiting: AtomicUsize,
    turn: Mutex<()>,
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
    span: AddressRange,
    connection: Arc<TrackedConnection>,
}

/// A connection that may carry unacknowledged writes.
#[derive(Debug)]
pub(super) struct TrackedConnection {
    id: u64,
    socket: Arc<TcpStream>,
    /// Held while bytes of a header are taken from the socket.
    position: Mutex<StreamPosition>,
}

/// How far a connection's bytes have been parsed.
#[derive(Debug)]
struct StreamPosition {
    /// Bytes of the stream up to the end of the last request that has ended.
    completed: u64,
    /// Bytes of the stream before the next header: within a request, up to its end.
    next_header: u64,
    header: [u8; HEADER],
    /// Bytes of the next header that have been taken from the socket.
    filled: usize,
    stage: StreamStage,
    /// `completed` when a reader gave up waiting.
    stalled: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamStage {
    /// Between two requests.
    Header,
    /// A body is received.
    Body,
    /// A body is sent. A client sends nothing more until it has all of it, so what arrives now is soon parsed.
    Response,
    /// No further unacknowledged write will come.
    Ended,
}

/// What has been taken from a tracked connection.
pub(super) enum HeaderProgress {
    /// A whole header, and the write in progress if it began one that is not acknowledged.
    Header(TransferHeader, Option<UnacknowledgedWrite>),
    /// A part of one, or nothing.
    Part,
    /// The end of the stream; whether it came within a header.
    End {
        within_header: bool,
    },
    Malformed(UnknownOperationError),
}

/// A read was not served after the writes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a write there has not ended within {0:?}")]
pub(super) struct UnfinishedWriteError(Duration);

/// Whether a read had to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarrierOutcome {
    Immediate,
    Waited,
}

/// An unacknowledged write in progress, until it is dropped.
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

/// Connections leave the kernel's queue.
pub(super) struct AcceptGuard<'a>(&'a ReadBarrier);

impl Drop for AcceptGuard<'_> {
    fn drop(&mut self) {
        self.0.accepts.fetch_add(1, Ordering::SeqCst);
    }
}

impl ReadBarrier {
    /// For the connections that `listener` accepts.
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
            turn: Mutex::default(),
            progress: Condvar::new(),
        })
    }

    /// Connections are about to be accepted, by one thread at a time, until what this returns is dropped.
    pub(super) fn begin_accept(&self) -> AcceptGuard<'_> {
        self.accepts.fetch_add(1, Ordering::SeqCst);
        AcceptGuard(self)
    }

    /// A new connection.
    ///
    /// # Errors
    /// When the kernel has no memory for it.
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

    /// The connection has ended, or uses a protocol with acknowledgements.
    pub(super) fn untrack(&self, connection: &TrackedConnection) {
        if self.tracked.lock().remove(&connection.id).is_none() {
            return;
        }
        connection.position.lock().stage = StreamStage::Ended;
        // Closing the socket would do the same.
        let _ = epoll::delete(&self.arrivals, &*connection.socket);
        self.signal();
    }

    /// Takes bytes of the next header that are there already.
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

    /// The last request has ended, and the next header is waited for.
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
        span: AddressRange,
    ) -> UnacknowledgedWrite {
        let mut in_progress = self.writes.lock();
        let number = in_progress.next;
        in_progress.next += 1;
        in_progress.writes.push(WriteInProgress { number, span, connection: Arc::clone(connection) });
        self.writing.fetch_add(1, Ordering::SeqCst);
        UnacknowledgedWrite { barrier: Arc::clone(self), number }
    }

    /// Waits until all that has arrived for `span` is in memory, but no longer than `limit`. `accept` accepts the connections in the
    /// kernel's queue.
    ///
    /// # Errors
    /// [`UnfinishedWriteError`].
    pub(super) fn order(
        &self,
        span: AddressRange,
        limit: Duration,
        accept: impl FnOnce(),
    ) -> Result<BarrierOutcome, UnfinishedWriteError> {
        // In the order in which bytes move on: from the socket, through a header, to a write. A connection that moves from the kernel's
        // queue to its socket meanwhile could be missed in both.
        let accepts = self.accepts.load(Ordering::SeqCst);
        if accepts.is_multiple_of(2)
            && !self.has_arrivals()
            && self.accepts.load(Ordering::SeqCst) == accepts
            && self.parsing.load(Ordering::SeqCst) == 0
            && self.writing.load(Ordering::SeqCst) == 0
        {
            return Ok(BarrierOutcome::Immediate);
        }
        let until = Instant::now() + limit;
        let has_waited = self.catch_up(until, accept);
        let ordered = self.wait_for_writes(span, until).ok_or(UnfinishedWriteError(limit))?;
        Ok(if has_waited { BarrierOutcome::Waited } else { ordered })
    }

    /// Waits until what has arrived is in memory, on all connections. Whether that was not so at once.
    fn catch_up(&self, until: Instant, accept: impl FnOnce()) -> bool {
        accept();
        let arrived = self.arrivals();
        let mut behind: Vec<_> =
            self.active(&arrived).into_iter().filter_map(ConnectionFollower::new).collect();
        behind.retain_mut(|follow| !follow.has_caught_up());
        if behind.is_empty() {
            return false;
        }
        let has_caught_up = self.wait(until, || {
            behind.retain_mut(|follow| !follow.has_caught_up());
            behind.is_empty()
        });
        if !has_caught_up {
            tracing::warn!(
                connections = behind.len(),
                "clients whose writes are not acknowledged send more than is received: a read may overtake one of them"
            );
        }
        true
    }

    /// Connections with unread bytes, with a header that is being parsed, or with a write in progress.
    fn active(&self, arrived: &[u64]) -> Vec<Arc<TrackedConnection>> {
        let mut active: Vec<_> = {
            let tracked = self.tracked.lock();
            if self.parsing.load(Ordering::SeqCst) > 0 {
                return tracked.values().map(Arc::clone).collect();
            }
            arrived.iter().filter_map(|id| tracked.get(id).map(Arc::clone)).collect()
        };
        // After what arrives: a header may have become a write meanwhile.
        let in_progress = self.writes.lock();
        active.extend(in_progress.writes.iter().map(|write| Arc::clone(&write.connection)));
        active
    }

    /// None if they have not ended in time.
    fn wait_for_writes(&self, span: AddressRange, until: Instant) -> Option<BarrierOutcome> {
        let next = self.writes.lock().next;
        // Not those that begin later, or a reader could wait for one after the other.
        let is_ended = || {
            let in_progress = self.writes.lock();
            in_progress.writes.iter().all(|write| write.number >= next || !write.span.overlaps(span))
        };
        if is_ended() {
            return Some(BarrierOutcome::Immediate);
        }
        self.wait(until, is_ended).then_some(BarrierOutcome::Waited)
    }

    /// Waits until something is so. False if it is not in time.
    fn wait(&self, until: Instant, mut is_so: impl FnMut() -> bool) -> bool {
        if is_so() {
            return true;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut turn = self.turn.lock();
        let mut was_so = is_so();
        while !was_so && Instant::now() < until {
            self.progress.wait_for(&mut turn, RECHECK);
            was_so = is_so();
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        was_so
    }

    fn signal(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let _turn = self.turn.lock();
            self.progress.notify_all();
        }
    }

    /// Whether any source has unread bytes or connections to accept.
    fn has_arrivals(&self) -> bool {
        let mut events = [const { MaybeUninit::<Event>::uninit() }; 1];
        match epoll::wait(&self.arrivals, &mut events[..], Some(&NO_WAIT)) {
            Ok((found, _)) => !found.is_empty(),
            // Unknown, so the slow path decides.
            Err(_) => true,
        }
    }

    /// Connections with unread bytes.
    fn arrivals(&self) -> Vec<u64> {
        let most = self.tracked.lock().len() + 1;
        let mut events: Vec<Event> = Vec::with_capacity(most);
        while let Err(error) = epoll::wait(&self.arrivals, spare_capacity(&mut events), Some(&NO_WAIT)) {
            if error != Errno::INTR {
                tracing::error!(%error, "reads may overtake writes that are not acknowledged");
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
        let got = match rustix::net::recv(&*self.socket, &mut position.header[filled..], RecvFlags::DONTWAIT)
        {
            Ok((_, 0)) => return Ok(HeaderProgress::End { within_header: filled > 0 }),
            Ok((_, got)) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(HeaderProgress::Part),
            Err(error) => return Err(error.into()),
        };
        position.filled += got;
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

    /// How far the stream goes in this kernel, and how much of it is unread. Within a body the former is more than that, by what of
    /// the body has been received. None if no reader has to wait for this connection.
    fn arrived(&self, position: &StreamPosition) -> Option<(u64, u64)> {
        if position.stage == StreamStage::Ended || position.stalled == Some(position.completed) {
            return None;
        }
        let unread = rustix::io::ioctl_fionread(&*self.socket).unwrap_or(0);
        let taken = position.next_header.saturating_add(position.filled as u64);
        Some((taken.saturating_add(unread), unread))
    }
}

/// A connection that a read waits for.
struct ConnectionFollower {
    connection: Arc<TrackedConnection>,
    /// The position before which all that was sent by the read's arrival ends.
    target_position: u64,
    /// What was seen last while the peer has the turn, and since when.
    silent_since: Option<((u64, u64), Instant)>,
}

impl ConnectionFollower {
    /// None if the connection has nothing that a read could overtake.
    fn new(connection: Arc<TrackedConnection>) -> Option<Self> {
        let goal = {
            let position = connection.position.lock();
            let (arrived, unread) = connection.arrived(&position)?;
            if unread == 0 && position.stage != StreamStage::Body {
                return None;
            }
            arrived.saturating_add(SENDER_BUFFER)
        };
        Some(Self { connection, target_position: goal, silent_since: None })
    }

    fn has_caught_up(&mut self) -> bool {
        let mut position = self.connection.position.lock();
        let Some((_, unread)) = self.connection.arrived(&position) else { return true };
        let is_peers_turn = match position.stage {
            StreamStage::Header | StreamStage::Response if unread == 0 => return true,
            _ if position.completed >= self.target_position => return true,
            // A peer that sends more before it has its answer may never take that.
            StreamStage::Response => true,
            StreamStage::Body => unread == 0,
            StreamStage::Header | StreamStage::Ended => false,
        };
        if !is_peers_turn {
            self.silent_since = None;
            return false;
        }
        let seen = (position.completed, unread);
        match self.silent_since {
            Some((last, since)) if last == seen && since.elapsed() >= WRITER_STALL => {
                position.stalled = Some(position.completed);
                true
            }
            Some((last, _)) if last == seen => false,
            _ => {
                self.silent_since = Some((seen, Instant::now()));
                false
            }
        }
    }
}
