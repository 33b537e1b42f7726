//! Transport of a session: plain TCP, or TLS.

use std::io;

use moongate_runtime::net::{self, TcpStream};
use moongate_runtime::{CertificateFingerprint, PeerTls};
use tokio::io::{AsyncRead, ReadHalf};
use tokio_rustls::client::TlsStream;

/// A TCP stream, or TLS over it with the certificate of its handshake.
pub(super) enum RpcTransport {
    Plain(TcpStream),
    Secured(Box<TlsStream<TcpStream>>, PresentedCertificate),
}

/// The client certificate that was presented to the server.
pub(super) struct PresentedCertificate {
    tls: PeerTls,
    presented: Option<CertificateFingerprint>,
}

impl PresentedCertificate {
    /// Whether the certificate was renewed since: grants from the old connection are invalid on new ones.
    pub(super) fn is_renewed(&self) -> bool {
        self.presented != self.tls.own_fingerprint()
    }
}

impl RpcTransport {
    /// Performs the TLS handshake with the server at `address`, a `host:port`.
    pub(super) async fn secure(stream: TcpStream, address: &str, tls: &PeerTls) -> io::Result<Self> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let presented_certificate =
            PresentedCertificate { tls: tls.clone(), presented: tls.own_fingerprint() };
        Ok(Self::Secured(Box::new(tls.connect(host, stream).await?), presented_certificate))
    }
}

/// The read half of a session's stream.
pub(super) trait SessionReader: AsyncRead + Unpin {
    /// The socket, if it can be read directly, without TLS.
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
