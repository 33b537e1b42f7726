use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::Supervisor;
use crate::listener::{ListenerHandle, ListenerLimits, bind, serve};
use crate::net::TcpStream;

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

type Event = Result<Frame<Bytes>, String>;
type Events = futures_util::stream::BoxStream<'static, Event>;

/// Each request gets the body that the test sends to the next channel.
struct TestServer {
    handle: ListenerHandle,
    drain: CancellationToken,
    supervisor: Supervisor,
    stream: TcpStream,
    bodies: mpsc::UnboundedReceiver<(String, mpsc::Sender<Event>)>,
}

impl TestServer {
    async fn start() -> Self {
        let (requests, bodies) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let (sender, receiver) = mpsc::channel(1);
            requests.send((request.uri().path().to_owned(), sender)).unwrap();
            let events = futures_util::stream::unfold(receiver, async |mut receiver| {
                Some((receiver.recv().await?, receiver))
            });
            let events: Events = Box::pin(events);
            let mut response = Response::new(StreamBody::new(events));
            response.headers_mut().insert("x-a", http::HeaderValue::from_static("b"));
            response.headers_mut().insert(CONTENT_LENGTH, http::HeaderValue::from_static("7"));
            if request.uri().path() != "/by-hyper" {
                response.headers_mut().remove(CONTENT_LENGTH);
                response.extensions_mut().insert(RequestRead);
            }
            std::future::ready(Ok::<_, Infallible>(response))
        });
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let (drain, supervisor) = (CancellationToken::new(), Supervisor::new());
        let handle = serve(listener, service, ListenerLimits::default(), drain.clone(), &supervisor);
        let stream = TcpStream::connect(address).await.unwrap();
        Self { handle, drain, supervisor, stream, bodies }
    }

    async fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.unwrap();
    }

    /// The path of the next request that the service gets, and its body.
    async fn request(&mut self) -> (String, mpsc::Sender<Event>) {
        tokio::time::timeout(TEST_TIMEOUT, self.bodies.recv()).await.unwrap().unwrap()
    }

    async fn read_until(&mut self, end: &str) -> String {
        let mut text = String::new();
        while !text.ends_with(end) {
            let read = tokio::time::timeout(TEST_TIMEOUT, self.stream.read_u8()).await.unwrap();
            text.push(read.unwrap_or_else(|error| panic!("{error} after {text:?}")).into());
        }
        text
    }

    /// All that the server sends until it closes the connection.
    async fn read_to_end(&mut self) -> String {
        let mut text = String::new();
        let read = tokio::time::timeout(TEST_TIMEOUT, self.stream.read_to_string(&mut text)).await.unwrap();
        read.unwrap();
        text
    }

    async fn end(self) {
        drop(self.stream);
        self.supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
        assert_eq!(self.supervisor.panics(), 0);
    }
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")
}

fn data(text: &str) -> Event {
    Ok(Frame::data(Bytes::from(text.to_owned())))
}

#[tokio::test]
async fn events_are_sent_at_once_and_the_connection_is_used_again() {
    let mut server = TestServer::start().await;
    for path in ["/first", "/second"] {
        server.send(&get(path)).await;
        let (received, events) = server.request().await;
        assert_eq!(received, path);
        let head = server.read_until("\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\nx-a: b\r\ndate: "), "{head}");
        assert!(head.ends_with(" GMT\r\ntransfer-encoding: chunked\r\n\r\n"), "{head}");
        events.send(data("")).await.unwrap();
        for text in ["data: 1\n\n", "data: twenty\n\n"] {
            events.send(data(text)).await.unwrap();
            let chunk = format!("{:x}\r\n{text}\r\n", text.len());
            assert_eq!(server.read_until(&chunk).await, chunk);
        }
        drop(events);
        assert_eq!(server.read_until("0\r\n\r\n").await, "0\r\n\r\n");
    }
    // Short responses and long ones on the same connection.
    server.send(&get("/by-hyper")).await;
    let (_, events) = server.request().await;
    events.send(data("seventh")).await.unwrap();
    drop(events);
    assert!(server.read_until("seventh").await.contains("content-length: 7\r\n"));
    server.end().await;
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let mut server = TestServer::start().await;
    server.send(&format!("{}{}{}", get("/1"), get("/2"), &get("/3")[..9])).await;
    let (_, first) = server.request().await;
    first.send(data("one")).await.unwrap();
    server.read_until("one\r\n").await;
    // A part of a request that arrives while a response streams.
    server.send(&get("/3")[9..]).await;
    first.send(data("more")).await.unwrap();
    server.read_until("more\r\n").await;
    assert!(server.bodies.is_empty());
    drop(first);
    for path in ["/2", "/3"] {
        let (received, events) = server.request().await;
        assert_eq!(received, path);
        events.send(data(path)).await.unwrap();
        drop(events);
        server.read_until(&format!("2\r\n{path}\r\n0\r\n\r\n")).await;
    }
    server.end().await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_body() {
    let mut server = TestServer::start().await;
    server.send(&get("/")).await;
    let (_, events) = server.request().await;
    server.read_until("\r\n\r\n").await;
    server.stream.shutdown().await.unwrap();
    tokio::time::timeout(TEST_TIMEOUT, events.closed()).await.unwrap();
    assert_eq!(server.read_to_end().await, "");
    server.end().await;
}

