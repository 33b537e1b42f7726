//! Certificates for tests, and requests over TLS.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use moongate_runtime::Supervisor;
use moongate_testkit::TestAuthority;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::TEST_TIMEOUT;

/// PEM files of an authority, of a server at `localhost`, and of a client.
pub(crate) fn generate_certificates() -> (String, (String, String), (String, String)) {
    let authority = TestAuthority::new().unwrap();
    let issue = |name: &str| {
        let identity = authority.issue(&[name]).unwrap();
        (identity.certificate, identity.key)
    };
    (authority.pem(), issue("localhost"), issue("client"))
}

/// Status line of a GET over TLS.
pub(crate) async fn get_over_tls(
    address: &str,
    path: &str,
    authority: &str,
    own: Option<&(String, String)>,
) -> std::io::Result<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots);
    let config = match own {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let cert = CertificateDer::from_pem_slice(cert.as_bytes()).unwrap();
            builder
                .with_client_auth_cert(vec![cert], PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap())
                .unwrap()
        }
    };
    let asked = async {
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("localhost").unwrap();
        let mut stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer.lines().next().unwrap_or_default().to_owned())
    };
    tokio::time::timeout(TEST_TIMEOUT, asked).await.unwrap()
}

/// TLS in front of a server that has none, such as a simulated engine.
pub(crate) struct TlsTerminator {
    /// The URL at which it listens: `https://localhost:port`.
    pub(crate) url: String,
    handshakes: Arc<AtomicUsize>,
    supervisor: Supervisor,
}

impl TlsTerminator {
    /// Presents `own`, and requires client certificates of the authority `clients`, if any.
    pub(crate) async fn start(behind: SocketAddr, own: &(String, String), clients: Option<&str>) -> Self {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = rustls::ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let mut roots = rustls::RootCertStore::empty();
                roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder.with_client_cert_verifier(verifier.build().unwrap())
            }
        };
        let cert = CertificateDer::from_pem_slice(own.0.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(own.1.as_bytes()).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(builder.with_single_cert(vec![cert], key).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
        let (handshakes, supervisor) = (Arc::new(AtomicUsize::new(0)), Supervisor::new());
        let (count, tasks) = (handshakes.clone(), supervisor.clone());
        let serving = async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, count) = (acceptor.clone(), count.clone());
                let relayed = async move {
                    let Ok(mut outside) = acceptor.accept(stream).await else { return };
                    count.fetch_add(1, Ordering::Relaxed);
                    let Ok(mut inside) = TcpStream::connect(behind).await else { return };
                    // Who leaves first is none of the test's business.
                    drop(tokio::io::copy_bidirectional(&mut outside, &mut inside).await);
                };
                let stop = tasks.token();
                tasks.spawn(
                    "relay",
                    async move { stop.run_until_cancelled(relayed).await.unwrap_or_default() },
                );
            }
        };
        let stop = supervisor.token();
        supervisor
            .spawn("accept", async move { stop.run_until_cancelled(serving).await.unwrap_or_default() });
        Self { url, handshakes, supervisor }
    }

    /// Handshakes that came to a good end.
    pub(crate) fn handshakes(&self) -> usize {
        self.handshakes.load(Ordering::Relaxed)
    }
}

impl Drop for TlsTerminator {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}
