//! Serves one RPC connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use super::budget::{BufferBudget, BufferReservation};
use super::busy_poll::{ConnectionPoller, RpcThread};
use crate::call::{CallerSession, RemainingInput, RpcProgress};
use crate::reply::{MAX_IDLE_BUFFER, ReplyWriteError, ReplyWriter};
use crate::rpc_stream::RpcStream;
use crate::server::RpcLimits;

/// Minimum free space of the input buffer before a read, in bytes.
const READ_RESERVE: usize = 16 * 1024;
/// Maximum space reserved ahead of the received bytes, whatever length a request announces.
const MAX_PREALLOCATION: usize = 1024 * 1024;

/// Why this side closed a connection.
#[derive(Debug, thiserror::Error)]
enum RpcCloseReason {
    #[error("invalid frame: {0}")]
    InvalidFrame(mooncake_wire::frame::FrameError),
    #[error("request incomplete after {0:?}")]
    RequestTimeout(Duration),
    #[error("idle for {0:?}")]
    Idle(Duration),
    #[error(transparent)]
    Reply(#[from] ReplyWriteError),
    #[error("the buffers of all connections exceed --rpc_buffer_bytes")]
    BufferLimit,
    #[error("cannot write the journal: {0}")]
    Journal(io::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What a connection shares with the others of its thread.
pub(super) struct ConnectionContext {
    pub(super) limits: RpcLimits,
    pub(super) budget: Arc<BufferBudget>,
    pub(super) thread: RpcThread,
    pub(super) stop: CancellationToken,
}

/// Serves a connection until it ends or is stopped. Executed requests get their replies before that.
pub(super) async fn serve(stream: RpcStream, caller: CallerSession, context: ConnectionContext) {
    let ConnectionContext { limits, budget, thread, stop } = context;
    let peer = stream.socket().peer_addr().ok();
    let connection = RpcConnection {
        stream,
        session: caller,
        limits,
        reservation: BufferReservation::new(&budget),
        poller: ConnectionPoller::new(thread),
        input: BytesMut::new(),
        replies: ReplyWriter::new(&limits),
    };
    match connection.run(&stop).await {
        Ok(()) => {}
        // Closed without a reply, as by Mooncake's master: a client of another protocol could not parse one.
        Err(
            error @ (RpcCloseReason::InvalidFrame(_)
            | RpcCloseReason::Idle(_)
            | RpcCloseReason::Io(_)
            | RpcCloseReason::Reply(ReplyWriteError::Io(_))),
        ) => {
            tracing::debug!(?peer, %error, "closed a connection");
        }
        Err(error) => tracing::warn!(?peer, %error, "closed a connection"),
    }
}

struct RpcConnection {
    stream: RpcStream,
    session: CallerSession,
    limits: RpcLimits,
    reservation: BufferReservation,
    poller: ConnectionPoller,
    input: BytesMut,
    replies: ReplyWriter,
}

impl RpcConnection {
    async fn run(mut self, stop: &CancellationToken) -> Result<(), RpcCloseReason> {
        let mut stopped = std::pin::pin!(stop.cancelled());
        let mut missing = 0;
        // Deadline for the rest of an incomplete request.
        let mut deadline = None;
        let mut had_request = false;
        loop {
            self.input.reserve(missing.clamp(READ_RESERVE, MAX_PREALLOCATION));
            self.check_buffer_budget()?;
            let polled = match self.stream.plain() {
                Some(stream) if had_request && self.input.is_empty() => {
                    self.poller.poll_next(stream, &mut self.input).await?
                }
                _ => None,
            };
            let is_open = match polled {
                Some(bytes) => bytes > 0 && !stop.is_cancelled(),
                None => self.read(deadline, stopped.as_mut()).await?,
            };
            if !is_open {
                return Ok(());
            }
            had_request = self.execute(&mut missing).await?;
            deadline = match deadline {
                _ if self.input.is_empty() => None,
                Some(deadline) if !had_request => Some(deadline),
                _ => Some(Instant::now() + self.limits.stall_timeout),
            };
            if self.input.is_empty() && self.input.capacity() > MAX_IDLE_BUFFER {
                self.input = BytesMut::new();
            }
        }
    }

    fn check_buffer_budget(&mut self) -> Result<(), RpcCloseReason> {
        let bytes = self.input.capacity() + self.replies.capacity();
        if self.reservation.set(bytes) { Ok(()) } else { Err(RpcCloseReason::BufferLimit) }
    }

    /// Reads available bytes. Returns false at the end of the stream or after `stop`.
    async fn read(
        &mut self,
        deadline: Option<Instant>,
        stopped: Pin<&mut WaitForCancellationFuture<'_>>,
    ) -> Result<bool, RpcCloseReason> {
        let RpcLimits { stall_timeout, idle_timeout, .. } = self.limits;
        let (stream, input) = (&mut self.stream, &mut self.input);
        let read = async {
            match (deadline, idle_timeout) {
                (Some(deadline), _) => timeout_at(deadline, stream.read_buf(input))
                    .await
                    .map_err(|_| RpcCloseReason::RequestTimeout(stall_timeout)),
                (None, Some(idle_timeout)) => timeout(idle_timeout, stream.read_buf(input))
                    .await
                    .map_err(|_| RpcCloseReason::Idle(idle_timeout)),
                (None, None) => Ok(stream.read_buf(input).await),
            }
        };
        tokio::select! {
            biased;
            read = read => Ok(read?? > 0),
            () = stopped => Ok(false),
        }
    }

    /// Executes all complete requests and sends their replies. Returns whether there was any.
    async fn execute(&mut self, missing: &mut usize) -> Result<bool, RpcCloseReason> {
        let mut had_request = false;
        loop {
            let RpcProgress { consumed, remaining } = self.session.run(&self.input, self.replies.buffer());
            had_request |= consumed > 0;
            // A call without a reply may have changed the state too.
            if let Err(error) = self.replies.commit(self.session.recorder()).await {
                self.refuse(consumed, error)?;
            }
            self.input.advance(consumed);
            self.send_replies().await?;
            match remaining {
                RemainingInput::More => {}
                RemainingInput::Incomplete(bytes) => {
                    *missing = bytes;
                    return Ok(had_request);
                }
                RemainingInput::Malformed(error) => return Err(RpcCloseReason::InvalidFrame(error)),
            }
        }
    }

    /// Replaces the replies of requests whose changes cannot be persisted.
    fn refuse(&mut self, consumed: usize, error: io::Error) -> Result<(), RpcCloseReason> {
        let output = self.replies.buffer();
        output.clear();
        let requests = self.input.get(..consumed).unwrap_or_default();
        self.session.refuse_writes(requests, output).ok_or(RpcCloseReason::Journal(error))
    }

    async fn send_replies(&mut self) -> Result<(), RpcCloseReason> {
        if self.replies.is_empty() {
            return Ok(());
        }
        self.check_buffer_budget()?;
        Ok(self.replies.send(&mut self.stream).await?)
    }
}
