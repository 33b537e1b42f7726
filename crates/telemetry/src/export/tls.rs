//! Connections to a collector.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::{ClientConfig, RootCertStore};

use crate::options::OtlpProtocol;

/// Whose certificates a collector is known by cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum CollectorTlsError {
    /// The file cannot be read.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        problem: pem::Error,
    },
    /// The machine trusts nobody.
    #[error("this machine has no certificates of authorities; name a file of them with --otlp-ca")]
    NoRoots,
    /// The file has no certificate that can be used.
    #[error("{0}: there is no usable certificate of an authority in it")]
    Empty(PathBuf),
    /// rustls refuses its settings.
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
}

/// Connects with or without TLS, as the address says.
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
    let wrong = |problem| CollectorTlsError::File { path: path.to_owned(), problem };
    let found = CertificateDer::pem_file_iter(path).map_err(wrong)?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found);
    if roots.is_empty() { Err(CollectorTlsError::Empty(path.to_owned())) } else { Ok(roots) }
}

fn native_roots() -> Result<RootCertStore, CollectorTlsError> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() { Err(CollectorTlsError::NoRoots) } else { Ok(roots) }
}
