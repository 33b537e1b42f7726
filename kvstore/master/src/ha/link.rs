//! Frame I/O on a connection, and the follower's connection to its leader.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::net::TcpStream;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;
use tokio_util::either::Either;

use super::follower::{FollowError, ReplicationFollower};
use super::frame::{self, HEADER, ReplicationFrame, ReplicationFrameError};
use super::member::HaMember;
use super::standby_replica::StandbyReplica;
use super::tls::{HaTlsError, TlsFiles, connect};

/// Maximum buffer that is allocated before its bytes have arrived.
const MAX_PREALLOCATION: usize = 1 << 20;

/// Why a replication connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReplicationError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// TLS setup or handshake failed.
    #[error(transparent)]
    Tls(#[from] HaTlsError),
    /// The peer sent an invalid frame.
    #[error(transparent)]
    Frame(#[from] ReplicationFrameError),
    #[error(transparent)]
    Follow(#[from] FollowError),
    /// No frame arrived within this time.
    #[error("no frame received for {0:?}")]
    ReadTimeout(Duration),
    /// The peer did not read within this time.
    #[error("write timed out after {0:?}")]
    WriteTimeout(Duration),
    /// The follower sent a frame of the wrong kind.
    #[error("unexpected frame from a follower")]
    Unexpected,
    /// Older records of the log cannot be read.
    #[error(transparent)]
    Log(#[from] moongate_oplog::OplogError),
    /// Records that the follower needs have been evicted from memory and log.
    #[error("the follower is too slow: records that it needs were evicted; raise --journal_memory_bytes")]
    TooSlow,
}

/// Reads the body of the next frame into `body`. Returns its checksum.
pub(super) async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    body: &mut Vec<u8>,
    frame_timeout: Duration,
) -> Result<u32, ReplicationError> {
    let read = async {
        let mut head = [0; HEADER];
        stream.read_exact(&mut head).await?;
        let (length, checksum) = frame::header(head)?;
        body.clear();
        body.shrink_to(MAX_PREALLOCATION);
        body.reserve(length.min(MAX_PREALLOCATION));
        let mut limited = stream.take(length as u64);
        while body.len() < length {
            if limited.read_buf(body).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        Ok(checksum)
    };
    timeout(frame_timeout, read).await.map_err(|_| ReplicationError::ReadTimeout(frame_timeout))?
}

/// Writes and flushes all bytes.
pub(super) async fn send(output: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    output.write_all(bytes).await?;
    // TLS may buffer a part.
    output.flush().await
}

/// Settings of a follower's connection.
#[derive(Clone, Debug)]
pub(super) struct FollowerLinkOptions {
    /// Maximum time between two frames.
    pub(super) frame_timeout: Duration,
    pub(super) tls: Option<TlsFiles>,
}

/// Follows the leader at `address` until an error. When this future is dropped, no further record is acknowledged.
pub(super) async fn follow(
    address: String,
    member: HaMember,
    term: i64,
    replica: Arc<Mutex<StandbyReplica>>,
    options: FollowerLinkOptions,
) -> ReplicationError {
    match run(&address, member, term, &replica, &options).await {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

async fn run(
    address: &str,
    member: HaMember,
    term: i64,
    replica: &Mutex<StandbyReplica>,
    options: &FollowerLinkOptions,
) -> Result<Infallible, ReplicationError> {
    let frame_timeout = options.frame_timeout;
    let connected = async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok::<_, ReplicationError>(match &options.tls {
            Some(files) => Either::Right(connect(files, address, stream).await?),
            None => Either::Left(stream),
        })
    };
    let connected = timeout(frame_timeout, connected).await;
    match connected.map_err(|_| ReplicationError::ReadTimeout(frame_timeout))?? {
        Either::Left(mut tcp_stream) => {
            exchange(tcp_stream.split(), member, term, replica, frame_timeout).await
        }
        Either::Right(tls_stream) => {
            exchange(tokio::io::split(tls_stream), member, term, replica, frame_timeout).await
        }
    }
}

/// Runs the follower's side of the protocol.
async fn exchange(
    (mut input, mut output): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    member: HaMember,
    term: i64,
    replica: &Mutex<StandbyReplica>,
    frame_timeout: Duration,
) -> Result<Infallible, ReplicationError> {
    let last_record = {
        let mut replica = replica.lock();
        replica.discard_pending_copy();
        replica.position()
    };
    let mut out = Vec::new();
    frame::write(&ReplicationFrame::Hello { member, term, last_record }, &mut out);
    send(&mut output, &out).await?;
    let (mut follower, mut body) = (ReplicationFollower::new(term, last_record), Vec::new());
    loop {
        let checksum = read_frame(&mut input, &mut body, frame_timeout).await?;
        let frame = frame::read(&body, checksum)?;
        let acknowledged = follower.handle_frame(frame, &mut *replica.lock())?;
        if let Some(number) = acknowledged {
            out.clear();
            frame::write(&ReplicationFrame::Acknowledged(number), &mut out);
            let sent = timeout(frame_timeout, send(&mut output, &out)).await;
            sent.map_err(|_| ReplicationError::WriteTimeout(frame_timeout))??;
        }
    }
}
