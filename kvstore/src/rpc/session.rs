//! One connection, from its first call to its end.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use mooncake_wire::frame::{self, Frame, FrameError, Parsed, ResponseHeader};
use moongate_runtime::awake::{Habit, receive};
use moongate_runtime::net::TcpStream;
use moongate_runtime::{explain_tls, is_tls_alert};
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::error::RpcError;
use super::master::Options;
use super::transport::{Receiver, ShownCertificate, Transport};

/// Bytes of requests that may wait for the socket before no further call is taken.
const MAX_UNSENT: usize = 256 << 10;
/// Room for reading.
const READ: usize = 16 << 10;
/// Bytes for which a thread stays awake. Larger answers are worth waking up for.
const PIECE: usize = 2 << 10;

/// A response, still packed.
pub(super) type Response = Frame<ResponseHeader, Bytes>;

/// A call on its way to a connection.
pub(super) struct Call {
    pub(super) sequence: u32,
    pub(super) frame: Bytes,
    pub(super) reply: oneshot::Sender<Result<Response, RpcError>>,
}

/// Why a session has ended well.
pub(super) enum Ended {
    /// All callers are gone.
    Unused,
    /// This call needs a new connection, with the renewed certificate.
    Renewed(Call),
}

/// Writes some of `output`, or, if it is empty, flushes what was written before. Returns whether it has written.
async fn write_or_flush(writer: &mut (impl AsyncWrite + Unpin), output: &mut BytesMut) -> io::Result<bool> {
    if output.is_empty() {
        return writer.flush().await.map(|()| false);
    }
    writer.write_buf(output).await.map(|_| true)
}

/// Calls under way on one connection.
pub(super) struct Session<'a> {
    address: &'a Arc<str>,
    options: &'a Options,
    waiting: HashMap<u32, oneshot::Sender<Result<Response, RpcError>>>,
    output: BytesMut,
    input: BytesMut,
    /// When the last response came, or when a call first had to wait for one.
    heard: Instant,
    /// Whether there ever was a response.
    pub(super) answered: bool,
    habit: Habit,
}

impl<'a> Session<'a> {
    pub(super) fn new(address: &'a Arc<str>, options: &'a Options) -> Self {
        Self {
            address,
            options,
            waiting: HashMap::new(),
            output: BytesMut::new(),
            input: BytesMut::new(),
            heard: Instant::now(),
            answered: false,
            habit: Habit::of_caller(options.awake),
        }
    }

    /// Takes calls and hands out responses, until all callers are gone, or the certificate was renewed.
    ///
    /// # Errors
    /// How the connection ended.
    pub(super) async fn run(
        &mut self,
        transport: Transport,
        calls: &mut mpsc::Receiver<Call>,
    ) -> Result<Ended, RpcError> {
        match transport {
            Transport::Plain(mut stream) => {
                let (reader, writer) = stream.split();
                self.exchange(reader, writer, None, calls).await
            }
            Transport::Secured(stream, shown) => {
                let (reader, writer) = tokio::io::split(*stream);
                self.exchange(reader, writer, Some(&shown), calls).await
            }
        }
    }

    async fn exchange(
        &mut self,
        mut reader: impl Receiver,
        mut writer: impl AsyncWrite + Unpin,
        shown: Option<&ShownCertificate>,
        calls: &mut mpsc::Receiver<Call>,
    ) -> Result<Ended, RpcError> {
        // A socket keeps nothing back, TLS may.
        let mut is_unflushed = false;
        loop {
            let is_renewed = shown.is_some_and(ShownCertificate::is_renewed);
            let takes_calls = self.has_room() && (!is_renewed || self.waiting.is_empty());
            self.input.reserve(READ);
            tokio::select! {
                call = calls.recv(), if takes_calls => match call {
                    Some(call) if is_renewed => return Ok(Ended::Renewed(call)),
                    Some(call) => self.begin(call),
                    None => return Ok(Ended::Unused),
                },
                sent = write_or_flush(&mut writer, &mut self.output), if is_unflushed || !self.output.is_empty() => {
                    let has_written = sent.map_err(|error| self.lost(explain_tls(&error)))?;
                    is_unflushed = has_written && shown.is_some();
                    if let Some(read) = self.stay_awake(reader.socket()).transpose() {
                        self.heard(read)?;
                    }
                }
                read = reader.read_buf(&mut self.input) => self.heard(read)?,
                // A response that is long in coming holds up those behind it, so a silence is the connection's.
                () = tokio::time::sleep_until(self.heard + self.options.time_limit),
                    if !self.waiting.is_empty() => {
                    return Err(RpcError::TimedOut {
                        address: Arc::clone(self.address),
                        limit: self.options.time_limit,
                    });
                }
            }
        }
    }

    /// Looks for the response to the only call that is under way. Returns how many bytes came, if any did in time.
    fn stay_awake(&mut self, stream: Option<&TcpStream>) -> io::Result<Option<usize>> {
        let Some(stream) = stream else { return Ok(None) };
        if self.waiting.len() != 1 || !self.output.is_empty() || !self.habit.is_due() {
            return Ok(None);
        }
        let mut piece = [0; PIECE];
        let received = self.habit.look(|| receive(stream, &mut piece))?;
        self.input.extend_from_slice(piece.get(..received.unwrap_or_default()).unwrap_or_default());
        Ok(received)
    }

    /// Bytes have come, or none will come any more.
    fn heard(&mut self, read: io::Result<usize>) -> Result<(), RpcError> {
        match read {
            Ok(0) => Err(self.lost("end of stream".to_owned())),
            Ok(_) => self.hand_out().map_err(|error| self.not_frames(error)),
            Err(error) => Err(self.lost(explain_tls(&error))),
        }
    }

    /// Tells all that wait that nothing will come.
    pub(super) fn fail(&mut self, error: &RpcError) {
        for (_, reply) in self.waiting.drain() {
            let _ = reply.send(Err(error.clone()));
        }
    }

    pub(super) fn begin(&mut self, call: Call) {
        if self.waiting.is_empty() {
            self.heard = Instant::now();
        }
        self.output.extend_from_slice(&call.frame);
        self.waiting.insert(call.sequence, call.reply);
    }

    fn has_room(&mut self) -> bool {
        if self.waiting.len() >= self.options.in_flight {
            // Those who gave up have left their entries behind.
            self.waiting.retain(|_, reply| !reply.is_closed());
        }
        self.waiting.len() < self.options.in_flight && self.output.len() < MAX_UNSENT
    }

    fn hand_out(&mut self) -> Result<(), FrameError> {
        while let Parsed::Frame(response) =
            frame::take::<ResponseHeader>(&mut self.input, self.options.max_reply)?
        {
            self.answered = true;
            self.heard = Instant::now();
            // Nobody waits any more for a response that comes too late.
            if let Some(reply) = self.waiting.remove(&response.header.sequence) {
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
