//! Servers over TLS: which are trusted, under which name, and what they are shown.

use std::time::Duration;

use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;
use tokio::net::TcpStream;

use super::*;
use crate::{
    ClientCertificate, ListenerLimits, ListenerSocket, ServerTls, ServerTlsFiles, Supervisor, bind, serve,
};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

struct TestTlsServer {
    folder: TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
    address: std::net::SocketAddr,
    supervisor: Supervisor,
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

impl TestTlsServer {
    /// A server named `engine.test` that asks for certificates if it `asks`.
    fn start(asks: bool) -> Self {
        let (folder, authority, supervisor) = (TempDir::new().unwrap(), authority(), Supervisor::new());
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let world = Self { folder, authority, address, supervisor };
        world.write("ca.pem", &world.authority.pem());
        let (certificate, key) = world.pair("engine.test", &world.authority, "server");
        let client_ca = asks.then(|| world.folder.path().join("ca.pem"));
        let files = ServerTlsFiles { certificate, key, client_ca, client_optional: false };
        let service = tower::service_fn(async |request: Request<Incoming>| {
            let certified = request.extensions().get::<ClientCertificate>().is_some();
            Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from(format!("{certified}")))))
        });
        let socket = ListenerSocket { listener, tls: Some(ServerTls::load(files).unwrap()) };
        serve(socket, service, ListenerLimits::default(), world.supervisor.token(), &world.supervisor);
        world
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn pair(&self, host: &str, by: &CertifiedIssuer<'_, KeyPair>, file: &str) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new(vec![host.to_owned()]).unwrap().signed_by(&key, by).unwrap();
        (
            self.write(&format!("{file}.pem"), &cert.pem()),
            self.write(&format!("{file}.key"), &key.serialize_pem()),
        )
    }

    fn files(&self) -> ClientTlsFiles {
        let name = Some("engine.test".to_owned());
        ClientTlsFiles { ca: Some(self.folder.path().join("ca.pem")), identity: None, name }
    }

    /// What the server says of the client; an error with what to do about it.
    async fn send_request(&self, trust: &ClientTls) -> Result<String, Option<&'static str>> {
        let client = trust.http_client().timeout(TEST_TIMEOUT).build().unwrap();
        let told = |error: reqwest::Error| tls_error_hint(&error);
        let answer = client.get(format!("https://{}/", self.address)).send().await.map_err(told)?;
        answer.text().await.map_err(told)
    }
}

impl Drop for TestTlsServer {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}

#[tokio::test]
async fn a_server_is_known_by_its_authority_and_its_name() {
    let world = TestTlsServer::start(false);
    let trust = ClientTls::load(world.files()).unwrap();
    assert_eq!(world.send_request(&trust).await.unwrap(), "false");
    assert_eq!(
        world.send_request(&trust.for_name("else.test").unwrap()).await.unwrap(),
        "false",
        "the settings' name"
    );

    let nameless = ClientTls::load(ClientTlsFiles { name: None, ..world.files() }).unwrap();
    let refused = world.send_request(&nameless).await.unwrap_err().unwrap();
    assert!(refused.contains("name"), "its certificate does not have its address: {refused}");
    assert_eq!(world.send_request(&nameless.for_name("engine.test").unwrap()).await.unwrap(), "false");

    let foreign = world.write("foreign.pem", &authority().pem());
    let foreign = ClientTls::load(ClientTlsFiles { ca: Some(foreign), ..world.files() }).unwrap();
    assert!(world.send_request(&foreign).await.unwrap_err().unwrap().contains("authority"));
}

#[tokio::test]
async fn a_connection_without_a_client_is_checked_alike() {
    let world = TestTlsServer::start(false);
    let trust = ClientTls::load(ClientTlsFiles { name: None, ..world.files() }).unwrap();
    let connect = async |host| trust.connect(host, TcpStream::connect(world.address).await.unwrap()).await;
    assert!(connect("engine.test").await.is_ok());
    for (host, part) in [("else.test", "name"), ("127.0.0.1", "name")] {
        assert!(tls_error_hint(&connect(host).await.unwrap_err()).unwrap().contains(part));
    }
    assert!(connect("no name").await.is_err());
}

#[tokio::test]
async fn a_server_that_asks_is_shown_our_certificate() {
    let world = TestTlsServer::start(true);
    let own = world.pair("gateway", &world.authority, "own");
    let trust = ClientTls::load(ClientTlsFiles { identity: Some(own), ..world.files() }).unwrap();
    assert_eq!(world.send_request(&trust).await.unwrap(), "true");
    let without = ClientTls::load(world.files()).unwrap();
    assert!(world.send_request(&without).await.is_err());
    let foreign = world.pair("gateway", &authority(), "foreign");
    let foreign = ClientTls::load(ClientTlsFiles { identity: Some(foreign), ..world.files() }).unwrap();
    assert!(world.send_request(&foreign).await.is_err());
}

#[tokio::test]
async fn renewed_files_hold_for_clients_that_were_made_before() {
    let world = TestTlsServer::start(true);
    let (foreign, own) = (authority(), &world.authority);
    let ca = world.write("trusted.pem", &foreign.pem());
    let identity = Some(world.pair("gateway", &foreign, "own"));
    let trust = ClientTls::load(ClientTlsFiles { ca: Some(ca), identity, ..world.files() }).unwrap();
    let following = trust.clone().reload_on_change(world.supervisor.token());
    world.supervisor.spawn("renew", following);
    assert!(world.send_request(&trust).await.is_err());
    world.write("trusted.pem", "half a file");
    world.pair("gateway", own, "own");
    world.write("trusted.pem", &own.pem());
    let renewed = async {
        while world.send_request(&trust).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, renewed).await.unwrap();
}

#[test]
fn what_cannot_be_used_is_named() {
    let world = TempDir::new().unwrap();
    let missing = world.path().join("missing.pem");
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
async fn plain_http_needs_no_authority_and_does_not_speak_tls() {
    let world = TestTlsServer::start(false);
    let client = plain_http_client().timeout(TEST_TIMEOUT).build().unwrap();
    assert!(client.get(format!("https://{}/", world.address)).send().await.is_err());
}
