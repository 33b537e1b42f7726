//! TLS of a listener, with files that are replaced while it serves.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::FileChangeWatcher;
use crate::net::TcpStream;

/// In the extensions of a request whose client has shown a certificate of the authority that is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientCertificate;

/// PEM files of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTlsFiles {
    /// The certificate that is shown, with those between it and the authority.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority whose certificates clients show; `None` asks for none.
    pub client_ca: Option<PathBuf>,
    /// Whether clients without a certificate are let in too; their requests lack [`ClientCertificate`].
    pub client_optional: bool,
}

/// Files that TLS cannot be had with.
#[derive(Debug, thiserror::Error)]
pub enum TlsConfigError {
    /// Settings that do not go together; the text names the flag that is missing.
    #[error("{0}")]
    IncompatibleSettings(String),
    /// A file cannot be read, or is not PEM.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        problem: pem::Error,
    },
    /// A file without a certificate.
    #[error("{}: there is no certificate in it", .0.display())]
    NoCertificate(PathBuf),
    /// Clients could not be asked who they are.
    #[error("{}: {problem}", path.display())]
    Authority {
        /// The authority's file.
        path: PathBuf,
        /// Why not.
        problem: VerifierBuilderError,
    },
    /// The certificate and the key cannot be used, or not with each other.
    #[error("{}: {problem}", certificate.display())]
    Unusable {
        /// The certificate's file.
        certificate: PathBuf,
        /// Why not.
        problem: rustls::Error,
    },
    /// A file that a flag names cannot be used.
    #[error("{flag} {error}")]
    Flag {
        /// The flag.
        flag: String,
        /// What is wrong with its file.
        error: Box<TlsConfigError>,
    },
    /// No name of a server.
    #[error("{0:?} cannot be a server's name; give a DNS name or an IP address")]
    InvalidServerName(String),
    /// The cryptography lacks a version of TLS.
    #[error(transparent)]
    Versions(rustls::Error),
}

impl TlsConfigError {
    /// Adds the flag that names the file which this error is about. `files` are flags and their values.
    #[must_use]
    pub fn with_flag(self, files: &[(&str, Option<&PathBuf>)]) -> Self {
        let path = match &self {
            Self::File { path, .. } | Self::NoCertificate(path) | Self::Authority { path, .. } => path,
            Self::Unusable { certificate, .. } => certificate,
            Self::IncompatibleSettings(_)
            | Self::Flag { .. }
            | Self::InvalidServerName(_)
            | Self::Versions(_) => return self,
        };
        match files.iter().find(|(_, file)| *file == Some(path)) {
            Some((flag, _)) => Self::Flag { flag: (*flag).to_owned(), error: Box::new(self) },
            None => self,
        }
    }
}

impl ServerTlsFiles {
    fn paths(&self) -> Vec<PathBuf> {
        [Some(&self.certificate), Some(&self.key), self.client_ca.as_ref()]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }

    fn load_config(&self) -> Result<Arc<ServerConfig>, TlsConfigError> {
        let certificates = certificates(&self.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|problem| TlsConfigError::File { path: self.key.clone(), problem })?;
        let unusable = |problem| TlsConfigError::Unusable { certificate: self.certificate.clone(), problem };
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().map_err(unusable)?;
        let builder = builder.with_client_cert_verifier(self.verifier()?);
        let mut config = builder.with_single_cert(certificates, key).map_err(unusable)?;
        config.alpn_protocols = vec![HTTP2.to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    fn verifier(&self) -> Result<Arc<dyn ClientCertVerifier>, TlsConfigError> {
        let Some(path) = &self.client_ca else { return Ok(Arc::new(NoClientAuth)) };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(path)? {
            roots
                .add(certificate)
                .map_err(|problem| TlsConfigError::Unusable { certificate: path.clone(), problem })?;
        }
        let builder =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(default_provider()));
        let builder = if self.client_optional { builder.allow_unauthenticated() } else { builder };
        builder.build().map_err(|problem| TlsConfigError::Authority { path: path.clone(), problem })
    }
}

/// All certificates of a PEM file; there is one at least.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsConfigError> {
    let wrong = |problem| TlsConfigError::File { path: path.to_owned(), problem };
    let found = CertificateDer::pem_file_iter(path).map_err(wrong)?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    if found.is_empty() { Err(TlsConfigError::NoCertificate(path.to_owned())) } else { Ok(found) }
}

/// HTTP/2 in the negotiation of protocols (RFC 9113, section 3.2).
const HTTP2: &[u8] = b"h2";

/// TLS as it is shown to the next client. Clones are the same.
#[derive(Debug, Clone)]
pub struct ServerTls {
    files: ServerTlsFiles,
    /// Older than what was read.
    watcher: FileChangeWatcher,
    config: Arc<ArcSwap<ServerConfig>>,
}

impl ServerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsConfigError`], which names the file.
    pub fn load(files: ServerTlsFiles) -> Result<Self, TlsConfigError> {
        let changes = FileChangeWatcher::new(files.paths());
        let config = Arc::new(ArcSwap::new(files.load_config()?));
        Ok(Self { files, watcher: changes, config })
    }

    /// Reads the files again whenever they change, until `stop`; connections that are open stay as they are. Files that cannot be
    /// used, such as a certificate whose key is still to come, change nothing.
    pub async fn reload_on_change(self, stop: CancellationToken) {
        let renew = || match self.files.load_config() {
            Ok(config) => {
                tracing::info!(certificate = %self.files.certificate.display(), "read again");
                self.config.store(config);
            }
            Err(error) => tracing::warn!(%error, "cannot be used; what was read before stays in force"),
        };
        self.watcher.watch(stop, renew).await;
    }

    /// The configuration of the next handshake.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        self.config.load_full()
    }

    /// The handshake with one client.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> std::io::Result<TlsStream<S>> {
        TlsAcceptor::from(self.config.load_full()).accept(stream).await
    }
}

/// What the handshake settled: HTTP/2 or not, and whether the client has shown a certificate.
pub(super) fn negotiated(stream: &TlsStream<TcpStream>) -> (bool, Option<ClientCertificate>) {
    let (_, session) = stream.get_ref();
    let certified = session.peer_certificates().is_some_and(|shown| !shown.is_empty());
    (session.alpn_protocol() == Some(HTTP2), certified.then_some(ClientCertificate))
}
