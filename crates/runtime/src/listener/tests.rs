use super::*;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Full};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// `/` responds at once with the client's address; `/slow` waits for `release`.
#[derive(Clone, Default)]
struct GatedService {
    entered: Arc<Notify>,
    release: Arc<Notify>,
}

struct TestListener {
    handle: ListenerHandle,
    address: SocketAddr,
    drain: CancellationToken,
    supervisor: Supervisor,
    gate: GatedService,
}

impl TestListener {
    fn start(limits: ListenerLimits) -> Self {
        let gate = GatedService::default();
        let handler = gate.clone();
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let gate = handler.clone();
            async move {
                if request.uri().path() == "/slow" {
                    gate.entered.notify_one();
                    gate.release.notified().await;
                }
                let peer = request.extensions().get::<PeerAddr>().unwrap().0;
                Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from(peer.to_string()))))
            }
        });
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let drain = CancellationToken::new();
        let supervisor = Supervisor::new();
        let handle = serve(listener, service, limits, drain.clone(), &supervisor);
        Self { handle, address, drain, supervisor, gate }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    async fn assert_no_tasks_left(self) {
        self.supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
        assert_eq!(self.supervisor.panics(), 0);
    }
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")
}

/// Reads one response whose body is an address and thus has a content-length.
async fn response(stream: &mut TcpStream) -> (u16, String) {
    let mut read = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&read).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length: usize = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok())
                .unwrap_or(0);
            if body.len() >= length {
                return (head[9..12].parse().unwrap(), body.to_owned());
            }
        }
        let mut chunk = [0; 1024];
        let count = tokio::time::timeout(TEST_TIMEOUT, stream.read(&mut chunk)).await.unwrap().unwrap();
        assert_ne!(count, 0, "closed after {text:?}");
        read.extend_from_slice(&chunk[..count]);
    }
}

/// Waits until the server closes the connection; discards remaining bytes.
async fn closed(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let _ =
        tokio::time::timeout(TEST_TIMEOUT, stream.read_to_end(&mut rest)).await.expect("the server closes");
}

#[tokio::test]
async fn keep_alive_connections_see_the_peer_address() {
    let server = TestListener::start(ListenerLimits::default());
    let mut stream = server.connect().await;
    let local = stream.local_addr().unwrap().to_string();
    for _ in 0..3 {
        stream.write_all(get("/").as_bytes()).await.unwrap();
        assert_eq!(response(&mut stream).await, (200, local.clone()));
    }
    assert_eq!(server.handle.connections(), 1);
    server.assert_no_tasks_left().await;
}

#[tokio::test]
async fn http2_with_prior_knowledge_is_served() {
    let server = TestListener::start(ListenerLimits::default());
    let stream = server.connect().await;
    let local = stream.local_addr().unwrap().to_string();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(
        hyper_util::rt::TokioExecutor::new(),
        hyper_util::rt::TokioIo::new(stream),
    )
    .await
    .unwrap();
    let client = Supervisor::new();
    client.spawn("client", async move {
        connection.await.unwrap();
    });
    let request = Request::get("http://test/").body(Empty::<Bytes>::new()).unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.version(), http::Version::HTTP_2);
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), local);
    server.drain.cancel();
    assert!(server.handle.wait_idle(TEST_TIMEOUT).await);
    client.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(client.panics(), 0);
    server.assert_no_tasks_left().await;
}