#[tokio::test]
async fn events_before_an_error_arrive_and_the_body_has_no_end() {
    let mut server = TestServer::start().await;
    server.send(&get("/")).await;
    let (_, events) = server.request().await;
    events.send(data("last")).await.unwrap();
    events.send(Err("engine failed".to_owned())).await.unwrap();
    let text = server.read_to_end().await;
    assert!(text.ends_with("\r\n\r\n4\r\nlast\r\n"), "{text}");
    server.end().await;
}

#[tokio::test]
async fn the_connection_is_closed_if_the_client_requests_it() {
    for (version, close) in [("1.1", "connection: TE, Close\r\n"), ("1.0", "")] {
        let mut server = TestServer::start().await;
        server.send(&format!("GET / HTTP/{version}\r\nhost: test\r\n{close}\r\n")).await;
        let (_, events) = server.request().await;
        events.send(data("text")).await.unwrap();
        drop(events);
        let text = server.read_to_end().await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let is_chunked = head.contains("transfer-encoding: chunked");
        assert_eq!(
            (is_chunked, head.contains("connection: close")),
            (version == "1.1", version == "1.1"),
            "{head}"
        );
        assert_eq!(body, if is_chunked { "4\r\ntext\r\n0\r\n\r\n" } else { "text" });
        server.end().await;
    }
}

#[tokio::test]
async fn a_drain_lets_the_response_end_and_a_deadline_does_not() {
    let mut server = TestServer::start().await;
    server.send(&get("/")).await;
    let (_, events) = server.request().await;
    server.read_until("\r\n\r\n").await;
    server.drain.cancel();
    assert!(!server.handle.wait_idle(Duration::from_millis(20)).await);
    events.send(data("text")).await.unwrap();
    drop(events);
    assert_eq!(server.read_to_end().await, "4\r\ntext\r\n0\r\n\r\n");
    assert!(server.handle.wait_idle(TEST_TIMEOUT).await);
    server.end().await;

    let mut server = TestServer::start().await;
    server.send(&get("/")).await;
    let (_, events) = server.request().await;
    server.read_until("\r\n\r\n").await;
    server.drain.cancel();
    assert_eq!(server.handle.drain_then_close(Duration::from_millis(20)).await, 1);
    tokio::time::timeout(TEST_TIMEOUT, events.closed()).await.unwrap();
    server.end().await;
}

#[tokio::test]
async fn a_slow_client_gets_everything_and_bounds_what_is_buffered() {
    let (near, mut far) = tokio::io::duplex(100);
    let mut stream = PrefixedStream::new(near);
    let frame = "x".repeat(10_000);
    let mut polled = 0;
    let body = StreamBody::new(futures_util::stream::poll_fn(|_| {
        polled += 1;
        Poll::Ready((polled <= 50).then(|| Ok::<_, Infallible>(Frame::data(Bytes::from(frame.clone())))))
    }));
    let mut body = Box::pin(body);
    let mut writer = ResponseWriter::new(&mut stream, b"head\r\n\r\n".to_vec(), body.as_mut());
    let mut context = Context::from_waker(std::task::Waker::noop());
    assert!(writer.poll(&mut context).is_pending());
    assert!(writer.output.len() < MAX_OUTPUT + 10_100, "{}", writer.output.len());
    let mut received = String::new();
    let send = async {
        std::future::poll_fn(|cx| writer.poll(cx)).await.unwrap();
        assert_eq!(writer.output.capacity(), 0);
        writer.stream.shutdown().await.unwrap();
    };
    let (_, read) = tokio::join!(send, far.read_to_string(&mut received));
    read.unwrap();
    assert_eq!(received, format!("head\r\n\r\n{}0\r\n\r\n", format!("2710\r\n{frame}\r\n").repeat(50)));
}
