//! Frames on a connection, and following a leader over one.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::follower::{Follower, Unfollowed};
use super::frame::{self, Frame, FrameError, HEADER};
use super::member::Member;
use super::replica::Replica;

/// Bytes for which room is made before they have arrived.
const AHEAD: usize = 1 << 20;

/// Why a connection between masters ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    /// The network.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The other side sends what is no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The leader cannot be followed.
    #[error(transparent)]
    Unfollowed(#[from] Unfollowed),
    /// Nothing came for so long.
    #[error("nothing was heard for {0:?}")]
    Silent(Duration),
    /// The other side does not take what is sent.
    #[error("what was sent was not taken within {0:?}")]
    NotTaken(Duration),
    /// A follower said something else than its part.
    #[error("a follower said what it must not say")]
    Unexpected,
    /// Older records cannot be read.
    #[error(transparent)]
    Log(#[from] moongate_oplog::Error),
    /// Records that the follower needs are not kept any more.
    #[error("it is too slow: changes that it needs are gone; see --journal_memory_bytes")]
    TooSlow,
}

/// Reads the body of the next frame into `body`. Returns its checksum.
pub(super) async fn next(
    stream: &mut (impl AsyncRead + Unpin),
    body: &mut Vec<u8>,
    patience: Duration,
) -> Result<u32, LinkError> {
    let read = async {
        let mut head = [0; HEADER];
        stream.read_exact(&mut head).await?;
        let (length, checksum) = frame::header(head)?;
        body.clear();
        body.shrink_to(AHEAD);
        body.reserve(length.min(AHEAD));
        let mut limited = stream.take(length as u64);
        while body.len() < length {
            if limited.read_buf(body).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        Ok(checksum)
    };
    timeout(patience, read).await.map_err(|_| LinkError::Silent(patience))?
}

/// Follows the leader at `address` until that ends. When this is dropped, nothing more is acknowledged.
pub(super) async fn follow(
    address: String,
    me: Member,
    term: i64,
    replica: Arc<Mutex<Replica>>,
    patience: Duration,
) -> LinkError {
    match run(&address, me, term, &replica, patience).await {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

async fn run(
    address: &str,
    member: Member,
    term: i64,
    replica: &Mutex<Replica>,
    patience: Duration,
) -> Result<std::convert::Infallible, LinkError> {
    let connected = timeout(patience, TcpStream::connect(address)).await;
    let mut stream = connected.map_err(|_| LinkError::Silent(patience))??;
    stream.set_nodelay(true)?;
    let has = {
        let mut replica = replica.lock();
        replica.forget_unfinished();
        replica.has()
    };
    let mut out = Vec::new();
    frame::write(&Frame::Hello { member, term, has }, &mut out);
    stream.write_all(&out).await?;
    let (mut input, mut output) = stream.split();
    let (mut follower, mut body) = (Follower::new(term, has), Vec::new());
    loop {
        let checksum = next(&mut input, &mut body, patience).await?;
        let frame = frame::read(&body, checksum)?;
        let acknowledged = follower.take(frame, &mut *replica.lock())?;
        if let Some(number) = acknowledged {
            out.clear();
            frame::write(&Frame::Acknowledged(number), &mut out);
            let sent = timeout(patience, output.write_all(&out)).await;
            sent.map_err(|_| LinkError::NotTaken(patience))??;
        }
    }
}
