//! One connection, from its first call to its end.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use mooncake_wire::frame::{self, FrameError, FrameParseResult, ResponseHeader, RpcFrame};
use moongate_runtime::busy_poll::{AdaptivePoller, try_receive};
use moongate_runtime::net::TcpStream;
use moongate_runtime::{describe_tls_error, is_tls_alert};
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::error::RpcError;
use super::master::MasterClientOptions;
use super::transport::{PresentedCertificate, RpcTransport, SessionReader};

/// Bytes of requests that may wait for the socket before no further call is taken.
const MAX_UNSENT: usize = 256 << 10;
/// Room for reading.
const READ_BUFFER: usize = 16 << 10;
/// Bytes for which a thread stays awake. Larger answers are worth waking up for.
const BUSY_POLL_BUFFER: usize = 2 << 10;

/// A response, still packed.
pub(super) type RpcResponseFrame = RpcFrame<ResponseHeader, Bytes>;

/// A call on its way to a connection.
pub(super) struct PendingCall {
    pub(super) sequence: u32,
    pub(super) frame: Bytes,
    pub(super) reply: oneshot::Sender<Result<RpcResponseFrame, RpcError>>,
}

/// Why a session has ended well.
pub(super) enum SessionEnd {
    /// All callers are gone.
    CallersGone,
    /// This call needs a new connection, with the renewed certificate.
    CertificateRenewed(PendingCall),
}

/// Writes some of `output`, or, if it is empty, flushes what was written before. Returns whether it has written.
async fn write_or_flush(writer: &mut (impl AsyncWrite + Unpin), output: &mut BytesMut) -> io::Result<bool> {
    if output.is_empty() {
        return writer.flush().await.map(|()| false);
    }
    writer.write_buf(output).await.map(|_| true)
}

/// Calls under way on one connection.
pub(super) struct MasterSession<'a> {
    address: &'a Arc<str>,
    options: &'a MasterClientOptions,
    pending: HashMap<u32, oneshot::Sender<Result<RpcResponseFrame, RpcError>>>,
    output: BytesMut,
    input: BytesMut,
    /// When the last response came, or when a call first had to wait for one.
    last_response: Instant,
    /// Whether there ever was a response.
    pub(super) answered: bool,
    poller: AdaptivePoller,
}

impl<'a> MasterSession<'a> {
    pub(super) fn new(address: &'a Arc<str>, options: &'a MasterClientOptions) -> Self {
        Self {
            address,
            options,
            pending: HashMap::new(),
            output: BytesMut::new(),
            input: BytesMut::new(),
            last_response: Instant::now(),
            answered: false,
            poller: AdaptivePoller::for_process(options.busy_poll),
        }
    }

    /// Takes calls and hands out responses, until all callers are gone, or the certificate was renewed.
    ///
    /// # Errors
    /// How the connection ended.
    pub(super) async fn run(
        &mut self,
        transport: RpcTransport,
        calls: &mut mpsc::Receiver<PendingCall>,
    ) -> Result<SessionEnd, RpcError> {
        match transport {
            RpcTransport::Plain(mut stream) => {
                let (reader, writer) = stream.split();
                self.exchange(reader, writer, None, calls).await
            }
            RpcTransport::Secured(stream, shown) => {
                let (reader, writer) = tokio::io::split(*stream);
                self.exchange(reader, writer, Some(&shown), calls).await
            }
        }
    }

