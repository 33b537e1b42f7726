//! TLS over a blocking socket, for threads that serve one connection each.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::{CertificateFingerprint, fingerprint_of};

/// A TLS connection of a client with a verified certificate.
pub struct BlockingTlsStream {
    stream: StreamOwned<ServerConnection, TcpStream>,
    peer: CertificateFingerprint,
}

impl BlockingTlsStream {
    pub(super) fn accept(config: Arc<ServerConfig>, mut stream: TcpStream) -> io::Result<Self> {
        let mut session = ServerConnection::new(config).map_err(io::Error::other)?;
        while session.is_handshaking() {
            if let Err(error) = session.complete_io(&mut stream) {
                // Send the alert with the reason. If that fails, the connection is gone.
                let _ = session.write_tls(&mut stream);
                return Err(error);
            }
        }
        let peer = fingerprint_of(session.peer_certificates())?;
        Ok(Self { stream: StreamOwned::new(session, stream), peer })
    }

    /// Fingerprint of the client's certificate.
    #[must_use]
    pub fn peer(&self) -> CertificateFingerprint {
        self.peer
    }

    /// The TCP socket under TLS.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        &self.stream.sock
    }

    /// Closes the sending direction of the connection.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn close(&mut self) -> io::Result<()> {
        self.stream.conn.send_close_notify();
        self.stream.flush()?;
        self.stream.sock.shutdown(std::net::Shutdown::Write)
    }
}

impl Read for BlockingTlsStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.read(into)
    }
}

impl Write for BlockingTlsStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl std::fmt::Debug for BlockingTlsStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockingTlsStream").field("socket", self.socket()).finish_non_exhaustive()
    }
}
