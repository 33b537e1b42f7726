//! Server TLS of a listener, with files reloaded at run time.

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

/// In the extensions of a request whose client has presented a certificate from the trusted CA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientCertificate;

/// PEM files of a TLS listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTlsFiles {
    /// Server certificate with its intermediate certificates.
    pub certificate: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
    /// CA of client certificates; `None`: clients are not asked for one.
    pub client_ca: Option<PathBuf>,
    /// Whether clients without a certificate are accepted; their requests lack [`ClientCertificate`].
    pub client_optional: bool,
}

/// TLS files or settings that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsConfigError {
    /// Incompatible settings; the text names the missing flag.
    #[error("{0}")]
    IncompatibleSettings(String),
    /// A file cannot be read or is not PEM.
    #[error("{}: {problem}", path.display())]
    File {
        /// Path of the PEM file.
        path: PathBuf,
        /// Why the file cannot be used.
        problem: pem::Error,
    },
    /// The file contains no certificate.
    #[error("{}: the file contains no certificate", .0.display())]
    NoCertificate(PathBuf),
    /// The client CA cannot be used.
    #[error("{}: {problem}", path.display())]
    Authority {
        /// Path of the CA file.
        path: PathBuf,
        /// Why the file cannot be used.
        problem: VerifierBuilderError,
    },
    /// Certificate and key are invalid or do not match.
    #[error("{}: {problem}", certificate.display())]
    Unusable {
        /// Path of the certificate file.
        certificate: PathBuf,
        /// Why the file cannot be used.
        problem: rustls::Error,
    },
    /// The file of a flag cannot be used.
    #[error("{flag} {error}")]
    Flag {
        /// Name of the command-line flag.
        flag: String,
        /// What is wrong with the file.
        error: Box<TlsConfigError>,
    },
    /// The name is not a valid server name.
    #[error("{0:?} is not a valid server name; use a DNS name or an IP address")]
    InvalidServerName(String),
    /// The crypto provider lacks a TLS version.
    #[error(transparent)]
    Versions(rustls::Error),
}

impl TlsConfigError {
    /// Adds the flag whose file the error is about. `files` are flags and their values.
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

/// All certificates of a PEM file, at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsConfigError> {
    let invalid = |problem| TlsConfigError::File { path: path.to_owned(), problem };
    let found = CertificateDer::pem_file_iter(path).map_err(invalid)?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(invalid)?;
    if found.is_empty() { Err(TlsConfigError::NoCertificate(path.to_owned())) } else { Ok(found) }
}

/// ALPN protocol id of HTTP/2 (RFC 9113, section 3.2).
const HTTP2: &[u8] = b"h2";

/// Server TLS settings with hot reload. Clones share the loaded files.
#[derive(Debug, Clone)]
pub struct ServerTls {
    files: ServerTlsFiles,
    /// Created before the files were read, so no change is missed.
    watcher: FileChangeWatcher,
    config: Arc<ArcSwap<ServerConfig>>,
}

impl ServerTls {
    /// Loads the files for the first time.
    ///
    /// # Errors
    /// [`TlsConfigError`], which names the file.
    pub fn load(files: ServerTlsFiles) -> Result<Self, TlsConfigError> {
        let changes = FileChangeWatcher::new(files.paths());
        let config = Arc::new(ArcSwap::new(files.load_config()?));
        Ok(Self { files, watcher: changes, config })
    }

    /// Reloads the files whenever they change, until `stop`; open connections keep their settings. If a reload fails, for example because
    /// the new key is not written yet, the previous files stay in use.
    pub async fn reload_on_change(self, stop: CancellationToken) {
        let reload = || match self.files.load_config() {
            Ok(config) => {
                tracing::info!(certificate = %self.files.certificate.display(), "reloaded");
                self.config.store(config);
            }
            Err(error) => tracing::warn!(%error, "reload failed; keeping the previous files"),
        };
        self.watcher.watch(stop, reload).await;
    }

    /// Configuration for the next handshake.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        self.config.load_full()
    }

    /// Performs the TLS handshake with a client.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> std::io::Result<TlsStream<S>> {
        TlsAcceptor::from(self.config.load_full()).accept(stream).await
    }
}

/// Results of the handshake: whether HTTP/2 was negotiated, and whether the client presented a certificate.
pub(super) fn negotiated(stream: &TlsStream<TcpStream>) -> (bool, Option<ClientCertificate>) {
    let (_, session) = stream.get_ref();
    let certified = session.peer_certificates().is_some_and(|chain| !chain.is_empty());
    (session.alpn_protocol() == Some(HTTP2), certified.then_some(ClientCertificate))
}
