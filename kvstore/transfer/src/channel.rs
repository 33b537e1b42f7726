//! The stream under a connection: a socket, or TLS over it.

use std::io::{self, IoSlice};

use mooncake_wire::capability::Capability;
use moongate_runtime::net::TcpStream;
use moongate_runtime::{CertificateFingerprint, PeerTls};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::client::TlsStream;

/// A socket, or TLS over it.
#[derive(Debug)]
pub(crate) enum TransferChannel {
    Plain(TcpStream),
    Secured(Box<TlsChannel>),
}

#[derive(Debug)]
pub(crate) struct TlsChannel {
    stream: TlsStream<TcpStream>,
    tls: PeerTls,
    /// The certificate that the server was shown.
    presented_certificate: Option<CertificateFingerprint>,
    /// Sent with each request.
    pub(crate) capability: Option<Capability>,
}

impl TlsChannel {
    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        self.stream.flush().await
    }
}

impl TransferChannel {
    /// The handshake with the server at `host`.
    pub(crate) async fn secure(stream: TcpStream, host: &str, tls: &PeerTls) -> io::Result<Self> {
        let shown = tls.own_fingerprint();
        let stream = tls.connect(host, stream).await?;
        Ok(Self::Secured(Box::new(TlsChannel {
            stream,
            tls: tls.clone(),
            presented_certificate: shown,
            capability: None,
        })))
    }

    /// The socket, if bytes can be taken from it directly.
    pub(crate) fn plain(&self) -> Option<&TcpStream> {
        match self {
            Self::Plain(stream) => Some(stream),
            Self::Secured(_) => None,
        }
    }

    /// Whether the other side has closed the connection, or sent what was not requested, or the certificate was renewed since.
    pub(crate) fn is_stale(&self) -> bool {
        match self {
            Self::Plain(stream) => {
                let read = stream.try_read(&mut [0]);
                !matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            Self::Secured(_) => self.is_of_old_certificate(),
        }
    }

    /// Whether the server was shown another certificate than the one of now.
    pub(crate) fn is_of_old_certificate(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Secured(secured) => secured.presented_certificate != secured.tls.own_fingerprint(),
        }
    }

    pub(crate) async fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write_vectored(parts).await,
            Self::Secured(secured) => secured.stream.write_vectored(parts).await,
        }
    }

    pub(crate) async fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(into).await,
            Self::Secured(secured) => secured.stream.read(into).await,
        }
    }
}
