//! TLS towards etcd and between masters.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::link::LinkError;

/// PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificates of the authorities that sign the other side's.
    pub ca: PathBuf,
    /// The certificate that this side shows, with those between it and the authority, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// Files that TLS cannot be had with.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        problem: pem::Error,
    },
    /// A file without a certificate.
    #[error("{0}: there is no certificate in it")]
    Empty(PathBuf),
    /// The other side could not be asked who it is.
    #[error(transparent)]
    Verifier(#[from] VerifierBuilderError),
    /// Certificates or a key that cannot be used.
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
    /// What cannot stand in a certificate.
    #[error("`{0}` is no name of a host")]
    Host(String),
    /// This side has nothing to show.
    #[error("a certificate of its own is missing")]
    NoneOwn,
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |problem| TlsError::File { path: path.to_owned(), problem };
    let found = CertificateDer::pem_file_iter(path).map_err(wrong)?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    if found.is_empty() { Err(TlsError::Empty(path.to_owned())) } else { Ok(found) }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|problem| TlsError::File { path: path.to_owned(), problem })
}

impl TlsFiles {
    fn roots(&self) -> Result<Arc<RootCertStore>, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca)? {
            roots.add(certificate)?;
        }
        Ok(Arc::new(roots))
    }

    /// For the side that connects.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn client(&self) -> Result<ClientConfig, TlsError> {
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(self.roots()?);
        Ok(match &self.own {
            Some((cert, of)) => builder.with_client_auth_cert(certificates(cert)?, key(of)?)?,
            None => builder.with_no_client_auth(),
        })
    }

    /// For the side that is connected to. The other side has to show a certificate, too.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn server(&self) -> Result<ServerConfig, TlsError> {
        let (cert, of) = self.own.as_ref().ok_or(TlsError::NoneOwn)?;
        let provider = Arc::new(default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots()?, Arc::clone(&provider));
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let builder = builder.with_client_cert_verifier(verifier.build()?);
        Ok(builder.with_single_cert(certificates(cert)?, key(of)?)?)
    }
}

/// For connecting where TLS may be had or not. Without files nobody is trusted.
pub(super) fn client(files: Option<&TlsFiles>) -> Result<ClientConfig, TlsError> {
    match files {
        Some(files) => files.client(),
        None => {
            let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
            let builder = builder.with_safe_default_protocol_versions()?;
            Ok(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
        }
    }
}

/// Secures a connection to the other master at `address`, which is `HOST:PORT`. Files are read for every connection, so that
/// certificates can be replaced while masters run.
pub(super) async fn connect(
    files: &TlsFiles,
    address: &str,
    stream: TcpStream,
) -> Result<tokio_rustls::client::TlsStream<TcpStream>, LinkError> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Host(host.to_owned()))?;
    Ok(TlsConnector::from(Arc::new(files.client()?)).connect(name, stream).await?)
}

/// Secures the connection of another master.
pub(super) async fn accept(
    files: &TlsFiles,
    stream: TcpStream,
) -> Result<tokio_rustls::server::TlsStream<TcpStream>, LinkError> {
    Ok(TlsAcceptor::from(Arc::new(files.server()?)).accept(stream).await?)
}
