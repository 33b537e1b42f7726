//! Mutual TLS: accepted programs, and the errors of rejected ones.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use moongate_testkit::TestAuthority;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

fn authority() -> TestAuthority {
    TestAuthority::new().unwrap()
}

fn issue(authority: &TestAuthority, name: &str) -> PeerTlsFiles {
    let files = authority.issue_files(name, &[name]).unwrap();
    PeerTlsFiles { certificate: files.certificate, key: files.key, ca: files.ca, name: None }
}

fn program(authority: &TestAuthority, name: &str) -> PeerTls {
    PeerTls::load(issue(authority, name)).unwrap()
}

/// Echoes one byte; returns the client's fingerprint.
async fn echo(listener: TcpListener, tls: PeerTls) -> io::Result<CertificateFingerprint> {
    let (mut stream, peer) = tls.accept(listener.accept().await?.0).await?;
    let byte = stream.read_u8().await?;
    stream.write_u8(byte).await?;
    stream.flush().await?;
    Ok(peer)
}

/// Sends one byte and returns the response, or the error.
async fn request(address: SocketAddr, tls: &PeerTls, host: &str) -> Result<u8, String> {
    let stream = TcpStream::connect(address).await.unwrap();
    let mut stream = tls.connect(host, stream).await.map_err(|error| error.to_string())?;
    let exchange = async {
        stream.write_u8(7).await?;
        stream.flush().await?;
        stream.read_u8().await
    };
    exchange.await.map_err(|error| describe_tls_error(&error))
}

async fn exchange(
    server: &PeerTls,
    client: &PeerTls,
    host: &str,
) -> (io::Result<CertificateFingerprint>, Result<u8, String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let both = async { tokio::join!(echo(listener, server.clone()), request(address, client, host)) };
    tokio::time::timeout(TEST_TIMEOUT, both).await.unwrap()
}

#[tokio::test]
async fn programs_of_one_ca_reach_each_other() {
    let authority = authority();
    let (node, client) = (program(&authority, "node.test"), program(&authority, "client.test"));
    let (peer, response) = exchange(&node, &client, "node.test").await;
    assert_eq!(response, Ok(7));
    assert_eq!(peer.ok(), client.own_fingerprint());
    assert_ne!(client.own_fingerprint(), node.own_fingerprint());

    let (_, refused) = exchange(&node, &client, "else.test").await;
    assert!(refused.unwrap_err().contains("connect under a name in its certificate"));
    let named = PeerTlsFiles { name: Some("node.test".to_owned()), ..issue(&authority, "client.test") };
    assert_eq!(exchange(&node, &PeerTls::load(named).unwrap(), "else.test").await.1, Ok(7));
}

#[tokio::test]
async fn a_certificate_of_another_ca_is_rejected() {
    let (authority, foreign) = (authority(), authority());
    let node = program(&authority, "node.test");
    let foreign_files = PeerTlsFiles { ca: authority.ca_file(), ..issue(&foreign, "client.test") };
    let (accepted, refused) = exchange(&node, &PeerTls::load(foreign_files).unwrap(), "node.test").await;
    assert!(accepted.is_err());
    let refused = refused.unwrap_err();
    assert!(refused.contains("from a CA that it trusts"), "{refused}");
    let (_, refused) = exchange(&node, &program(&foreign, "client.test"), "node.test").await;
    assert!(refused.unwrap_err().contains("configure the CA that signed its certificate"));
}

#[tokio::test]
async fn the_error_of_a_server_without_tls_has_a_hint() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let client = program(&authority(), "client.test");
    let plain = async {
        for response in [&b"not a record of TLS"[..], b""] {
            let mut stream = listener.accept().await.unwrap().0;
            assert!(stream.read(&mut [0; 2048]).await.unwrap() > 0);
            stream.write_all(response).await.unwrap();
        }
    };
    let both = async {
        tokio::join!(plain, async {
            for _ in 0..2 {
                let error = request(address, &client, "node.test").await.unwrap_err();
                assert!(error.contains("if it does not use TLS, set --store-tls-cert"), "{error}");
            }
        })
    };
    tokio::time::timeout(TEST_TIMEOUT, both).await.unwrap();
}

#[tokio::test]
async fn a_client_without_tls_gets_an_alert() {
    let node = program(&authority(), "node.test");
    for is_blocking in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut plain = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        plain.write_all(b"a request without TLS").await.unwrap();
        let stream = listener.accept().await.unwrap().0;
        if is_blocking {
            let (node, stream) = (node.clone(), stream.into_std().unwrap());
            stream.set_nonblocking(false).unwrap();
            let handshake = tokio::task::spawn_blocking(move || node.accept_blocking(stream).map(drop));
            assert!(handshake.await.unwrap().is_err());
        } else {
            assert!(node.accept(stream).await.is_err());
        }
        let mut alert = [0; 7];
        plain.read_exact(&mut alert).await.unwrap();
        assert!(is_tls_alert(&alert), "{alert:?}");
    }
}

#[tokio::test]
async fn a_blocking_thread_can_serve_a_connection() {
    let authority = authority();
    let (node, client) = (program(&authority, "node.test"), program(&authority, "client.test"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serve = async {
        let stream = listener.accept().await.unwrap().0.into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        let serve = move || {
            let mut stream = node.accept_blocking(stream).unwrap();
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            stream.write_all(&byte).unwrap();
            // The client may have closed first.
            drop(stream.close());
            stream.peer()
        };
        tokio::task::spawn_blocking(serve).await.unwrap()
    };
    let (peer, response) = tokio::join!(serve, request(address, &client, "node.test"));
    assert_eq!((Some(peer), response), (client.own_fingerprint(), Ok(7)));
}

#[test]
fn settings_are_complete_or_absent() {
    let authority = authority();
    let files = issue(&authority, "node.test");
    let (cert, key, ca) = (Some(files.certificate), Some(files.key), Some(files.ca));
    let load = |cert: &Option<PathBuf>, key: &Option<PathBuf>, ca: &Option<PathBuf>, name: Option<&str>| {
        let options = PeerTlsArgs {
            store_tls_cert: cert.clone(),
            store_tls_key: key.clone(),
            store_tls_ca: ca.clone(),
            store_tls_name: name.map(str::to_owned),
        };
        options.load().map(|tls| tls.is_some()).map_err(|error| error.to_string())
    };
    assert_eq!(load(&None, &None, &None, None), Ok(false));
    assert_eq!(load(&cert, &key, &ca, Some("node.test")), Ok(true));
    for (given, expected) in [
        (load(&cert, &None, &None, None), "--store-tls-cert needs --store-tls-key"),
        (load(&cert, &key, &None, None), "--store-tls-cert needs --store-tls-ca"),
        (load(&None, &None, &ca, None), "--store-tls-ca needs --store-tls-cert"),
        (load(&None, &None, &None, Some("x")), "--store-tls-name needs --store-tls-cert"),
        (load(&cert, &key, &Some("/none/ca.pem".into()), None), "--store-tls-ca /none/ca.pem"),
        (load(&cert, &ca, &ca, None), "--store-tls-key"),
    ] {
        let error = given.unwrap_err();
        assert!(error.starts_with(expected), "{error}");
    }
}