    async fn exchange(
        &mut self,
        mut reader: impl SessionReader,
        mut writer: impl AsyncWrite + Unpin,
        shown: Option<&PresentedCertificate>,
        calls: &mut mpsc::Receiver<PendingCall>,
    ) -> Result<SessionEnd, RpcError> {
        // A socket keeps nothing back, TLS may.
        let mut is_unflushed = false;
        loop {
            let is_renewed = shown.is_some_and(PresentedCertificate::is_renewed);
            let takes_calls = self.has_capacity() && (!is_renewed || self.pending.is_empty());
            self.input.reserve(READ_BUFFER);
            tokio::select! {
                call = calls.recv(), if takes_calls => match call {
                    Some(call) if is_renewed => return Ok(SessionEnd::CertificateRenewed(call)),
                    Some(call) => self.begin(call),
                    None => return Ok(SessionEnd::CallersGone),
                },
                sent = write_or_flush(&mut writer, &mut self.output), if is_unflushed || !self.output.is_empty() => {
                    let has_written = sent.map_err(|error| self.lost(describe_tls_error(&error)))?;
                    is_unflushed = has_written && shown.is_some();
                    if let Some(read) = self.busy_poll(reader.socket()).transpose() {
                        self.on_read(read)?;
                    }
                }
                read = reader.read_buf(&mut self.input) => self.on_read(read)?,
                // A response that is long in coming holds up those behind it, so a silence is the connection's.
                () = tokio::time::sleep_until(self.last_response + self.options.timeout),
                    if !self.pending.is_empty() => {
                    return Err(RpcError::TimedOut {
                        address: Arc::clone(self.address),
                        limit: self.options.timeout,
                    });
                }
            }
        }
    }

    /// Looks for the response to the only call that is under way. Returns how many bytes came, if any did in time.
    fn busy_poll(&mut self, stream: Option<&TcpStream>) -> io::Result<Option<usize>> {
        let Some(stream) = stream else { return Ok(None) };
        if self.pending.len() != 1 || !self.output.is_empty() || !self.poller.is_due() {
            return Ok(None);
        }
        let mut piece = [0; BUSY_POLL_BUFFER];
        let received = self.poller.poll(|| try_receive(stream, &mut piece))?;
        self.input.extend_from_slice(piece.get(..received.unwrap_or_default()).unwrap_or_default());
        Ok(received)
    }

    /// Bytes have come, or none will come any more.
    fn on_read(&mut self, read: io::Result<usize>) -> Result<(), RpcError> {
        match read {
            Ok(0) => Err(self.lost("end of stream".to_owned())),
            Ok(_) => self.dispatch_responses().map_err(|error| self.not_frames(error)),
            Err(error) => Err(self.lost(describe_tls_error(&error))),
        }
    }

    /// Tells all that wait that nothing will come.
    pub(super) fn fail(&mut self, error: &RpcError) {
        for (_, reply) in self.pending.drain() {
            let _ = reply.send(Err(error.clone()));
        }
    }

    pub(super) fn begin(&mut self, call: PendingCall) {
        if self.pending.is_empty() {
            self.last_response = Instant::now();
        }
        self.output.extend_from_slice(&call.frame);
        self.pending.insert(call.sequence, call.reply);
    }

    fn has_capacity(&mut self) -> bool {
        if self.pending.len() >= self.options.in_flight {
            // Those who gave up have left their entries behind.
            self.pending.retain(|_, reply| !reply.is_closed());
        }
        self.pending.len() < self.options.in_flight && self.output.len() < MAX_UNSENT
    }

    fn dispatch_responses(&mut self) -> Result<(), FrameError> {
        while let FrameParseResult::Frame(response) =
            frame::take::<ResponseHeader>(&mut self.input, self.options.max_response)?
        {
            self.answered = true;
            self.last_response = Instant::now();
            // Nobody waits any more for a response that comes too late.
            if let Some(reply) = self.pending.remove(&response.header.sequence) {
                let _ = reply.send(Ok(response));
            }
        }
        Ok(())
    }

    fn lost(&self, reason: String) -> RpcError {
        RpcError::Lost { address: Arc::clone(self.address), reason }
    }

    fn not_frames(&self, error: FrameError) -> RpcError {
        let address = Arc::clone(self.address);
        if !self.answered && is_tls_alert(&self.input) {
            return RpcError::TlsRequired { address };
        }
        let reason = error.to_string();
        if self.answered {
            RpcError::Protocol { address, reason }
        } else {
            RpcError::NotMaster { address, reason }
        }
    }
}
