//! The port on which a node answers for itself: `P2PHANDSHAKE`, and set-up of RDMA connections.
//!
//! A message is a length of eight bytes (little-endian), a byte that tells its kind, and JSON; the length counts the
//! kind. Releases before the kinds have only JSON, which is told by its first byte. A connection is for one question.

mod frame;
mod server;

use std::io;

use moongate_runtime::PeerTls;
use moongate_runtime::net::TcpStream;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

pub use frame::HandshakeKind;
#[doc(hidden)]
pub use frame::{encode as encode_message, read as read_message};
pub use server::{HandshakeHandler, HandshakeLimits, TcpHandshakeHandler, listen};

/// Asks the node at `endpoint`, a `host:port`, and returns the JSON of its answer. The caller limits the time.
///
/// # Errors
/// When there is no connection, or the answer is none.
pub async fn request(endpoint: &str, kind: HandshakeKind, json: &[u8]) -> io::Result<Vec<u8>> {
    let stream = TcpStream::connect(endpoint).await?;
    stream.set_nodelay(true)?;
    exchange(stream, kind, json).await
}

/// [`request`] for a node that requires TLS.
///
/// # Errors
/// As [`request`], and when the node is not authenticated.
pub async fn request_tls(
    endpoint: &str,
    kind: HandshakeKind,
    json: &[u8],
    tls: &PeerTls,
) -> io::Result<Vec<u8>> {
    let stream = TcpStream::connect(endpoint).await?;
    stream.set_nodelay(true)?;
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    exchange(tls.connect(host, stream).await?, kind, json).await
}

async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    kind: HandshakeKind,
    json: &[u8],
) -> io::Result<Vec<u8>> {
    stream.write_all(&frame::encode(kind, json)).await?;
    stream.flush().await?;
    let (answered, json) = frame::read(&mut stream).await?;
    if answered != kind {
        let problem = format!("the answer to a handshake of kind {kind:?} is of kind {answered:?}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    Ok(json)
}
