//! TLS for etcd and between masters.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moongate_runtime::net::TcpStream;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::link::ReplicationError;

/// This side's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsIdentityFiles {
    /// Certificate chain.
    pub certificate: PathBuf,
    /// Private key.
    pub key: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// CA certificates that the peer's certificate is verified against.
    pub ca: PathBuf,
    pub identity: Option<TlsIdentityFiles>,
    /// Host name that the peer's certificate is verified for; `None`: the host of the address.
    pub server_name: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum HaTlsError {
    /// A file cannot be read or parsed.
    #[error("{path}: {problem}")]
    File { path: PathBuf, problem: pem::Error },
    /// The file contains no certificate.
    #[error("{0}: no certificate in this file")]
    Empty(PathBuf),
    /// The verifier for client certificates cannot be built.
    #[error(transparent)]
    Verifier(#[from] VerifierBuilderError),
    /// Rustls rejected a certificate or a key.
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
    /// The host is not valid in a certificate.
    #[error("`{0}` is not a valid host name")]
    Host(String),
    /// A certificate of this side is required.
    #[error("no certificate is configured for this master")]
    NoIdentity,
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, HaTlsError> {
    let file_error = |problem| HaTlsError::File { path: path.to_owned(), problem };
    let certificates = CertificateDer::pem_file_iter(path).map_err(file_error)?;
    let certificates = certificates.collect::<Result<Vec<_>, _>>().map_err(file_error)?;
    if certificates.is_empty() { Err(HaTlsError::Empty(path.to_owned())) } else { Ok(certificates) }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, HaTlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|problem| HaTlsError::File { path: path.to_owned(), problem })
}

impl TlsFiles {
    fn roots(&self) -> Result<Arc<RootCertStore>, HaTlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca)? {
            roots.add(certificate)?;
        }
        Ok(Arc::new(roots))
    }

    /// TLS configuration for outgoing connections.
    ///
    /// # Errors
    /// [`HaTlsError`].
    pub fn client(&self) -> Result<ClientConfig, HaTlsError> {
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(self.roots()?);
        Ok(match &self.identity {
            Some(own) => builder.with_client_auth_cert(certificates(&own.certificate)?, key(&own.key)?)?,
            None => builder.with_no_client_auth(),
        })
    }

    /// TLS configuration for incoming connections. The peer must present a certificate, too.
    ///
    /// # Errors
    /// [`HaTlsError`].
    pub fn server(&self) -> Result<ServerConfig, HaTlsError> {
        let own = self.identity.as_ref().ok_or(HaTlsError::NoIdentity)?;
        let provider = Arc::new(default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots()?, Arc::clone(&provider));
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let builder = builder.with_client_cert_verifier(verifier.build()?);
        Ok(builder.with_single_cert(certificates(&own.certificate)?, key(&own.key)?)?)
    }
}

/// Client configuration with optional TLS files. Without them no certificate is trusted.
pub(super) fn client(files: Option<&TlsFiles>) -> Result<ClientConfig, HaTlsError> {
    match files {
        Some(files) => files.client(),
        None => {
            let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
            let builder = builder.with_safe_default_protocol_versions()?;
            Ok(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
        }
    }
}

/// Opens a TLS session to the master at `address` (`HOST:PORT`). The files are read for every connection, so that certificates can be
/// rotated at run time.
pub(super) async fn connect(
    files: &TlsFiles,
    address: &str,
    stream: TcpStream,
) -> Result<tokio_rustls::client::TlsStream<TcpStream>, ReplicationError> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let host = files.server_name.as_deref().unwrap_or(host);
    let name = ServerName::try_from(host.to_owned()).map_err(|_| HaTlsError::Host(host.to_owned()))?;
    Ok(TlsConnector::from(Arc::new(files.client()?)).connect(name, stream).await?)
}

