//! HTTP/1.1 by hand, for requests that no client library would send.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::TEST_TIMEOUT;

/// A response as it came.
#[derive(Debug)]
pub(crate) struct RawHttpResponse {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

/// A connection whose bytes are the test's own.
pub(crate) struct RawHttpConnection {
    reading: OwnedReadHalf,
    writing: OwnedWriteHalf,
}

impl RawHttpConnection {
    pub(crate) async fn open(address: SocketAddr) -> Self {
        let (reading, writing) = TcpStream::connect(address).await.unwrap().into_split();
        Self { reading, writing }
    }

    /// Sends bytes; false if the peer does not take them any more.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> bool {
        self.writing.write_all(bytes).await.is_ok()
    }

    /// Closes the sending direction of the connection.
    pub(crate) async fn finish(&mut self) {
        // The peer may have closed first.
        drop(self.writing.shutdown().await);
    }

    /// Reads one response to its end by `content-length`, or to the end of the connection.
    pub(crate) async fn response(&mut self) -> RawHttpResponse {
        let mut bytes = Vec::new();
        let read = tokio::time::timeout(TEST_TIMEOUT, async {
            let mut piece = [0; 16 * 1024];
            while parse(&bytes).is_none_or(|(_, missing)| missing > 0) {
                match self.reading.read(&mut piece).await {
                    Ok(0) | Err(_) => break,
                    Ok(read) => bytes.extend_from_slice(&piece[..read]),
                }
            }
        });
        assert!(read.await.is_ok(), "no whole response: {:?}", String::from_utf8_lossy(&bytes));
        match parse(&bytes) {
            Some((response, _)) => response,
            None => panic!("no response: {:?}", String::from_utf8_lossy(&bytes)),
        }
    }
}

/// One request on a connection of its own.
pub(crate) async fn exchange(address: SocketAddr, request: &[u8]) -> RawHttpResponse {
    let mut connection = RawHttpConnection::open(address).await;
    connection.send(request).await;
    connection.response().await
}

/// A POST of a JSON body.
pub(crate) fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// The response and how many bytes of its body are missing; `None` while its head is.
fn parse(bytes: &[u8]) -> Option<(RawHttpResponse, usize)> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let declared = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    let mut body = bytes[end + 4..].to_vec();
    // Without a declared length only the end of the connection ends it.
    let missing = declared.map_or(usize::MAX, |length| length.saturating_sub(body.len()));
    body.truncate(declared.unwrap_or(usize::MAX));
    Some((RawHttpResponse { status, head, body }, missing))
}
