//! Client TLS: trusted servers, server names, and client certificates.

use std::time::Duration;

use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use moongate_testkit::TestAuthority;
use tempfile::TempDir;
use tokio::net::TcpStream;

use super::*;
use crate::{
    ClientCertificate, ListenerLimits, ListenerSocket, ServerTls, ServerTlsFiles, Supervisor, bind, serve,
};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

struct TestTlsServer {
    folder: TempDir,
    authority: TestAuthority,
    address: std::net::SocketAddr,
    supervisor: Supervisor,
}

fn authority() -> TestAuthority {
    TestAuthority::new().unwrap()
}

impl TestTlsServer {
    /// A server named `engine.test` that requires client certificates if `requires_certificate`.
    fn start(requires_certificate: bool) -> Self {
        let (folder, authority, supervisor) = (TempDir::new().unwrap(), authority(), Supervisor::new());
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let server = Self { folder, authority, address, supervisor };
        let (certificate, key) = server.pair("engine.test", &server.authority, "server");
        let client_ca = requires_certificate.then(|| server.authority.ca_file());
        let files = ServerTlsFiles { certificate, key, client_ca, client_optional: false };
        let service = tower::service_fn(async |request: Request<Incoming>| {
            let certified = request.extensions().get::<ClientCertificate>().is_some();
            Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from(format!("{certified}")))))
        });
        let socket = ListenerSocket { listener, tls: Some(ServerTls::load(files).unwrap()) };
        serve(socket, service, ListenerLimits::default(), server.supervisor.token(), &server.supervisor);
        server
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn pair(&self, host: &str, by: &TestAuthority, file: &str) -> (PathBuf, PathBuf) {
        let identity = by.issue(&[host]).unwrap();
        (
            self.write(&format!("{file}.pem"), &identity.certificate),
            self.write(&format!("{file}.key"), &identity.key),
        )
    }

    fn files(&self) -> ClientTlsFiles {
        let name = Some("engine.test".to_owned());
        ClientTlsFiles { ca: Some(self.authority.ca_file()), identity: None, name }
    }

    /// Whether the server saw a client certificate; on failure, the hint.
    async fn send_request(&self, trust: &ClientTls) -> Result<String, Option<&'static str>> {
        let client = trust.http_client().timeout(TEST_TIMEOUT).build().unwrap();
        let hint = |error: reqwest::Error| tls_error_hint(&error);
        let response = client.get(format!("https://{}/", self.address)).send().await.map_err(hint)?;
        response.text().await.map_err(hint)
    }
}

impl Drop for TestTlsServer {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}

#[tokio::test]
async fn servers_are_verified_by_ca_and_name() {
    let server = TestTlsServer::start(false);
    let trust = ClientTls::load(server.files()).unwrap();
    assert_eq!(server.send_request(&trust).await.unwrap(), "false");
    assert_eq!(
        server.send_request(&trust.for_name("else.test").unwrap()).await.unwrap(),
        "false",
        "the configured name takes precedence"
    );

    let nameless = ClientTls::load(ClientTlsFiles { name: None, ..server.files() }).unwrap();
    let refused = server.send_request(&nameless).await.unwrap_err().unwrap();
    assert!(refused.contains("name"), "its certificate does not have its address: {refused}");
    assert_eq!(server.send_request(&nameless.for_name("engine.test").unwrap()).await.unwrap(), "false");

    let foreign = authority();
    let foreign = ClientTls::load(ClientTlsFiles { ca: Some(foreign.ca_file()), ..server.files() }).unwrap();
    assert!(server.send_request(&foreign).await.unwrap_err().unwrap().contains("the CA"));
}

#[tokio::test]
async fn raw_connections_are_verified_like_http_clients() {
    let server = TestTlsServer::start(false);
    let trust = ClientTls::load(ClientTlsFiles { name: None, ..server.files() }).unwrap();
    let connect = async |host| trust.connect(host, TcpStream::connect(server.address).await.unwrap()).await;
    assert!(connect("engine.test").await.is_ok());
    for (host, part) in [("else.test", "name"), ("127.0.0.1", "name")] {
        assert!(tls_error_hint(&connect(host).await.unwrap_err()).unwrap().contains(part));
    }
    assert!(connect("no name").await.is_err());
}

#[tokio::test]
async fn the_client_certificate_is_sent_on_request() {
    let server = TestTlsServer::start(true);
    let own = server.pair("gateway", &server.authority, "own");
    let trust = ClientTls::load(ClientTlsFiles { identity: Some(own), ..server.files() }).unwrap();
    assert_eq!(server.send_request(&trust).await.unwrap(), "true");
    let without = ClientTls::load(server.files()).unwrap();
    assert!(server.send_request(&without).await.is_err());
    let foreign = server.pair("gateway", &authority(), "foreign");
    let foreign = ClientTls::load(ClientTlsFiles { identity: Some(foreign), ..server.files() }).unwrap();
    assert!(server.send_request(&foreign).await.is_err());
}

#[tokio::test]
async fn reloaded_files_apply_to_existing_clients() {
    let server = TestTlsServer::start(true);
    let (foreign, own) = (authority(), &server.authority);
    let ca = server.write("trusted.pem", &foreign.pem());
    let identity = Some(server.pair("gateway", &foreign, "own"));
    let trust = ClientTls::load(ClientTlsFiles { ca: Some(ca), identity, ..server.files() }).unwrap();
    let reloading = trust.clone().reload_on_change(server.supervisor.token());
    server.supervisor.spawn("renew", reloading);
    assert!(server.send_request(&trust).await.is_err());
    server.write("trusted.pem", "half a file");
    server.pair("gateway", own, "own");
    server.write("trusted.pem", &own.pem());
    let renewed = async {
        while server.send_request(&trust).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, renewed).await.unwrap();
}

#[test]
fn errors_name_the_unusable_file_or_flag() {
    let server = TempDir::new().unwrap();
    let missing = server.path().join("missing.pem");
    let error = |files| ClientTls::load(files).unwrap_err().to_string();
    assert!(
        error(ClientTlsFiles { ca: Some(missing.clone()), ..ClientTlsFiles::default() })
            .contains("missing.pem")
    );
    let identity = Some((missing.clone(), missing.clone()));
    assert!(error(ClientTlsFiles { identity, ..ClientTlsFiles::default() }).contains("missing.pem"));
    let name = Some("no name".to_owned());
    assert!(error(ClientTlsFiles { name, ..ClientTlsFiles::default() }).contains("no name"));
    let given =
        |certificate, key| ClientTlsFiles::from_options(None, [certificate, key], None, ["--cert", "--key"]);
    assert!(given(Some(&missing), None).unwrap_err().to_string().contains("needs --key"));
    assert!(given(None, Some(&missing)).unwrap_err().to_string().contains("needs --cert"));
    assert!(given(Some(&missing), Some(&missing)).unwrap().identity.is_some());
}

#[tokio::test]
async fn the_plain_http_client_rejects_https() {
    let server = TestTlsServer::start(false);
    let client = plain_http_client().timeout(TEST_TIMEOUT).build().unwrap();
    assert!(client.get(format!("https://{}/", server.address)).send().await.is_err());
}
