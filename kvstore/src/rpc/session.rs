//! One connection, from its first call to its end.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use mooncake_wire::frame::{self, Frame, FrameError, Parsed, ResponseHeader};
use moongate_runtime::awake::{Habit, receive};
use moongate_runtime::net::TcpStream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::error::RpcError;
use super::master::Options;

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

    /// Takes calls and hands out responses, until nobody is left who could call.
    ///
    /// # Errors
    /// How the connection ended.
    pub(super) async fn run(
        &mut self,
        mut stream: TcpStream,
        calls: &mut mpsc::Receiver<Call>,
    ) -> Result<(), RpcError> {
        let (mut reader, mut writer) = stream.split();
        loop {
            let takes_calls = self.has_room();
            self.input.reserve(READ);
            tokio::select! {
                call = calls.recv(), if takes_calls => match call {
                    Some(call) => self.begin(call),
                    None => return Ok(()),
                },
                sent = writer.write_buf(&mut self.output), if !self.output.is_empty() => {
                    sent.map_err(|error| self.lost(error.to_string()))?;
                    if let Some(read) = self.stay_awake(reader.as_ref()).transpose() {
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
    fn stay_awake(&mut self, stream: &TcpStream) -> io::Result<Option<usize>> {
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
            Err(error) => Err(self.lost(error.to_string())),
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
        let (address, reason) = (Arc::clone(self.address), error.to_string());
        if self.answered {
            RpcError::Protocol { address, reason }
        } else {
            RpcError::NotMaster { address, reason }
        }
    }
}
