//! An HTTPS client for the webhooks.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Sends a body as the API server would, and returns the response.
pub(crate) async fn post(address: SocketAddr, host: &str, trusted: &[u8], path: &str, body: &[u8]) -> String {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(trusted) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let stream = TcpStream::connect(address).await.unwrap();
    let name = host.to_owned().try_into().unwrap();
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body).await.unwrap();
    let mut answer = Vec::new();
    // A server that closes without a TLS alert has sent its response before.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}
