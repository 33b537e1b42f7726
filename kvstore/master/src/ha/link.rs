//! Frames on a connection, and following a leader over one.

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

/// Bytes for which room is made before they have arrived.
const MAX_PREALLOCATION: usize = 1 << 20;

/// Why a connection between masters ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReplicationError {
    /// The network.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// TLS cannot be had.
    #[error(transparent)]
    Tls(#[from] HaTlsError),
    /// The other side sends what is no frame.
    #[error(transparent)]
    Frame(#[from] ReplicationFrameError),
    /// The leader cannot be followed.
    #[error(transparent)]
    Follow(#[from] FollowError),
    /// Nothing came for so long.
    #[error("nothing was heard for {0:?}")]
    ReadTimeout(Duration),
    /// The other side does not take what is sent.
    #[error("what was sent was not taken within {0:?}")]
    WriteTimeout(Duration),
    /// A follower said something else than its part.
    #[error("a follower said what it must not say")]
    Unexpected,
    /// Older records cannot be read.
    #[error(transparent)]
    Log(#[from] moongate_oplog::OplogError),
    /// Records that the follower needs are not kept any more.
    #[error("it is too slow: changes that it needs are gone; see --journal_memory_bytes")]
    TooSlow,
}

/// Reads the body of the next frame into `body`. Returns its checksum.
pub(super) async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    body: &mut Vec<u8>,
    patience: Duration,
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
    timeout(patience, read).await.map_err(|_| ReplicationError::ReadTimeout(patience))?
}

/// Sends all of it now.
pub(super) async fn send(output: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    output.write_all(bytes).await?;
    // TLS may hold some back.
    output.flush().await
}

/// Follows the leader at `address` until that ends. When this is dropped, nothing more is acknowledged.
pub(super) async fn follow(
    address: String,
    me: HaMember,
    term: i64,
    replica: Arc<Mutex<StandbyReplica>>,
    (patience, tls): (Duration, Option<TlsFiles>),
) -> ReplicationError {
    match run(&address, me, term, &replica, (patience, tls.as_ref())).await {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

async fn run(
    address: &str,
    member: HaMember,
    term: i64,
    replica: &Mutex<StandbyReplica>,
    (patience, tls): (Duration, Option<&TlsFiles>),
) -> Result<Infallible, ReplicationError> {
    let connected = async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok::<_, ReplicationError>(match tls {
            Some(files) => Either::Right(connect(files, address, stream).await?),
            None => Either::Left(stream),
        })
    };
    let connected = timeout(patience, connected).await;
    match connected.map_err(|_| ReplicationError::ReadTimeout(patience))?? {
        Either::Left(mut plain) => exchange(plain.split(), member, term, replica, patience).await,
        Either::Right(secured) => exchange(tokio::io::split(secured), member, term, replica, patience).await,
    }
}

/// The follower's side of a connection.
async fn exchange(
    (mut input, mut output): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    member: HaMember,
    term: i64,
    replica: &Mutex<StandbyReplica>,
    patience: Duration,
) -> Result<Infallible, ReplicationError> {
    let has = {
        let mut replica = replica.lock();
        replica.discard_pending_copy();
        replica.position()
    };
    let mut out = Vec::new();
    frame::write(&ReplicationFrame::Hello { member, term, last_record: has }, &mut out);
    send(&mut output, &out).await?;
    let (mut follower, mut body) = (ReplicationFollower::new(term, has), Vec::new());
    loop {
        let checksum = read_frame(&mut input, &mut body, patience).await?;
        let frame = frame::read(&body, checksum)?;
        let acknowledged = follower.handle_frame(frame, &mut *replica.lock())?;
        if let Some(number) = acknowledged {
            out.clear();
            frame::write(&ReplicationFrame::Acknowledged(number), &mut out);
            let sent = timeout(patience, send(&mut output, &out)).await;
            sent.map_err(|_| ReplicationError::WriteTimeout(patience))??;
        }
    }
}
