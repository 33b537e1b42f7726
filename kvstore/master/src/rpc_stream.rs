//! The byte stream of an RPC connection: plain TCP or TLS.

use std::io;

use bytes::BytesMut;
use moongate_runtime::net::TcpStream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::server::TlsStream;

/// A TCP stream with optional TLS.
pub(crate) enum RpcStream {
    Plain(TcpStream),
    Secured(Box<TlsStream<TcpStream>>),
}

impl RpcStream {
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Secured(stream) => stream.get_ref().0,
        }
    }

    /// The socket of a connection without TLS, for direct reads.
    pub(crate) fn plain(&self) -> Option<&TcpStream> {
        match self {
            Self::Plain(stream) => Some(stream),
            Self::Secured(_) => None,
        }
    }

    pub(crate) async fn read_buf(&mut self, input: &mut BytesMut) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read_buf(input).await,
            Self::Secured(stream) => stream.read_buf(input).await,
        }
    }

    /// Writes without blocking what fits into the socket's buffer.
    pub(crate) fn try_write(&self, output: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.try_write(output),
            Self::Secured(_) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    pub(crate) async fn write_all(&mut self, output: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.write_all(output).await,
            Self::Secured(stream) => {
                stream.write_all(output).await?;
                stream.flush().await
            }
        }
    }
}
