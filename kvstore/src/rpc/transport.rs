//! The stream under a session: a socket, or TLS over it.

use std::io;

use moongate_runtime::net::{self, TcpStream};
use moongate_runtime::{Fingerprint, PeerTls};
use tokio::io::{AsyncRead, ReadHalf};
use tokio_rustls::client::TlsStream;

/// A socket, or TLS over it.
pub(super) enum Transport {
    Plain(TcpStream),
    Secured(Box<TlsStream<TcpStream>>, ShownCertificate),
}

/// The certificate that a server was shown.
pub(super) struct ShownCertificate {
    tls: PeerTls,
    shown: Option<Fingerprint>,
}

impl ShownCertificate {
    /// Whether another is shown to servers now: what the master grants on the old connection does not hold on new ones.
    pub(super) fn is_renewed(&self) -> bool {
        self.shown != self.tls.own_fingerprint()
    }
}

impl Transport {
    /// The handshake with the server at `address`, a `host:port`.
    pub(super) async fn secure(stream: TcpStream, address: &str, tls: &PeerTls) -> io::Result<Self> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let shown = ShownCertificate { tls: tls.clone(), shown: tls.own_fingerprint() };
        Ok(Self::Secured(Box::new(tls.connect(host, stream).await?), shown))
    }
}

/// The reading side of a session.
pub(super) trait Receiver: AsyncRead + Unpin {
    /// The socket, if bytes can be taken from it directly.
    fn socket(&self) -> Option<&TcpStream>;
}

impl Receiver for net::ReadHalf<'_> {
    fn socket(&self) -> Option<&TcpStream> {
        Some(self.as_ref())
    }
}

impl Receiver for ReadHalf<TlsStream<TcpStream>> {
    fn socket(&self) -> Option<&TcpStream> {
        None
    }
}
