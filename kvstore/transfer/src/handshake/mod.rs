//! The port on which a node answers for itself: `P2PHANDSHAKE`, and set-up of RDMA connections.
//!
//! A message is a length of eight bytes (little-endian), a byte that tells its kind, and JSON; the length counts the
//! kind. Releases before the kinds have only JSON, which is told by its first byte. A connection is for one question.

mod frame;
mod server;

use std::io;

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

pub use frame::Kind;
#[doc(hidden)]
pub use frame::{encode as encode_message, read as read_message};
pub use server::{Answers, HandshakeLimits, Node, listen};

/// Asks the node at `endpoint`, a `host:port`, and returns the JSON of its answer. The caller limits the time.
///
/// # Errors
/// When there is no connection, or the answer is none.
pub async fn ask(endpoint: &str, kind: Kind, json: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(endpoint).await?;
    stream.set_nodelay(true)?;
    stream.write_all(&frame::encode(kind, json)).await?;
    let (answered, json) = frame::read(&mut stream).await?;
    if answered != kind {
        let problem = format!("the answer to a handshake of kind {kind:?} is of kind {answered:?}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    Ok(json)
}
