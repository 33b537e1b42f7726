//! The handshake port of a node: serves its descriptor (`P2PHANDSHAKE`) and sets up RDMA connections.
//!
//! A message is a length of eight bytes (little-endian), a type byte, and JSON; the length includes the type byte. Releases before the type
//! byte send only JSON, recognised by its first byte. A connection carries one request.

mod frame;
mod server;

use std::io;

use moongate_runtime::PeerTls;
use moongate_runtime::net::TcpStream;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

pub use frame::HandshakeKind;
#[doc(hidden)]
pub use frame::{encode as encode_message, read as read_message};
pub use server::{HandshakeHandler, HandshakeLimits, HandshakeOptions, TcpHandshakeHandler, listen};

/// Sends a request to the node at `endpoint`, a `host:port`, and returns the JSON of its response. The caller sets the timeout.
///
/// # Errors
/// When the connection fails, or the response is invalid.
pub async fn request(endpoint: &str, kind: HandshakeKind, json: &[u8]) -> io::Result<Vec<u8>> {
    let stream = TcpStream::connect(endpoint).await?;
    stream.set_nodelay(true)?;
    exchange(stream, kind, json).await
}

/// [`request`] over TLS, for a node that requires it.
///
/// # Errors
/// As [`request`], and when the node's certificate is rejected.
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
    let (response_kind, json) = frame::read(&mut stream).await?;
    if response_kind != kind {
        let problem = format!("the response to a handshake of type {kind:?} has type {response_kind:?}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    Ok(json)
}
