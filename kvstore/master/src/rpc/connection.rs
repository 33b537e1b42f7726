//! One connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use super::budget::{BufferBudget, BufferReservation};
use super::busy_poll::{ConnectionPoller, RpcThread};
use super::stream::RpcStream;
use crate::call::{CallerSession, RemainingInput, RpcProgress};
use crate::server::RpcLimits;

/// Bytes for which there is always room before a read.
const READ_RESERVE: usize = 16 * 1024;
/// The most bytes for which room is made ahead, however many a request is said to have.
const MAX_PREALLOCATION: usize = 1024 * 1024;
/// An empty buffer that is larger is given back.
const MAX_IDLE_BUFFER: usize = 64 * 1024;

/// Why a connection was closed by this side.
#[derive(Debug, thiserror::Error)]
enum RpcCloseReason {
    #[error("it sends something else than requests: {0}")]
    InvalidFrame(mooncake_wire::frame::FrameError),
    #[error("a request did not arrive as a whole within {0:?}")]
    RequestTimeout(Duration),
    #[error("nothing was sent for {0:?}")]
    Idle(Duration),
    #[error("replies were not taken within {0:?}")]
    ReplyTimeout(Duration),
    #[error("all connections together hold too many bytes; see --rpc_buffer_bytes")]
    BufferLimit,
    #[error("the journal cannot be written: {0}")]
    Journal(io::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Serves a connection until it ends or `stop` is cancelled. A request that has been executed is answered before.
pub(super) async fn serve(
    stream: RpcStream,
    caller: CallerSession,
    limits: RpcLimits,
    budget: Arc<BufferBudget>,
    thread: RpcThread,
    stop: CancellationToken,
) {
    let peer = stream.socket().peer_addr().ok();
    let connection = RpcConnection {
        stream,
        session: caller,
        limits,
        reservation: BufferReservation::new(&budget),
        poller: ConnectionPoller::new(thread),
        input: BytesMut::new(),
        output: BytesMut::new(),
    };
    match connection.run(&stop).await {
        Ok(()) => {}
        // As Mooncake's own master does: whoever speaks something else learns nothing.
        Err(error @ (RpcCloseReason::InvalidFrame(_) | RpcCloseReason::Idle(_) | RpcCloseReason::Io(_))) => {
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
    output: BytesMut,
}

impl RpcConnection {
    async fn run(mut self, stop: &CancellationToken) -> Result<(), RpcCloseReason> {
        let mut stopped = std::pin::pin!(stop.cancelled());
        let mut missing = 0;
        // When the request has to be there whose beginning is.
        let mut deadline = None;
        let mut was_whole = false;
        loop {
            self.input.reserve(missing.clamp(READ_RESERVE, MAX_PREALLOCATION));
            self.check_buffer_budget()?;
            let at_once = match self.stream.plain() {
                Some(stream) if was_whole && self.input.is_empty() => {
                    self.poller.poll_next(stream, &mut self.input).await?
                }
                _ => None,
            };
            let goes_on = match at_once {
                Some(bytes) => bytes > 0 && !stop.is_cancelled(),
                None => self.read(deadline, stopped.as_mut()).await?,
            };
            if !goes_on {
                return Ok(());
            }
            was_whole = self.execute(&mut missing).await?;
            deadline = match deadline {
                _ if self.input.is_empty() => None,
                Some(deadline) if !was_whole => Some(deadline),
                _ => Some(Instant::now() + self.limits.stall_timeout),
            };
            if self.input.is_empty() && self.input.capacity() > MAX_IDLE_BUFFER {
                self.input = BytesMut::new();
            }
        }
    }

    fn check_buffer_budget(&mut self) -> Result<(), RpcCloseReason> {
        let bytes = self.input.capacity() + self.output.capacity();
        if self.reservation.set(bytes) { Ok(()) } else { Err(RpcCloseReason::BufferLimit) }
    }

    /// Reads what there is. Returns whether to go on.
    async fn read(
        &mut self,
        deadline: Option<Instant>,
        stopped: Pin<&mut WaitForCancellationFuture<'_>>,
    ) -> Result<bool, RpcCloseReason> {
        let RpcLimits { stall_timeout: stall, idle_timeout: idle, .. } = self.limits;
        let (stream, input) = (&mut self.stream, &mut self.input);
        let read = async {
            match (deadline, idle) {
                (Some(at), _) => timeout_at(at, stream.read_buf(input))
                    .await
                    .map_err(|_| RpcCloseReason::RequestTimeout(stall)),
                (None, Some(idle)) => {
                    timeout(idle, stream.read_buf(input)).await.map_err(|_| RpcCloseReason::Idle(idle))
                }
                (None, None) => Ok(stream.read_buf(input).await),
            }
        };
        tokio::select! {
            biased;
            read = read => Ok(read?? > 0),
            () = stopped => Ok(false),
        }
    }

    /// Executes the requests that have arrived as a whole, and answers them. Returns whether there was any.
    async fn execute(&mut self, missing: &mut usize) -> Result<bool, RpcCloseReason> {
        let mut was_whole = false;
        loop {
            let RpcProgress { consumed: used, remaining: rest } =
                self.session.run(&self.input, &mut self.output);
            was_whole |= used > 0;
            // Even a call without a reply may have changed something.
            if let Err(error) = self.commit().await {
                self.refuse(used, error)?;
            }
            self.input.advance(used);
            self.send_replies().await?;
            match rest {
                RemainingInput::More => {}
                RemainingInput::Incomplete(bytes) => {
                    *missing = bytes;
                    return Ok(was_whole);
                }
                RemainingInput::Malformed(error) => return Err(RpcCloseReason::InvalidFrame(error)),
            }
        }
    }

    async fn commit(&mut self) -> io::Result<()> {
        if self.limits.commits_wait
            && let Some(commit) = self.session.take_commit()
        {
            // The thread's other connections go on.
            return tokio::task::spawn_blocking(commit).await.map_err(io::Error::other)?;
        }
        self.session.commit()
    }

    /// Answers requests again whose changes cannot be kept.
    fn refuse(&mut self, used: usize, error: io::Error) -> Result<(), RpcCloseReason> {
        self.output.clear();
        let requests = self.input.get(..used).unwrap_or_default();
        self.session.refuse_writes(requests, &mut self.output).ok_or(RpcCloseReason::Journal(error))
    }

    async fn send_replies(&mut self) -> Result<(), RpcCloseReason> {
        if self.output.is_empty() {
            return Ok(());
        }
        self.check_buffer_budget()?;
        // Nearly always the socket has room, and then no timer is needed.
        let written = match self.stream.try_write(&self.output) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            written => written?,
        };
        self.output.advance(written);
        if !self.output.is_empty() {
            let stall = self.limits.stall_timeout;
            let written = timeout(stall, self.stream.write_all(&self.output)).await;
            written.map_err(|_| RpcCloseReason::ReplyTimeout(stall))??;
            self.output.clear();
        }
        if self.output.capacity() > MAX_IDLE_BUFFER {
            self.output = BytesMut::new();
        }
        Ok(())
    }
}
