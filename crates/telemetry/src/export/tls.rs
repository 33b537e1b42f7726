//! TLS connections to a collector.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::{ClientConfig, RootCertStore};

use super::target::OtlpProtocol;

/// TLS for the collector cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum CollectorTlsError {
    /// The CA file cannot be read.
    #[error("{path}: {problem}")]
    File {
        /// Path of the CA file.
        path: PathBuf,
        /// Error of the read or of the PEM parser.
        problem: pem::Error,
    },
    /// The system store has no CA.
    #[error("the system store has no CA certificates; set --otlp-ca")]
    NoRoots,
    /// The file contains no usable certificate.
    #[error("{0}: the file contains no usable CA certificate")]
    Empty(PathBuf),
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
}

/// Creates a connector, with TLS if the address is https://.
pub(super) fn connector(
    protocol: OtlpProtocol,
    is_https: bool,
    ca: Option<&Path>,
) -> Result<HttpsConnector<HttpConnector>, CollectorTlsError> {
    let roots = match (is_https, ca) {
        (false, _) => RootCertStore::empty(),
        (true, Some(path)) => roots_from_file(path)?,
        (true, None) => native_roots()?,
    };
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let builder = HttpsConnectorBuilder::new().with_tls_config(config).https_or_http();
    Ok(match protocol {
        OtlpProtocol::Http => builder.enable_http1().build(),
        OtlpProtocol::Grpc => builder.enable_http2().build(),
    })
}

fn roots_from_file(path: &Path) -> Result<RootCertStore, CollectorTlsError> {
    let invalid = |problem| CollectorTlsError::File { path: path.to_owned(), problem };
    let found = CertificateDer::pem_file_iter(path).map_err(invalid)?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(invalid)?;
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found);
    if roots.is_empty() { Err(CollectorTlsError::Empty(path.to_owned())) } else { Ok(roots) }
}

fn native_roots() -> Result<RootCertStore, CollectorTlsError> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() { Err(CollectorTlsError::NoRoots) } else { Ok(roots) }
}
