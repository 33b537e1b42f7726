//! One connection: pipelines calls, and dispatches responses until it ends.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use mooncake_wire::frame::{self, FrameError, FrameParseResult, ResponseHeader, RpcFrame};
use moongate_runtime::busy_poll::{AdaptivePoller, try_receive};
use moongate_runtime::is_tls_alert;
use moongate_runtime::net::TcpStream;
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::error::{ConnectionLossError, RpcError};
use super::master::MasterClientOptions;
use super::transport::{PresentedCertificate, RpcTransport, SessionReader};

/// Unsent request bytes at which no further call is accepted.
const MAX_UNSENT: usize = 256 << 10;
/// Bytes reserved for each read from the socket.
const READ_BUFFER: usize = 16 << 10;
/// Buffer size of a busy-polled read. For larger responses, the cost of a wakeup does not matter.
const BUSY_POLL_BUFFER: usize = 2 << 10;

/// A response whose body is not decoded yet.
pub(super) type RpcResponseFrame = RpcFrame<ResponseHeader, Bytes>;

/// An encoded call that is queued for a connection.
pub(super) struct PendingCall {
    pub(super) sequence: u32,
    pub(super) frame: Bytes,
    pub(super) reply: oneshot::Sender<Result<RpcResponseFrame, RpcError>>,
}

/// Why a session ended without an error.
pub(super) enum SessionEnd {
    /// All clients of the connection were dropped.
    CallersGone,
    /// The certificate was renewed, so this call needs a new connection.
    CertificateRenewed(PendingCall),
}

/// Writes a part of `output`, or flushes earlier writes if it is empty. Returns whether it wrote.
async fn write_or_flush(writer: &mut (impl AsyncWrite + Unpin), output: &mut BytesMut) -> io::Result<bool> {
    if output.is_empty() {
        return writer.flush().await.map(|()| false);
    }
    writer.write_buf(output).await.map(|_| true)
}

/// State of one connection: calls in flight, and buffers.
pub(super) struct MasterSession<'a> {
    address: &'a Arc<str>,
    options: &'a MasterClientOptions,
    pending: HashMap<u32, oneshot::Sender<Result<RpcResponseFrame, RpcError>>>,
    output: BytesMut,
    input: BytesMut,
    /// Time of the last response, or of the first call after an idle period.
    last_response: Instant,
    /// Whether a response was ever received.
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

    /// Sends calls and dispatches responses until all clients are dropped or the certificate is renewed.
    ///
    /// # Errors
    /// The reason for which the connection ended.
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
            RpcTransport::Secured(stream, presented) => {
                let (reader, writer) = tokio::io::split(*stream);
                self.exchange(reader, writer, Some(&presented), calls).await
            }
        }
    }

    async fn exchange(
        &mut self,
        mut reader: impl SessionReader,
        mut writer: impl AsyncWrite + Unpin,
        presented: Option<&PresentedCertificate>,
        calls: &mut mpsc::Receiver<PendingCall>,
    ) -> Result<SessionEnd, RpcError> {
        // Only TLS buffers writes, so only TLS needs flushes.
        let mut is_unflushed = false;
        loop {
            let is_renewed = presented.is_some_and(PresentedCertificate::is_renewed);
            let takes_calls = self.has_capacity() && (!is_renewed || self.pending.is_empty());
            self.input.reserve(READ_BUFFER);
            tokio::select! {
                call = calls.recv(), if takes_calls => match call {
                    Some(call) if is_renewed => return Ok(SessionEnd::CertificateRenewed(call)),
                    Some(call) => self.begin(call),
                    None => return Ok(SessionEnd::CallersGone),
                },
                sent = write_or_flush(&mut writer, &mut self.output), if is_unflushed || !self.output.is_empty() => {
                    let has_written = sent.map_err(|error| self.lost_by(error))?;
                    is_unflushed = has_written && presented.is_some();
                    if let Some(read) = self.busy_poll(reader.socket()).transpose() {
                        self.on_read(read)?;
                    }
                }
                read = reader.read_buf(&mut self.input) => self.on_read(read)?,
                // Responses arrive in order, so one late response blocks all: the time limit is per connection.
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

    /// Busy-polls for the response to the only call in flight. Returns the number of received bytes, if any arrived in time.
    fn busy_poll(&mut self, stream: Option<&TcpStream>) -> io::Result<Option<usize>> {
        let Some(stream) = stream else { return Ok(None) };
        if self.pending.len() != 1 || !self.output.is_empty() || !self.poller.is_due() {
            return Ok(None);
        }
        let mut buffer = [0; BUSY_POLL_BUFFER];
        let received = self.poller.poll(|| try_receive(stream, &mut buffer))?;
        self.input.extend_from_slice(buffer.get(..received.unwrap_or_default()).unwrap_or_default());
        Ok(received)
    }

    /// Handles the result of a read: new bytes, end of stream, or an error.
    fn on_read(&mut self, read: io::Result<usize>) -> Result<(), RpcError> {
        match read {
            Ok(0) => Err(self.lost(ConnectionLossError::EndOfStream)),
            Ok(_) => self.dispatch_responses().map_err(|error| self.not_frames(error)),
            Err(error) => Err(self.lost_by(error)),
        }
    }

    /// Fails all pending calls with `error`.
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
            // Callers that timed out leave closed entries behind.
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
            // A late response, whose caller has timed out, is dropped.
            if let Some(reply) = self.pending.remove(&response.header.sequence) {
                let _ = reply.send(Ok(response));
            }
        }
        Ok(())
    }

    fn lost(&self, source: ConnectionLossError) -> RpcError {
        RpcError::Lost { address: Arc::clone(self.address), source }
    }

    fn lost_by(&self, error: io::Error) -> RpcError {
        self.lost(ConnectionLossError::Io(Arc::new(error)))
    }

    fn not_frames(&self, error: FrameError) -> RpcError {
        let address = Arc::clone(self.address);
        if !self.answered && is_tls_alert(&self.input) {
            return RpcError::TlsRequired { address };
        }
        if self.answered {
            RpcError::Protocol { address, source: error.into() }
        } else {
            RpcError::NotMaster { address, source: error }
        }
    }
}
