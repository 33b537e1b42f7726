//! The stream under a session: a socket, or TLS over it.

use std::io;

use moongate_runtime::net::{self, TcpStream};
use moongate_runtime::{CertificateFingerprint, PeerTls};
use tokio::io::{AsyncRead, ReadHalf};
use tokio_rustls::client::TlsStream;

/// A socket, or TLS over it.
pub(super) enum RpcTransport {
    Plain(TcpStream),
    Secured(Box<TlsStream<TcpStream>>, PresentedCertificate),
}

/// The certificate that a server was shown.
pub(super) struct PresentedCertificate {
    tls: PeerTls,
    presented: Option<CertificateFingerprint>,
}

impl PresentedCertificate {
    /// Whether another is shown to servers now: what the master grants on the old connection does not hold on new ones.
    pub(super) fn is_renewed(&self) -> bool {
        self.presented != self.tls.own_fingerprint()
    }
}

impl RpcTransport {
    /// The handshake with the server at `address`, a `host:port`.
    pub(super) async fn secure(stream: TcpStream, address: &str, tls: &PeerTls) -> io::Result<Self> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let shown = PresentedCertificate { tls: tls.clone(), presented: tls.own_fingerprint() };
        Ok(Self::Secured(Box::new(tls.connect(host, stream).await?), shown))
    }
}

/// The reading side of a session.
pub(super) trait SessionReader: AsyncRead + Unpin {
    /// The socket, if bytes can be taken from it directly.
    fn socket(&self) -> Option<&TcpStream>;
}

impl SessionReader for net::ReadHalf<'_> {
    fn socket(&self) -> Option<&TcpStream> {
        Some(self.as_ref())
    }
}

impl SessionReader for ReadHalf<TlsStream<TcpStream>> {
    fn socket(&self) -> Option<&TcpStream> {
        None
    }
}
