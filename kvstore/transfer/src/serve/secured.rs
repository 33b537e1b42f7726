//! One TLS connection: the peer has a certificate, and each transfer a capability.

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
use super::{TransferAuthentication, TransferCounters};
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

/// A request with its capability.
struct SecuredRequest {
    operation: TransferOperation,
    range: AddressRange,
    capability: Capability,
}

/// Why a connection ends; completes the log message "a peer …".
#[derive(Debug, thiserror::Error)]
enum SecuredCloseReason {
    #[error("was not authenticated: {0}")]
    Unauthenticated(io::Error),
    #[error("requested {0}, which is not within this node's memory or cannot be read")]
    Rejected(AddressRange),
    #[error("requested {range}: {refusal}")]
    Refused { range: AddressRange, refusal: CapabilityError },
    #[error("sent an invalid header: {0}")]
    Operation(#[from] UnknownOperationError),
    #[error("sent a header of the protocol {0:?}; over TLS only the checked protocol is allowed")]
    Protocol(TransferProtocol),
    #[error("sent an invalid capability: {0}")]
    Capability(#[from] UnknownRightsError),
    #[error("disconnected during the transfer of {range}: {error}")]
    Failed { range: AddressRange, error: io::Error },
    #[error("disconnected in the middle of a header")]
    TruncatedHeader,
    /// Regular close between two requests.
    #[error("closed")]
    Closed,
}

impl SecuredConnection {
    /// Serves requests until the connection ends.
    pub(super) fn run(self) {
        let reason = match self.accept() {
            Ok(mut stream) => self.transfers(&mut stream),
            Err(error) => SecuredCloseReason::Unauthenticated(error),
        };
        let counts = self.counts();
        match &reason {
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
            matches!(reason, SecuredCloseReason::Unauthenticated(_) | SecuredCloseReason::Refused { .. });
        if is_refused && self.acceptor.refusals.is_due() {
            tracing::warn!(peer = %self.peer, "a peer {reason}; its connection is closed");
        } else {
            tracing::debug!(peer = %self.peer, "a peer {reason}; its connection is closed");
        }
    }

    fn counts(&self) -> &TransferCounters {
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
                Err(reason) => return reason,
            };
            self.guard.mark_requested();
            if let Err(reason) = self.transfer(stream, &request) {
                return reason;
            }
        }
    }

    /// Waits for the next request. There is no time limit between two requests.
    fn request(&self, stream: &mut BlockingTlsStream) -> Result<SecuredRequest, SecuredCloseReason> {
        let mut bytes = [0; HEADER + CAPABILITY];
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match stream.read(rest) {
                Ok(0) if filled == 0 => return Err(SecuredCloseReason::Closed),
                Ok(0) => return Err(SecuredCloseReason::TruncatedHeader),
                Ok(bytes_read) => {
                    if filled == 0 {
                        self.guard.busy_for(self.stall());
                    }
                    filled += bytes_read;
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
        Ok(SecuredRequest { operation, range: AddressRange { start: address, size }, capability })
    }

    /// Whether to keep waiting for a header after a socket error.
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
        let started = Instant::now();
        let SecuredRequest { operation, range, .. } = *request;
        let slow = Duration::from_secs(range.size / self.acceptor.options.slowest.max(1));
        self.guard.busy_for(self.stall() + slow);
        if let Err((status, reason)) = self.admit(stream, request) {
            reject(stream, status);
            return Err(reason);
        }
        let moved = match operation {
            TransferOperation::Read => self.read(stream, range),
            TransferOperation::Write => self.write(stream, range),
        };
        moved.map_err(|error| SecuredCloseReason::Failed { range, error })?;
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.counts().record_transfer(operation, TransferProtocol::Checked, range.size, nanos);
        Ok(())
    }

    /// Checks the capability first, so that a peer without one gets no information about the memory.
    fn admit(
        &self,
        stream: &BlockingTlsStream,
        request: &SecuredRequest,
    ) -> Result<(), (TransferStatus, SecuredCloseReason)> {
        let SecuredRequest { operation, range, ref capability } = *request;
        let checked = self.authentication.authorizer.check(operation, range, capability, &stream.peer());
        checked.map_err(|refusal| {
            (TransferStatus::Refused(refusal), SecuredCloseReason::Refused { range, refusal })
        })?;
        let target = &self.acceptor.target;
        let possible = range.size > 0 && range.start.checked_add(range.size).is_some();
        let allowed = possible
            && target.contains(range)
            && (operation == TransferOperation::Write || target.is_readable(range));
        if allowed { Ok(()) } else { Err((TransferStatus::Rejected, SecuredCloseReason::Rejected(range))) }
    }

    /// Serves a read of the peer.
    fn read(&self, stream: &mut BlockingTlsStream, range: AddressRange) -> io::Result<()> {
        stream.write_all(&TransferStatus::Ok.encode())?;
        let target = &self.acceptor.target;
        let sent = target.send_to(stream, range)?;
        // The checksum recorded at write time also reveals later corruption.
        let crc = target.checksum(range).unwrap_or(sent);
        stream.write_all(&plane::trailer(crc))?;
        stream.flush()
    }

    /// Serves a write of the peer.
    fn write(&self, stream: &mut BlockingTlsStream, range: AddressRange) -> io::Result<()> {
        let mut is_intact = |source: &mut dyn Read, crc: u32| {
            let mut trailer = [0; STATUS];
            source.read_exact(&mut trailer)?;
            Ok(plane::checksum(trailer) == Some(crc))
        };
        let intact = self.acceptor.target.receive_from(stream, range, &mut is_intact)?;
        if !intact {
            self.counts().damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %self.peer, "checksum mismatch for {range}: another peer wrote to the range at the same time");
        }
        stream.write_all(&if intact { TransferStatus::Ok } else { TransferStatus::Damaged }.encode())?;
        stream.flush()
    }
}

/// Sends a rejection. Closing a connection with unread bytes discards the response, so the beginning of the body is read first.
fn reject(stream: &mut BlockingTlsStream, status: TransferStatus) {
    let sent = stream.write_all(&status.encode()).and_then(|()| stream.close());
    let sent = sent.and_then(|()| stream.socket().set_read_timeout(Some(REFUSED_LINGER)));
    let deadline = Instant::now() + REFUSED_LINGER;
    let mut unread = [0; 16 << 10];
    let mut socket = stream.socket();
    while sent.is_ok() && Instant::now() < deadline {
        match socket.read(&mut unread) {
            Ok(1..) => {}
            Ok(0) | Err(_) => return,
        }
    }
}