#[tokio::test]
async fn malformed_input_does_not_stop_the_listener() {
    let server = TestListener::start(ListenerLimits { headers: Some(10), ..ListenerLimits::default() });
    let large = format!("GET / HTTP/1.1\r\nhost: test\r\nx: {}\r\n\r\n", "a".repeat(70 * 1024));
    let many = format!("GET / HTTP/1.1\r\nhost: test\r\n{}\r\n", "x: 1\r\n".repeat(20));
    for (sent, status) in [
        (large.as_bytes(), 431),
        (many.as_bytes(), 431),
        (b"\x16\x03\x01\x02\x00 a TLS hello", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
    ] {
        let mut stream = server.connect().await;
        stream.write_all(sent).await.unwrap();
        assert_eq!(response(&mut stream).await.0, status);
    }
    // A client that disconnects within a head, within a preface, or at once.
    for sent in [&b"GET / HT"[..], b"PRI * HTTP/2.0\r\n", b"PR", b""] {
        let mut stream = server.connect().await;
        stream.write_all(sent).await.unwrap();
        stream.shutdown().await.unwrap();
        closed(&mut stream).await;
    }
    // A head just under the limit is accepted.
    let mut stream = server.connect().await;
    let fits = format!("GET / HTTP/1.1\r\nhost: test\r\nx: {}\r\n\r\n", "a".repeat(60 * 1024));
    stream.write_all(fits.as_bytes()).await.unwrap();
    assert_eq!(response(&mut stream).await.0, 200);
    server.assert_no_tasks_left().await;
}

#[tokio::test]
async fn a_slow_request_head_is_disconnected() {
    let limits =
        ListenerLimits { header_read_timeout: Duration::from_millis(50), ..ListenerLimits::default() };
    let server = TestListener::start(limits);
    for sent in ["", "GET / HTTP/1.1\r\nhost: te"] {
        let mut stream = server.connect().await;
        stream.write_all(sent.as_bytes()).await.unwrap();
        closed(&mut stream).await;
    }
    server.assert_no_tasks_left().await;
}

#[tokio::test]
async fn connections_beyond_the_limit_wait() {
    let server = TestListener::start(ListenerLimits { connections: 1, ..ListenerLimits::default() });
    let mut first = server.connect().await;
    first.write_all(get("/").as_bytes()).await.unwrap();
    assert_eq!(response(&mut first).await.0, 200);

    let mut second = server.connect().await;
    second.write_all(get("/").as_bytes()).await.unwrap();
    // The first still works, and its round trip gives the loop time to accept the second.
    first.write_all(get("/").as_bytes()).await.unwrap();
    assert_eq!(response(&mut first).await.0, 200);
    assert_eq!(server.handle.connections(), 1);

    drop(first);
    assert_eq!(response(&mut second).await.0, 200);
    server.assert_no_tasks_left().await;
}

#[tokio::test]
async fn draining_closes_idle_connections_and_lets_busy_ones_finish() {
    let server = TestListener::start(ListenerLimits::default());
    let mut idle = server.connect().await;
    idle.write_all(get("/").as_bytes()).await.unwrap();
    assert_eq!(response(&mut idle).await.0, 200);
    let mut silent = server.connect().await;
    let mut busy = server.connect().await;
    busy.write_all(get("/slow").as_bytes()).await.unwrap();
    server.gate.entered.notified().await;

    server.drain.cancel();
    closed(&mut idle).await;
    closed(&mut silent).await;
    assert!(!server.handle.wait_idle(Duration::from_millis(20)).await);
    assert_eq!(server.handle.connections(), 1);
    assert!(TcpStream::connect(server.address).await.is_err(), "the socket is closed");

    server.gate.release.notify_one();
    assert_eq!(response(&mut busy).await.0, 200);
    closed(&mut busy).await;
    assert!(server.handle.wait_idle(TEST_TIMEOUT).await);
    server.assert_no_tasks_left().await;
}

#[tokio::test]
async fn connections_open_at_the_deadline_are_closed() {
    let server = TestListener::start(ListenerLimits::default());
    let mut stuck = server.connect().await;
    stuck.write_all(get("/slow").as_bytes()).await.unwrap();
    server.gate.entered.notified().await;
    server.drain.cancel();
    assert_eq!(server.handle.drain_then_close(Duration::from_millis(20)).await, 1);
    closed(&mut stuck).await;
    assert!(server.handle.wait_idle(TEST_TIMEOUT).await);
    server.assert_no_tasks_left().await;
}

#[tokio::test]
async fn a_supervisor_shutdown_drains_the_listener() {
    let server = TestListener::start(ListenerLimits::default());
    let mut idle = server.connect().await;
    idle.write_all(get("/").as_bytes()).await.unwrap();
    assert_eq!(response(&mut idle).await.0, 200);
    server.supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
    assert!(server.handle.wait_idle(TEST_TIMEOUT).await);
}

#[tokio::test]
async fn an_axum_router_can_be_served() {
    let router = axum::Router::new().route("/", axum::routing::get(|| async { "hello" }));
    let listener =
        bind("[::1]:0".parse().unwrap()).or_else(|_| bind("127.0.0.1:0".parse().unwrap())).unwrap();
    let address = listener.local_addr().unwrap();
    let supervisor = Supervisor::new();
    serve(listener, router, ListenerLimits::default(), supervisor.token(), &supervisor);
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(get("/").as_bytes()).await.unwrap();
    assert_eq!(response(&mut stream).await, (200, "hello".to_owned()));
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn bind_errors_name_the_address_and_a_fix() {
    let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let error = bind(address).unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot listen on {address}: ")), "{error}");
    assert!(error.contains("choose another port"), "{error}");
    let foreign = bind("192.0.2.1:0".parse().unwrap()).unwrap_err().to_string();
    assert!(foreign.contains("no interface of this host"), "{foreign}");
}
