//! TLS towards etcd and between masters.

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

/// PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificates of the authorities that sign the other side's.
    pub ca: PathBuf,
    /// The certificate that this side shows, with those between it and the authority, and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name that the other side's certificate has; `None`: the host that is connected to.
    pub server_name: Option<String>,
}

/// Files that TLS cannot be had with.
#[derive(Debug, thiserror::Error)]
pub enum HaTlsError {
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
    NoIdentity,
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, HaTlsError> {
    let wrong = |problem| HaTlsError::File { path: path.to_owned(), problem };
    let found = CertificateDer::pem_file_iter(path).map_err(wrong)?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    if found.is_empty() { Err(HaTlsError::Empty(path.to_owned())) } else { Ok(found) }
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

    /// For the side that connects.
    ///
    /// # Errors
    /// [`HaTlsError`].
    pub fn client(&self) -> Result<ClientConfig, HaTlsError> {
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(self.roots()?);
        Ok(match &self.identity {
            Some((cert, of)) => builder.with_client_auth_cert(certificates(cert)?, key(of)?)?,
            None => builder.with_no_client_auth(),
        })
    }

    /// For the side that is connected to. The other side has to show a certificate, too.
    ///
    /// # Errors
    /// [`HaTlsError`].
    pub fn server(&self) -> Result<ServerConfig, HaTlsError> {
        let (cert, of) = self.identity.as_ref().ok_or(HaTlsError::NoIdentity)?;
        let provider = Arc::new(default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots()?, Arc::clone(&provider));
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let builder = builder.with_client_cert_verifier(verifier.build()?);
        Ok(builder.with_single_cert(certificates(cert)?, key(of)?)?)
    }
}

/// For connecting where TLS may be had or not. Without files nobody is trusted.
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

/// Secures a connection to the other master at `address`, which is `HOST:PORT`. Files are read for every connection, so that
/// certificates can be replaced while masters run.
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

/// Secures the connection of another master.
pub(super) async fn accept(
    files: &TlsFiles,
    stream: TcpStream,
) -> Result<tokio_rustls::server::TlsStream<TcpStream>, ReplicationError> {
    Ok(TlsAcceptor::from(Arc::new(files.server()?)).accept(stream).await?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    /// An authority of its own, and the files of one whom it has signed for these hosts.
    fn signed(folder: &TempDir, who: &str, hosts: &[&str]) -> TlsFiles {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let hosts: Vec<String> = hosts.iter().map(|&host| host.to_owned()).collect();
        let cert = CertificateParams::new(hosts).unwrap().signed_by(&key, &issuer).unwrap();
        let file = |kind: &str, text: String| {
            let path = folder.path().join(format!("{who}-{kind}.pem"));
            std::fs::write(&path, text).unwrap();
            path
        };
        let own = (file("cert", cert.pem()), file("key", key.serialize_pem()));
        TlsFiles { ca: file("ca", issuer.pem()), identity: Some(own), server_name: None }
    }

    /// Whether two that have these files talk, the leader at this name of loopback.
    async fn talk(follower: &TlsFiles, leader: &TlsFiles, host: &str) -> bool {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("{host}:{}", listener.local_addr().unwrap().port());
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let leads = async {
            let (stream, _) = listener.accept().await.unwrap();
            let mut secured = accept(leader, stream).await?;
            let byte = secured.read_u8().await?;
            secured.write_u8(byte + 1).await?;
            secured.flush().await?;
            Ok::<_, ReplicationError>(())
        };
        let follows = async {
            let mut secured = connect(follower, &address, stream).await?;
            secured.write_u8(6).await?;
            secured.flush().await?;
            Ok::<_, ReplicationError>(secured.read_u8().await?)
        };
        // A follower learns only when it reads that the leader does not want it.
        let (led, followed) = timeout(LIMIT, async { tokio::join!(leads, follows) }).await.unwrap();
        led.is_ok() && followed.is_ok_and(|byte| byte == 7)
    }

    #[tokio::test]
    async fn masters_talk_only_to_those_whom_they_know() {
        let folder = TempDir::new().unwrap();
        let known = signed(&folder, "known", &["127.0.0.1", "master-0"]);
        assert!(talk(&known, &known, "127.0.0.1").await);
        assert!(talk(&known, &known, "master-0").await);
        assert!(!talk(&known, &known, "master-1").await, "a certificate of another host");
        let named = TlsFiles { server_name: Some("master-0".to_owned()), ..known.clone() };
        assert!(talk(&named, &known, "master-1").await, "the settings' name");
        let nobody = TlsFiles { identity: None, ..known.clone() };
        assert!(!talk(&nobody, &known, "127.0.0.1").await, "a follower without a certificate");
        let foreign = signed(&folder, "foreign", &["127.0.0.1"]);
        let pretends = TlsFiles { identity: foreign.identity.clone(), ..known.clone() };
        assert!(!talk(&pretends, &known, "127.0.0.1").await, "a follower of another authority");
        assert!(!talk(&known, &pretends, "127.0.0.1").await, "a leader of another authority");
    }

    #[tokio::test]
    async fn who_does_not_speak_tls_is_not_heard() {
        let folder = TempDir::new().unwrap();
        let known = signed(&folder, "known", &["127.0.0.1"]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut plain = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        plain.write_all(b"a frame of replication").await.unwrap();
        assert!(timeout(LIMIT, accept(&known, stream)).await.unwrap().is_err());
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let folder = TempDir::new().unwrap();
        let good = signed(&folder, "good", &["127.0.0.1"]);
        assert!(good.client().is_ok() && good.server().is_ok());
        let empty = folder.path().join("empty.pem");
        std::fs::write(&empty, "").unwrap();
        let missing = TlsFiles { ca: folder.path().join("missing.pem"), identity: None, server_name: None };
        assert!(missing.client().unwrap_err().to_string().contains("missing.pem"));
        let empty = TlsFiles { ca: empty, identity: None, server_name: None };
        assert!(empty.client().unwrap_err().to_string().contains("there is no certificate in it"));
        assert!(TlsFiles { identity: None, ..good.clone() }.server().is_err());
        let (cert, _) = good.identity.clone().unwrap();
        let other = signed(&folder, "other", &["127.0.0.1"]).identity.unwrap().1;
        assert!(
            TlsFiles { identity: Some((cert, other)), ..good }.client().is_err(),
            "the key of another certificate"
        );
    }
}
