//! Mutual TLS between the programs of one store: each presents a certificate from the same CA, as client and as server. Files are reloaded
//! on change.

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

pub type CertificateFingerprint = [u8; 32];

/// Hint for a client without TLS whose server requires it.
pub const TLS_REQUIRED: &str = "it requires TLS with a certificate: set --store-tls-cert, --store-tls-key and --store-tls-ca (--store_tls_… of a master)";
/// Hint for a client with TLS whose server does not use it.
const TLS_NOT_EXPECTED: &str = "if it does not use TLS, set --store-tls-cert, --store-tls-key and --store-tls-ca there too (--store_tls_… of a master), or unset them here";

/// PEM files of one store program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerTlsFiles {
    /// Certificate of this program with its intermediate certificates.
    pub certificate: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
    /// CA of all programs' certificates.
    pub ca: PathBuf,
    /// Expected name in server certificates; `None`: the host of the connection.
    pub name: Option<String>,
}

/// Mutual TLS with the other programs of a store. Clones share the loaded files.
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
    /// Loads the files for the first time.
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

    /// Reloads the files whenever they change, until the supervisor shuts down. Open connections keep their settings.
    pub fn reload_on_change(&self, supervisor: &Supervisor) {
        let PeerTlsConfigs { server, http, client } = &*self.configs;
        let (server, http, client) = (server.clone(), http.clone(), client.clone());
        supervisor.spawn_essential("store TLS", server.reload_on_change(supervisor.token()));
        supervisor.spawn_essential("store TLS of HTTP", http.reload_on_change(supervisor.token()));
        supervisor.spawn_essential("store TLS of clients", client.reload_on_change(supervisor.token()));
    }

    /// TLS settings of an HTTP listener. Clients without a certificate are accepted, so that probes can use the public paths: the service
    /// must reject all other requests without [`ClientCertificate`](crate::ClientCertificate).
    #[must_use]
    pub fn http_listener(&self) -> ServerTls {
        self.configs.http.clone()
    }

    /// An HTTPS client that presents this program's certificate.
    pub fn http_client(&self) -> reqwest::ClientBuilder {
        self.configs.client.http_client()
    }

    /// Performs the handshake with a client, which must present a certificate. Returns the certificate's fingerprint too.
    ///
    /// # Errors
    /// The error of the handshake.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<(server::TlsStream<S>, CertificateFingerprint)> {
        let stream = self.configs.server.accept(stream).await?;
        let peer = fingerprint_of(stream.get_ref().1.peer_certificates())?;
        Ok((stream, peer))
    }

    /// As [`PeerTls::accept`] with a blocking socket, whose timeouts apply to each system call.
    ///
    /// # Errors
    /// The error of the handshake.
    pub fn accept_blocking(&self, stream: std::net::TcpStream) -> io::Result<BlockingTlsStream> {
        BlockingTlsStream::accept(self.configs.server.config(), stream)
    }

    /// Performs the handshake with the server at `host` (without brackets). The error includes a hint.
    ///
    /// # Errors
    /// The error of the handshake.
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

    /// Fingerprint of the current certificate. After a renewal it differs from that used on open connections.
    #[must_use]
    pub fn own_fingerprint(&self) -> Option<CertificateFingerprint> {
        self.configs.client.own_fingerprint()
    }
}

pub(crate) fn fingerprint(certificate: &CertificateDer<'_>) -> CertificateFingerprint {
    Sha256::digest(certificate).into()
}

fn fingerprint_of(chain: Option<&[CertificateDer<'_>]>) -> io::Result<CertificateFingerprint> {
    let leaf = chain.and_then(|chain| chain.first());
    // The verifier rejects clients without a certificate.
    leaf.map(fingerprint).ok_or_else(|| io::Error::other("the client presented no certificate"))
}

fn is_plaintext_peer(error: &io::Error) -> bool {
    let message = error.get_ref().and_then(|inside| inside.downcast_ref::<rustls::Error>());
    message.is_none_or(|error| matches!(error, rustls::Error::InvalidMessage(_)))
}

/// A key from the crypto provider's random source.
///
/// # Errors
/// When the source fails.
pub fn random_key() -> io::Result<[u8; 32]> {
    let mut key = [0; 32];
    let filled = default_provider().secure_random.fill(&mut key);
    filled.map_err(|_| io::Error::other("the random source failed"))?;
    Ok(key)
}

/// The error of a connection, with a hint if TLS caused it. A server rejects a certificate only after the client has finished the
/// handshake, so the rejection is the error of a read or a write.
#[must_use]
pub fn describe_tls_error(error: &io::Error) -> String {
    match tls_error_hint(error) {
        Some(fix) => format!("{error}; {fix}"),
        None => error.to_string(),
    }
}

/// Whether a server's first bytes are a TLS alert: it requires TLS, and the client does not use it.
#[must_use]
pub fn is_tls_alert(bytes: &[u8]) -> bool {
    // A TLS record of type alert, any version, with two bytes: level and description.
    matches!(bytes, [0x15, 0x03, _, 0, 2, ..])
}
