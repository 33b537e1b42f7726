//! One connection with TLS: the peer has a certificate, and each transfer a capability.

use std::io::{self, Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mooncake_wire::capability::{CAPABILITY, Capability, Refusal, UnknownRights};
use moongate_runtime::BlockingTlsStream;

use super::connection::{LINGER, set_options};
use super::listener::Acceptor;
use super::registry::Place;
use super::target::Span;
use super::{Authentication, Counts};
use crate::plane::{self, HEADER, Header, Operation, Protocol, STATUS, Status, UnknownOperation};

pub(super) struct SecuredConnection {
    pub(super) stream: Arc<TcpStream>,
    pub(super) peer: SocketAddr,
    pub(super) acceptor: Arc<Acceptor>,
    pub(super) place: Place,
    pub(super) authentication: Authentication,
}

/// A request, and what allows it.
struct Request {
    operation: Operation,
    span: Span,
    capability: Capability,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("was not authenticated: {0}")]
    Unauthenticated(io::Error),
    #[error("requested {0}, which is not within this node's memory or cannot be read")]
    Rejected(Span),
    #[error("requested {span}: {refusal}")]
    Refused { span: Span, refusal: Refusal },
    #[error("sent an invalid header: {0}")]
    Operation(#[from] UnknownOperation),
    #[error("sent a header of the protocol {0:?}; with TLS only the checked protocol is spoken")]
    Protocol(Protocol),
    #[error("sent an invalid capability: {0}")]
    Capability(#[from] UnknownRights),
    #[error("broke off in the middle of {span}: {error}")]
    Failed { span: Span, error: io::Error },
    #[error("broke off in the middle of a header")]
    HalfHeader,
    /// In order.
    #[error("closed")]
    Closed,
}

impl SecuredConnection {
    /// Serves until the connection ends.
    pub(super) fn run(self) {
        let end = match self.accept() {
            Ok(mut stream) => self.transfers(&mut stream),
            Err(error) => End::Unauthenticated(error),
        };
        let counts = self.counts();
        match &end {
            End::Unauthenticated(_) => _ = counts.unauthenticated.fetch_add(1, Ordering::Relaxed),
            End::Refused { refusal, .. } => counts.refused(*refusal),
            End::Rejected(_) => _ = counts.rejected.fetch_add(1, Ordering::Relaxed),
            End::Operation(_) | End::Protocol(_) | End::Capability(_) => {
                counts.malformed.fetch_add(1, Ordering::Relaxed);
            }
            End::Failed { .. } | End::HalfHeader => _ = counts.failed.fetch_add(1, Ordering::Relaxed),
            End::Closed => return,
        }
        let is_refused = matches!(end, End::Unauthenticated(_) | End::Refused { .. });
        if is_refused && self.acceptor.refusals.is_due() {
            tracing::warn!(peer = %self.peer, "a peer {end}; its connection is closed");
        } else {
            tracing::debug!(peer = %self.peer, "a peer {end}; its connection is closed");
        }
    }

    fn counts(&self) -> &Counts {
        &self.acceptor.counts
    }

    fn stall(&self) -> Duration {
        self.acceptor.options.stall
    }

    fn accept(&self) -> io::Result<BlockingTlsStream> {
        self.place.busy_for(self.stall());
        set_options(&self.stream, &self.acceptor.options)?;
        self.authentication.tls.accept_blocking(self.stream.try_clone()?)
    }

    fn transfers(&self, stream: &mut BlockingTlsStream) -> End {
        loop {
            self.place.idle();
            if self.place.is_draining() {
                return End::Closed;
            }
            let request = match self.request(stream) {
                Ok(request) => request,
                Err(end) => return end,
            };
            self.place.has_requested();
            if let Err(end) = self.transfer(stream, &request) {
                return end;
            }
        }
    }

    /// Waits for the next request. A peer may be silent between two for as long as it likes.
    fn request(&self, stream: &mut BlockingTlsStream) -> Result<Request, End> {
        let mut bytes = [0; HEADER + CAPABILITY];
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match stream.read(rest) {
                Ok(0) if filled == 0 => return Err(End::Closed),
                Ok(0) => return Err(End::HalfHeader),
                Ok(more) => {
                    if filled == 0 {
                        self.place.busy_for(self.stall());
                    }
                    filled += more;
                }
                Err(error) => self.continue_after(&error, filled > 0)?,
            }
        }
        let (mut header, mut capability) = ([0; HEADER], [0; CAPABILITY]);
        header.copy_from_slice(&bytes[..HEADER]);
        capability.copy_from_slice(&bytes[HEADER..]);
        let Header { size, address, operation, protocol } = Header::decode(&header)?;
        if protocol != Protocol::Checked {
            return Err(End::Protocol(protocol));
        }
        let capability = Capability::decode(&capability)?;
        Ok(Request { operation, span: Span { start: address, size }, capability })
    }

    /// Whether a header is waited for after an error of the socket.
    fn continue_after(&self, error: &io::Error, within_header: bool) -> Result<(), End> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            _ if within_header => Err(End::HalfHeader),
            io::ErrorKind::WouldBlock if !self.place.is_draining() && !self.place.is_silent() => Ok(()),
            _ => Err(End::Closed),
        }
    }

    fn transfer(&self, stream: &mut BlockingTlsStream, request: &Request) -> Result<(), End> {
        let began = Instant::now();
        let Request { operation, span, .. } = *request;
        let slow = Duration::from_secs(span.size / self.acceptor.options.slowest.max(1));
        self.place.busy_for(self.stall() + slow);
        if let Err((status, end)) = self.admit(stream, request) {
            reject(stream, status);
            return Err(end);
        }
        let moved = match operation {
            Operation::Read => self.read(stream, span),
            Operation::Write => self.write(stream, span),
        };
        moved.map_err(|error| End::Failed { span, error })?;
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.counts().done(operation, Protocol::Checked, span.size, nanos);
        Ok(())
    }

    /// Checks the capability first, so that a peer without one gets no information about the memory.
    fn admit(&self, stream: &BlockingTlsStream, request: &Request) -> Result<(), (Status, End)> {
        let Request { operation, span, ref capability } = *request;
        let checked = self.authentication.authorizer.check(operation, span, capability, &stream.peer());
        checked.map_err(|refusal| (Status::Refused(refusal), End::Refused { span, refusal }))?;
        let target = &self.acceptor.target;
        let possible = span.size > 0 && span.start.checked_add(span.size).is_some();
        let may =
            possible && target.contains(span) && (operation == Operation::Write || target.readable(span));
        if may { Ok(()) } else { Err((Status::Rejected, End::Rejected(span))) }
    }

    /// The peer reads.
    fn read(&self, stream: &mut BlockingTlsStream, span: Span) -> io::Result<()> {
        stream.write_all(&Status::Ok.encode())?;
        let target = &self.acceptor.target;
        let sent = target.send_to(stream, span)?;
        // What was noted when the bytes were written also shows whether they have changed since.
        let crc = target.checksum(span).unwrap_or(sent);
        stream.write_all(&plane::trailer(crc))?;
        stream.flush()
    }

    /// The peer writes.
    fn write(&self, stream: &mut BlockingTlsStream, span: Span) -> io::Result<()> {
        let mut whole = |source: &mut dyn Read, crc: u32| {
            let mut trailer = [0; STATUS];
            source.read_exact(&mut trailer)?;
            Ok(plane::checksum(trailer) == Some(crc))
        };
        let is_whole = self.acceptor.target.receive_from(stream, span, &mut whole)?;
        if !is_whole {
            self.counts().damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %self.peer, "{span} are not what was sent: another peer wrote to them too");
        }
        stream.write_all(&if is_whole { Status::Ok } else { Status::Damaged }.encode())?;
        stream.flush()
    }
}

/// Reports a refusal. A connection that is closed with unread bytes in it discards the answer, so the beginning of the body is read.
fn reject(stream: &mut BlockingTlsStream, status: Status) {
    let sent = stream.write_all(&status.encode()).and_then(|()| stream.close());
    let sent = sent.and_then(|()| stream.socket().set_read_timeout(Some(LINGER)));
    let until = Instant::now() + LINGER;
    let mut unread = [0; 16 << 10];
    let mut socket = stream.socket();
    while sent.is_ok() && Instant::now() < until {
        match socket.read(&mut unread) {
            Ok(1..) => {}
            Ok(0) | Err(_) => return,
        }
    }
}
