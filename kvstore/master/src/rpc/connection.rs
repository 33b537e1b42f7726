//! One connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use moongate_runtime::net::TcpStream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use super::awake::{Habit, Thread};
use super::budget::{Budget, Held};
use crate::call::{Caller, Progress, Rest};
use crate::server::Limits;

/// Bytes for which there is always room before a read.
const READ: usize = 16 * 1024;
/// The most bytes for which room is made ahead, however many a request is said to have.
const AHEAD: usize = 1024 * 1024;
/// An empty buffer that is larger is given back.
const KEPT: usize = 64 * 1024;

/// Why a connection was closed by this side.
#[derive(Debug, thiserror::Error)]
enum Closed {
    #[error("it sends something else than requests: {0}")]
    Broken(mooncake_wire::frame::FrameError),
    #[error("a request did not arrive as a whole within {0:?}")]
    Unfinished(Duration),
    #[error("nothing was sent for {0:?}")]
    Idle(Duration),
    #[error("replies were not taken within {0:?}")]
    NotRead(Duration),
    #[error("all connections together hold too many bytes; see --rpc_buffer_bytes")]
    Memory,
    #[error("the journal cannot be written: {0}")]
    Journal(io::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Serves a connection until it ends or `stop` is cancelled. A request that has been executed is answered before.
pub(super) async fn serve(
    stream: TcpStream,
    caller: Caller,
    limits: Limits,
    budget: Arc<Budget>,
    thread: Thread,
    stop: CancellationToken,
) {
    let peer = stream.peer_addr().ok();
    let connection = Connection {
        stream,
        caller,
        limits,
        held: Held::new(&budget),
        habit: Habit::new(thread),
        input: BytesMut::new(),
        output: BytesMut::new(),
    };
    match connection.run(&stop).await {
        Ok(()) => {}
        // As Mooncake's own master does: whoever speaks something else learns nothing.
        Err(error @ (Closed::Broken(_) | Closed::Idle(_) | Closed::Io(_))) => {
            tracing::debug!(?peer, %error, "closed a connection");
        }
        Err(error) => tracing::warn!(?peer, %error, "closed a connection"),
    }
}

struct Connection {
    stream: TcpStream,
    caller: Caller,
    limits: Limits,
    held: Held,
    habit: Habit,
    input: BytesMut,
    output: BytesMut,
}

impl Connection {
    async fn run(mut self, stop: &CancellationToken) -> Result<(), Closed> {
        let mut stopped = std::pin::pin!(stop.cancelled());
        let mut missing = 0;
        // When the request has to be there whose beginning is.
        let mut deadline = None;
        let mut was_whole = false;
        loop {
            self.input.reserve(missing.clamp(READ, AHEAD));
            self.measure()?;
            let at_once = match was_whole && self.input.is_empty() {
                true => self.habit.next(&self.stream, &mut self.input).await?,
                false => None,
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
                _ => Some(Instant::now() + self.limits.stall),
            };
            if self.input.is_empty() && self.input.capacity() > KEPT {
                self.input = BytesMut::new();
            }
        }
    }

    fn measure(&mut self) -> Result<(), Closed> {
        let bytes = self.input.capacity() + self.output.capacity();
        if self.held.set(bytes) { Ok(()) } else { Err(Closed::Memory) }
    }

    /// Reads what there is. Returns whether to go on.
    async fn read(
        &mut self,
        deadline: Option<Instant>,
        stopped: Pin<&mut WaitForCancellationFuture<'_>>,
    ) -> Result<bool, Closed> {
        let Limits { stall, idle, .. } = self.limits;
        let (stream, input) = (&mut self.stream, &mut self.input);
        let read = async {
            match (deadline, idle) {
                (Some(at), _) => {
                    timeout_at(at, stream.read_buf(input)).await.map_err(|_| Closed::Unfinished(stall))
                }
                (None, Some(idle)) => {
                    timeout(idle, stream.read_buf(input)).await.map_err(|_| Closed::Idle(idle))
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
    async fn execute(&mut self, missing: &mut usize) -> Result<bool, Closed> {
        let mut was_whole = false;
        loop {
            let Progress { used, rest } = self.caller.run(&self.input, &mut self.output);
            was_whole |= used > 0;
            // Even a call without a reply may have changed something.
            if let Err(error) = self.commit().await {
                self.refuse(used, error)?;
            }
            self.input.advance(used);
            self.answer().await?;
            match rest {
                Rest::More => {}
                Rest::Incomplete(bytes) => {
                    *missing = bytes;
                    return Ok(was_whole);
                }
                Rest::Broken(error) => return Err(Closed::Broken(error)),
            }
        }
    }

    async fn commit(&mut self) -> io::Result<()> {
        if self.limits.commits_wait
            && let Some(commit) = self.caller.take_commit()
        {
            // The thread's other connections go on.
            return tokio::task::spawn_blocking(commit).await.map_err(io::Error::other)?;
        }
        self.caller.commit()
    }

    /// Answers requests again whose changes cannot be kept.
    fn refuse(&mut self, used: usize, error: io::Error) -> Result<(), Closed> {
        self.output.clear();
        let requests = self.input.get(..used).unwrap_or_default();
        self.caller.refuse(requests, &mut self.output).ok_or(Closed::Journal(error))
    }

    async fn answer(&mut self) -> Result<(), Closed> {
        if self.output.is_empty() {
            return Ok(());
        }
        self.measure()?;
        // Nearly always the socket has room, and then no timer is needed.
        let written = match self.stream.try_write(&self.output) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            written => written?,
        };
        self.output.advance(written);
        if !self.output.is_empty() {
            let stall = self.limits.stall;
            let written = timeout(stall, self.stream.write_all(&self.output)).await;
            written.map_err(|_| Closed::NotRead(stall))??;
            self.output.clear();
        }
        if self.output.capacity() > KEPT {
            self.output = BytesMut::new();
        }
        Ok(())
    }
}
