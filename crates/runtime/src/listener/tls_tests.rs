//! Server TLS: accepted clients, negotiated protocols, and client certificates.

use std::io;

use bytes::Bytes;
use http_body_util::Full;
use moongate_testkit::{PemIdentity, TestAuthority};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;

use super::*;

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

fn authority() -> TestAuthority {
    TestAuthority::new().unwrap()
}

struct TestTlsListener {
    folder: TempDir,
    address: SocketAddr,
    supervisor: Supervisor,
    authority: TestAuthority,
}

impl TestTlsListener {
    /// `clients`: whether client certificates are requested, and whether they are optional.
    fn start(clients: Option<bool>, limits: ListenerLimits) -> Self {
        let folder = TempDir::new().unwrap();
        let authority = authority();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let own = authority.issue(&["localhost"]).unwrap();
        let files = ServerTlsFiles {
            certificate: file("cert.pem", &own.certificate),
            key: file("key.pem", &own.key),
            client_ca: clients.map(|_| authority.ca_file()),
            client_optional: clients.unwrap_or(false),
        };
        let tls = ServerTls::load(files).unwrap();
        let supervisor = Supervisor::new();
        supervisor.spawn("renew", tls.clone().reload_on_change(supervisor.token()));
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let service = tower::service_fn(async |request: Request<Incoming>| {
            let certified = request.extensions().get::<ClientCertificate>().is_some();
            let text = format!("{:?} certified={certified}", request.version());
            Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from(text))))
        });
        let socket = ListenerSocket { listener, tls: Some(tls) };
        serve(socket, service, limits, supervisor.token(), &supervisor);
        Self { folder, address, supervisor, authority }
    }

    /// Response body for a client that trusts `authority` and presents `own`.
    async fn send_request(&self, authority: &TestAuthority, own: Option<&PemIdentity>) -> io::Result<String> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let builder = builder.with_root_certificates(roots);
        let config = match own {
            None => builder.with_no_client_auth(),
            Some(own) => {
                let cert = CertificateDer::from_pem_slice(own.certificate.as_bytes()).unwrap();
                let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).unwrap();
                builder.with_client_auth_cert(vec![cert], key).unwrap()
            }
        };
        let exchange = async {
            let stream = TcpStream::connect(self.address).await?;
            let name = ServerName::try_from("localhost").unwrap();
            let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
            stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
            let mut response = String::new();
            stream.read_to_string(&mut response).await?;
            Ok(response.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
        };
        tokio::time::timeout(TEST_TIMEOUT, exchange).await.unwrap()
    }
}

impl Drop for TestTlsListener {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}

#[tokio::test]
async fn a_client_that_trusts_the_authority_is_served() {
    let server = TestTlsListener::start(None, ListenerLimits::default());
    assert_eq!(server.send_request(&server.authority, None).await.unwrap(), "HTTP/1.1 certified=false");
    assert!(server.send_request(&authority(), None).await.is_err());
}

#[tokio::test]
async fn client_certificates_are_verified_and_passed_to_the_service() {
    let server = TestTlsListener::start(Some(false), ListenerLimits::default());
    let known = server.authority.issue(&["client"]).unwrap();
    let foreign = authority().issue(&["client"]).unwrap();
    assert_eq!(
        server.send_request(&server.authority, Some(&known)).await.unwrap(),
        "HTTP/1.1 certified=true"
    );
    assert!(server.send_request(&server.authority, None).await.is_err());
    assert!(server.send_request(&server.authority, Some(&foreign)).await.is_err());

    let server = TestTlsListener::start(Some(true), ListenerLimits::default());
    let known = server.authority.issue(&["client"]).unwrap();
    assert_eq!(
        server.send_request(&server.authority, Some(&known)).await.unwrap(),
        "HTTP/1.1 certified=true"
    );
    assert_eq!(server.send_request(&server.authority, None).await.unwrap(), "HTTP/1.1 certified=false");
    assert!(server.send_request(&server.authority, Some(&foreign)).await.is_err());
}

#[tokio::test]
async fn next_handshake_uses_renewed_files_and_ignores_bad_ones() {
    let server = TestTlsListener::start(None, ListenerLimits::default());
    let next = authority();
    let renewed_identity = next.issue(&["localhost"]).unwrap();
    let write = |name: &str, text: &str| std::fs::write(server.folder.path().join(name), text).unwrap();
    write("cert.pem", "half a file");
    assert!(server.send_request(&server.authority, None).await.is_ok(), "the previous files stay in use");
    write("cert.pem", &renewed_identity.certificate);
    write("key.pem", &renewed_identity.key);
    let renewed = async {
        while server.send_request(&next, None).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, renewed).await.unwrap();
    assert!(server.send_request(&server.authority, None).await.is_err());
}

#[tokio::test]
async fn clients_without_tls_are_disconnected() {
    let limits =
        ListenerLimits { header_read_timeout: Duration::from_millis(100), ..ListenerLimits::default() };
    let server = TestTlsListener::start(None, limits);
    for sent in ["", "GET / HTTP/1.1\r\nhost: a\r\n\r\n"] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut received = Vec::new();
        // An alert, an end of stream or a reset, but no response.
        let _ = tokio::time::timeout(TEST_TIMEOUT, stream.read_to_end(&mut received)).await.unwrap();
        assert!(!received.starts_with(b"HTTP"), "{received:?}");
    }
}

#[test]
fn errors_name_the_unusable_file() {
    let folder = TempDir::new().unwrap();
    let authority = authority();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let own = authority.issue(&["a"]).unwrap();
    let good = ServerTlsFiles {
        certificate: file("cert.pem", &own.certificate),
        key: file("key.pem", &own.key),
        client_ca: None,
        client_optional: false,
    };
    let error = |files: &ServerTlsFiles| ServerTls::load(files.clone()).unwrap_err().to_string();
    assert!(ServerTls::load(good.clone()).is_ok());
    let missing = ServerTlsFiles { key: folder.path().join("missing.pem"), ..good.clone() };
    assert!(error(&missing).contains("missing.pem"));
    let empty = ServerTlsFiles { client_ca: Some(file("empty.pem", "")), ..good.clone() };
    assert!(error(&empty).contains("contains no certificate"));
    let other = authority.issue(&["a"]).unwrap();
    let other = ServerTlsFiles { key: file("other.pem", &other.key), ..good };
    assert!(error(&other).contains("cert.pem"));
}
