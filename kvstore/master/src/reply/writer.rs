//! Sends the replies of one connection, after the changes behind them.

use std::io;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use tokio::time::timeout;

use crate::recorder::FactRecorder;
use crate::rpc_stream::RpcStream;
use crate::server::RpcLimits;

/// A larger buffer of a connection is freed when it is empty.
pub(crate) const MAX_IDLE_BUFFER: usize = 64 * 1024;

/// Why replies could not be sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplyWriteError {
    #[error("client did not read replies within {0:?}")]
    Timeout(Duration),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The encoded replies of one connection that have not been sent.
#[derive(Debug)]
pub(crate) struct ReplyWriter {
    output: BytesMut,
    stall_timeout: Duration,
    /// Whether a commit may wait for a disk or for followers.
    commits_wait: bool,
}

impl ReplyWriter {
    pub(crate) fn new(limits: &RpcLimits) -> Self {
        let RpcLimits { stall_timeout, commits_wait, .. } = *limits;
        Self { output: BytesMut::new(), stall_timeout, commits_wait }
    }

    /// The buffer to which replies are appended.
    pub(crate) fn buffer(&mut self) -> &mut BytesMut {
        &mut self.output
    }

    /// Whether all replies have been sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.output.is_empty()
    }

    /// Capacity of the buffer in bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.output.capacity()
    }

    /// Waits until the recorded changes are as durable as configured.
    ///
    /// # Errors
    /// The changes could not be made durable. The replies must not be sent.
    pub(crate) async fn commit(&self, recorder: &mut FactRecorder) -> io::Result<()> {
        if self.commits_wait
            && let Some(commit) = recorder.take_commit()
        {
            // Blocking here would delay the thread's other connections.
            return tokio::task::spawn_blocking(commit).await.map_err(io::Error::other)?;
        }
        recorder.commit()
    }

    /// Sends all replies.
    pub(crate) async fn send(&mut self, stream: &mut RpcStream) -> Result<(), ReplyWriteError> {
        // The socket's buffer nearly always has space, which saves a timer.
        let written = match stream.try_write(&self.output) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            written => written?,
        };
        self.output.advance(written);
        if !self.output.is_empty() {
            let written = timeout(self.stall_timeout, stream.write_all(&self.output)).await;
            written.map_err(|_| ReplyWriteError::Timeout(self.stall_timeout))??;
            self.output.clear();
        }
        if self.output.capacity() > MAX_IDLE_BUFFER {
            self.output = BytesMut::new();
        }
        Ok(())
    }
}