/// Accepts a TLS session from another master.
pub(super) async fn accept(
    files: &TlsFiles,
    stream: TcpStream,
) -> Result<tokio_rustls::server::TlsStream<TcpStream>, ReplicationError> {
    Ok(TlsAcceptor::from(Arc::new(files.server()?)).accept(stream).await?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use moongate_testkit::TestAuthority;
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn authority() -> TestAuthority {
        TestAuthority::new().unwrap()
    }

    /// Files of a master that trusts this authority, with a certificate for these hosts.
    fn issue(authority: &TestAuthority, hosts: &[&str]) -> TlsFiles {
        let files = authority.issue_files("master", hosts).unwrap();
        let own = TlsIdentityFiles { certificate: files.certificate, key: files.key };
        TlsFiles { ca: files.ca, identity: Some(own), server_name: None }
    }

    /// Whether a follower and a leader with these files exchange data; the leader's address has this host name.
    async fn can_exchange(follower: &TlsFiles, leader: &TlsFiles, host: &str) -> bool {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("{host}:{}", listener.local_addr().unwrap().port());
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let leader_side = async {
            let (stream, _) = listener.accept().await.unwrap();
            let mut tls_stream = accept(leader, stream).await?;
            let byte = tls_stream.read_u8().await?;
            tls_stream.write_u8(byte + 1).await?;
            tls_stream.flush().await?;
            Ok::<_, ReplicationError>(())
        };
        let follower_side = async {
            let mut tls_stream = connect(follower, &address, stream).await?;
            tls_stream.write_u8(6).await?;
            tls_stream.flush().await?;
            Ok::<_, ReplicationError>(tls_stream.read_u8().await?)
        };
        // The follower detects a rejected certificate only when it reads.
        let (led, followed) =
            timeout(LIMIT, async { tokio::join!(leader_side, follower_side) }).await.unwrap();
        led.is_ok() && followed.is_ok_and(|byte| byte == 7)
    }

    #[tokio::test]
    async fn masters_accept_only_certificates_of_their_ca() {
        let (own, other) = (authority(), authority());
        let trusted = issue(&own, &["127.0.0.1", "master-0"]);
        assert!(can_exchange(&trusted, &trusted, "127.0.0.1").await);
        assert!(can_exchange(&trusted, &trusted, "master-0").await);
        assert!(!can_exchange(&trusted, &trusted, "master-1").await, "a certificate of another host");
        let named = TlsFiles { server_name: Some("master-0".to_owned()), ..trusted.clone() };
        assert!(can_exchange(&named, &trusted, "master-1").await, "the configured server name");
        let anonymous = TlsFiles { identity: None, ..trusted.clone() };
        assert!(!can_exchange(&anonymous, &trusted, "127.0.0.1").await, "a follower without a certificate");
        let foreign = issue(&other, &["127.0.0.1"]);
        let impostor = TlsFiles { identity: foreign.identity.clone(), ..trusted.clone() };
        assert!(!can_exchange(&impostor, &trusted, "127.0.0.1").await, "a follower of another authority");
        assert!(!can_exchange(&trusted, &impostor, "127.0.0.1").await, "a leader of another authority");
    }

    #[tokio::test]
    async fn plaintext_connections_are_rejected() {
        let authority = authority();
        let trusted = issue(&authority, &["127.0.0.1"]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut plain = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        plain.write_all(b"a frame of replication").await.unwrap();
        assert!(timeout(LIMIT, accept(&trusted, stream)).await.unwrap().is_err());
    }

    #[test]
    fn errors_name_the_unusable_file() {
        let (folder, own, other) = (TempDir::new().unwrap(), authority(), authority());
        let good = issue(&own, &["127.0.0.1"]);
        assert!(good.client().is_ok() && good.server().is_ok());
        let empty = folder.path().join("empty.pem");
        std::fs::write(&empty, "").unwrap();
        let missing = TlsFiles { ca: folder.path().join("missing.pem"), identity: None, server_name: None };
        assert!(missing.client().unwrap_err().to_string().contains("missing.pem"));
        let empty = TlsFiles { ca: empty, identity: None, server_name: None };
        assert!(empty.client().unwrap_err().to_string().contains("no certificate in this file"));
        assert!(TlsFiles { identity: None, ..good.clone() }.server().is_err());
        let other = issue(&other, &["127.0.0.1"]).identity.unwrap();
        let mixed = TlsIdentityFiles { key: other.key, ..good.identity.clone().unwrap() };
        assert!(
            TlsFiles { identity: Some(mixed), ..good }.client().is_err(),
            "the key of another certificate"
        );
    }
}
