//! One connection with TLS: the peer has a certificate, and each transfer a capability.

use std::io::{self, Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mooncake_wire::capability::{CAPABILITY, Capability, CapabilityError, UnknownRightsError};
use moongate_runtime::BlockingTlsStream;

use super::connection::{REFUSED_LINGER, set_options};
use super::listener::TransferAcceptor;
use super::registry::ConnectionGuard;
use super::transfer_target::AddressRange;
use super::{Counts, TransferAuthentication};
use crate::plane::{
    self, HEADER, STATUS, TransferHeader, TransferOperation, TransferProtocol, TransferStatus,
    UnknownOperationError,
};

pub(super) struct SecuredConnection {
    pub(super) stream: Arc<TcpStream>,
    pub(super) peer: SocketAddr,
    pub(super) acceptor: Arc<TransferAcceptor>,
    pub(super) guard: ConnectionGuard,
    pub(super) authentication: TransferAuthentication,
}

/// A request, and what allows it.
struct SecuredRequest {
    operation: TransferOperation,
    span: AddressRange,
    capability: Capability,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum SecuredCloseReason {
    #[error("was not authenticated: {0}")]
    Unauthenticated(io::Error),
    #[error("requested {0}, which is not within this node's memory or cannot be read")]
    Rejected(AddressRange),
    #[error("requested {span}: {refusal}")]
    Refused { span: AddressRange, refusal: CapabilityError },
    #[error("sent an invalid header: {0}")]
    Operation(#[from] UnknownOperationError),
    #[error("sent a header of the protocol {0:?}; with TLS only the checked protocol is spoken")]
    Protocol(TransferProtocol),
    #[error("sent an invalid capability: {0}")]
    Capability(#[from] UnknownRightsError),
    #[error("broke off in the middle of {span}: {error}")]
    Failed { span: AddressRange, error: io::Error },
    #[error("broke off in the middle of a header")]
    TruncatedHeader,
    /// In order.
    #[error("closed")]
    Closed,
}

impl SecuredConnection {
    /// Serves until the connection ends.
    pub(super) fn run(self) {
        let end = match self.accept() {
            Ok(mut stream) => self.transfers(&mut stream),
            Err(error) => SecuredCloseReason::Unauthenticated(error),
        };
        let counts = self.counts();
        match &end {
            SecuredCloseReason::Unauthenticated(_) => {
                _ = counts.unauthenticated.fetch_add(1, Ordering::Relaxed);
            }
            SecuredCloseReason::Refused { refusal, .. } => counts.refused(*refusal),
            SecuredCloseReason::Rejected(_) => _ = counts.rejected.fetch_add(1, Ordering::Relaxed),
            SecuredCloseReason::Operation(_)
            | SecuredCloseReason::Protocol(_)
            | SecuredCloseReason::Capability(_) => {
                counts.malformed.fetch_add(1, Ordering::Relaxed);
            }
            SecuredCloseReason::Failed { .. } | SecuredCloseReason::TruncatedHeader => {
                _ = counts.failed.fetch_add(1, Ordering::Relaxed);
            }
            SecuredCloseReason::Closed => return,
        }
        let is_refused =
            matches!(end, SecuredCloseReason::Unauthenticated(_) | SecuredCloseReason::Refused { .. });
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
        self.guard.busy_for(self.stall());
        set_options(&self.stream, &self.acceptor.options)?;
        self.authentication.tls.accept_blocking(self.stream.try_clone()?)
    }

    fn transfers(&self, stream: &mut BlockingTlsStream) -> SecuredCloseReason {
        loop {
            self.guard.idle();
            if self.guard.is_draining() {
                return SecuredCloseReason::Closed;
            }
            let request = match self.request(stream) {
                Ok(request) => request,
                Err(end) => return end,
            };
            self.guard.mark_requested();
            if let Err(end) = self.transfer(stream, &request) {
                return end;
            }
        }
    }

    /// Waits for the next request. A peer may be silent between two for as long as it likes.
    fn request(&self, stream: &mut BlockingTlsStream) -> Result<SecuredRequest, SecuredCloseReason> {
        let mut bytes = [0; HEADER + CAPABILITY];
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match stream.read(rest) {
                Ok(0) if filled == 0 => return Err(SecuredCloseReason::Closed),
                Ok(0) => return Err(SecuredCloseReason::TruncatedHeader),
                Ok(more) => {
                    if filled == 0 {
                        self.guard.busy_for(self.stall());
                    }
                    filled += more;
                }
                Err(error) => self.should_continue(&error, filled > 0)?,
            }
        }
        let (mut header, mut capability) = ([0; HEADER], [0; CAPABILITY]);
        header.copy_from_slice(&bytes[..HEADER]);
        capability.copy_from_slice(&bytes[HEADER..]);
        let TransferHeader { size, address, operation, protocol } = TransferHeader::decode(&header)?;
        if protocol != TransferProtocol::Checked {
            return Err(SecuredCloseReason::Protocol(protocol));
        }
        let capability = Capability::decode(&capability)?;
        Ok(SecuredRequest { operation, span: AddressRange { start: address, size }, capability })
    }

    /// Whether a header is waited for after an error of the socket.
    fn should_continue(&self, error: &io::Error, within_header: bool) -> Result<(), SecuredCloseReason> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            _ if within_header => Err(SecuredCloseReason::TruncatedHeader),
            io::ErrorKind::WouldBlock if !self.guard.is_draining() && !self.guard.is_silent() => Ok(()),
            _ => Err(SecuredCloseReason::Closed),
        }
    }

    fn transfer(
        &self,
        stream: &mut BlockingTlsStream,
        request: &SecuredRequest,
    ) -> Result<(), SecuredCloseReason> {
        let began = Instant::now();
        let SecuredRequest { operation, span, .. } = *request;
        let slow = Duration::from_secs(span.size / self.acceptor.options.slowest.max(1));
        self.guard.busy_for(self.stall() + slow);
        if let Err((status, end)) = self.admit(stream, request) {
            reject(stream, status);
            return Err(end);
        }
        let moved = match operation {
            TransferOperation::Read => self.read(stream, span),
            TransferOperation::Write => self.write(stream, span),
        };
        moved.map_err(|error| SecuredCloseReason::Failed { span, error })?;
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.counts().record_transfer(operation, TransferProtocol::Checked, span.size, nanos);
        Ok(())
    }

    /// Checks the capability first, so that a peer without one gets no information about the memory.
    fn admit(
        &self,
        stream: &BlockingTlsStream,
        request: &SecuredRequest,
    ) -> Result<(), (TransferStatus, SecuredCloseReason)> {
        let SecuredRequest { operation, span, ref capability } = *request;
        let checked = self.authentication.authorizer.check(operation, span, capability, &stream.peer());
        checked.map_err(|refusal| {
            (TransferStatus::Refused(refusal), SecuredCloseReason::Refused { span, refusal })
        })?;
        let target = &self.acceptor.target;
        let possible = span.size > 0 && span.start.checked_add(span.size).is_some();
        let may = possible
            && target.contains(span)
            && (operation == TransferOperation::Write || target.is_readable(span));
        if may { Ok(()) } else { Err((TransferStatus::Rejected, SecuredCloseReason::Rejected(span))) }
    }

    /// The peer reads.
    fn read(&self, stream: &mut BlockingTlsStream, span: AddressRange) -> io::Result<()> {
        stream.write_all(&TransferStatus::Ok.encode())?;
        let target = &self.acceptor.target;
        let sent = target.send_to(stream, span)?;
        // What was noted when the bytes were written also shows whether they have changed since.
        let crc = target.checksum(span).unwrap_or(sent);
        stream.write_all(&plane::trailer(crc))?;
        stream.flush()
    }

    /// The peer writes.
    fn write(&self, stream: &mut BlockingTlsStream, span: AddressRange) -> io::Result<()> {
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
        stream.write_all(&if is_whole { TransferStatus::Ok } else { TransferStatus::Damaged }.encode())?;
        stream.flush()
    }
}

/// Reports a refusal. A connection that is closed with unread bytes in it discards the answer, so the beginning of the body is read.
fn reject(stream: &mut BlockingTlsStream, status: TransferStatus) {
    let sent = stream.write_all(&status.encode()).and_then(|()| stream.close());
    let sent = sent.and_then(|()| stream.socket().set_read_timeout(Some(REFUSED_LINGER)));
    let until = Instant::now() + REFUSED_LINGER;
    let mut unread = [0; 16 << 10];
    let mut socket = stream.socket();
    while sent.is_ok() && Instant::now() < until {
        match socket.read(&mut unread) {
            Ok(1..) => {}
            Ok(0) | Err(_) => return,
        }
    }
}
