//! The stream under a connection: a TCP socket, or TLS over it.

use std::io::{self, IoSlice};

use mooncake_wire::capability::Capability;
use moongate_runtime::net::TcpStream;
use moongate_runtime::{CertificateFingerprint, PeerTls};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::client::TlsStream;

#[derive(Debug)]
pub(crate) enum TransferChannel {
    Plain(TcpStream),
    Secured(Box<TlsChannel>),
}

#[derive(Debug)]
pub(crate) struct TlsChannel {
    stream: TlsStream<TcpStream>,
    tls: PeerTls,
    /// The client certificate presented in the TLS handshake.
    presented_certificate: Option<CertificateFingerprint>,
    /// Sent with each request; requests without one fail.
    pub(crate) capability: Option<Capability>,
}

impl TlsChannel {
    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        self.stream.flush().await
    }
}

impl TransferChannel {
    /// Performs the TLS handshake with the server at `host`.
    pub(crate) async fn secure(stream: TcpStream, host: &str, tls: &PeerTls) -> io::Result<Self> {
        let fingerprint = tls.own_fingerprint();
        let stream = tls.connect(host, stream).await?;
        Ok(Self::Secured(Box::new(TlsChannel {
            stream,
            tls: tls.clone(),
            presented_certificate: fingerprint,
            capability: None,
        })))
    }

    /// The socket, for direct reads and writes; `None` with TLS.
    pub(crate) fn plain(&self) -> Option<&TcpStream> {
        match self {
            Self::Plain(stream) => Some(stream),
            Self::Secured(_) => None,
        }
    }

    /// Whether the peer has closed the connection or sent unrequested bytes, or the own certificate was renewed since the handshake.
    pub(crate) fn is_stale(&self) -> bool {
        match self {
            Self::Plain(stream) => {
                let read = stream.try_read(&mut [0]);
                !matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            Self::Secured(_) => self.is_of_old_certificate(),
        }
    }

    /// Whether the own certificate was renewed after the TLS handshake.
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
