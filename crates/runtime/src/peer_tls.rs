//! Mutual TLS between the programs of one store: each shows a certificate of the same authority, to the programs that it connects to and to
//! those that connect to it. Files are read again when they change.

mod blocking;
mod options;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::CertificateDer;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{client, server};

use crate::{
    ClientTls, ClientTlsFiles, ServerTls, ServerTlsFiles, Supervisor, TlsConfigError, tls_error_hint,
};

pub use blocking::BlockingTlsStream;
pub use options::PeerTlsArgs;

/// SHA-256 of a certificate.
pub type CertificateFingerprint = [u8; 32];

/// What a client without TLS is to do about a server that requires it.
pub const TLS_REQUIRED: &str = "it requires TLS with a certificate: set --store-tls-cert, --store-tls-key and --store-tls-ca (--store_tls_… of a master)";
/// What a client with TLS is to do about a server that has none.
const TLS_NOT_EXPECTED: &str = "if it does not use TLS, set --store-tls-cert, --store-tls-key and --store-tls-ca there too (--store_tls_… of a master), or unset them here";

/// PEM files of one program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerTlsFiles {
    /// The certificate that is shown, with those between it and the authority.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority whose certificates the other programs show.
    pub ca: PathBuf,
    /// The name that servers' certificates must have; `None`: the host that is connected to.
    pub name: Option<String>,
}

/// Mutual TLS with the other programs of a store. Clones are the same.
#[derive(Debug, Clone)]
pub struct PeerTls {
    configs: Arc<PeerTlsConfigs>,
}

#[derive(Debug)]
struct PeerTlsConfigs {
    server: ServerTls,
    http: ServerTls,
    client: ClientTls,
}

impl PeerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsConfigError`], which names the file.
    pub fn load(files: PeerTlsFiles) -> Result<Self, TlsConfigError> {
        let PeerTlsFiles { certificate, key, ca, name } = files;
        let identity = Some((certificate.clone(), key.clone()));
        let client =
            ClientTls::load(ClientTlsFiles { ca: Some(ca.clone()), identity, name })?.without_resumption();
        let files = ServerTlsFiles { certificate, key, client_ca: Some(ca), client_optional: false };
        let http = ServerTls::load(ServerTlsFiles { client_optional: true, ..files.clone() })?;
        Ok(Self { configs: Arc::new(PeerTlsConfigs { server: ServerTls::load(files)?, http, client }) })
    }

    /// Reads the files again whenever they change, until the supervisor shuts down. Open connections stay as they are.
    pub fn reload_on_change(&self, supervisor: &Supervisor) {
        let PeerTlsConfigs { server, http, client } = &*self.configs;
        let (server, http, client) = (server.clone(), http.clone(), client.clone());
        supervisor.spawn_essential("store TLS", server.reload_on_change(supervisor.token()));
        supervisor.spawn_essential("store TLS of HTTP", http.reload_on_change(supervisor.token()));
        supervisor.spawn_essential("store TLS of clients", client.reload_on_change(supervisor.token()));
    }

    /// TLS of an HTTP listener. Clients without a certificate are accepted, so that probes can reach the paths that are open to them: the
    /// service refuses all other requests without [`ClientCertificate`](crate::ClientCertificate).
    #[must_use]
    pub fn http_listener(&self) -> ServerTls {
        self.configs.http.clone()
    }

    /// A client for HTTPS.
    pub fn http_client(&self) -> reqwest::ClientBuilder {
        self.configs.client.http_client()
    }

    /// The handshake with a client, which must show a certificate. Returns the certificate's fingerprint too.
    ///
    /// # Errors
    /// What the handshake failed for.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<(server::TlsStream<S>, CertificateFingerprint)> {
        let stream = self.configs.server.accept(stream).await?;
        let peer = fingerprint_of(stream.get_ref().1.peer_certificates())?;
        Ok((stream, peer))
    }

    /// The same with a blocking socket, whose time limits hold for each of its system calls.
    ///
    /// # Errors
    /// What the handshake failed for.
    pub fn accept_blocking(&self, stream: std::net::TcpStream) -> io::Result<BlockingTlsStream> {
        BlockingTlsStream::accept(self.configs.server.config(), stream)
    }

    /// The handshake with a server at `host`, without brackets. The error explains what to do about it.
    ///
    /// # Errors
    /// What the handshake failed for.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        host: &str,
        stream: S,
    ) -> io::Result<client::TlsStream<S>> {
        let connected = self.configs.client.connect(host, stream).await;
        connected.map_err(|error| {
            let fix =
                tls_error_hint(&error).filter(|_| !is_plaintext_peer(&error)).unwrap_or(TLS_NOT_EXPECTED);
            io::Error::new(error.kind(), format!("TLS failed: {error}; {fix}"))
        })
    }

    /// The fingerprint of the certificate that is shown now. After a renewal it differs from that of open connections.
    #[must_use]
    pub fn own_fingerprint(&self) -> Option<CertificateFingerprint> {
        self.configs.client.own_fingerprint()
    }
}

/// SHA-256 of a certificate.
pub(crate) fn fingerprint(certificate: &CertificateDer<'_>) -> CertificateFingerprint {
    Sha256::digest(certificate).into()
}

fn fingerprint_of(shown: Option<&[CertificateDer<'_>]>) -> io::Result<CertificateFingerprint> {
    let leaf = shown.and_then(|chain| chain.first());
    // The verifier refuses clients without one.
    leaf.map(fingerprint).ok_or_else(|| io::Error::other("the client has shown no certificate"))
}

fn is_plaintext_peer(error: &io::Error) -> bool {
    let message = error.get_ref().and_then(|inside| inside.downcast_ref::<rustls::Error>());
    message.is_none_or(|error| matches!(error, rustls::Error::InvalidMessage(_)))
}

/// A key from the cryptography's random source.
///
/// # Errors
/// When the source fails.
pub fn random_key() -> io::Result<[u8; 32]> {
    let mut key = [0; 32];
    let filled = default_provider().secure_random.fill(&mut key);
    filled.map_err(|_| io::Error::other("the random source failed"))?;
    Ok(key)
}

/// An error of a connection with what to do about it, if TLS has ended it. A server refuses a certificate only after the handshake has ended for
/// the client, so the refusal is the error of a read or a write.
#[must_use]
pub fn describe_tls_error(error: &io::Error) -> String {
    match tls_error_hint(error) {
        Some(fix) => format!("{error}; {fix}"),
        None => error.to_string(),
    }
}

/// Whether the first bytes that a server sent are a TLS alert: it requires TLS, and the client does not use it.
#[must_use]
pub fn is_tls_alert(bytes: &[u8]) -> bool {
    // An alert of any version, with two bytes: level and description.
    matches!(bytes, [0x15, 0x03, _, 0, 2, ..])
}
