//! Sockets of the operating system.

use std::io;
use std::net::SocketAddr;

use tokio::net::TcpSocket;

pub use tokio::net::tcp::ReadHalf;
pub use tokio::net::{TcpListener, TcpStream};

/// A connection that is moved to another thread's runtime.
pub type DetachedStream = std::net::TcpStream;

/// Accept backlog of the kernel (also bounded by `net.core.somaxconn`).
const BACKLOG: u32 = 4096;

/// Opens a listening socket whose address can be reused while connections of a previous process linger.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Removes a connection from this thread's runtime.
///
/// # Errors
/// Errors of the operating system.
pub fn detach(stream: TcpStream) -> io::Result<DetachedStream> {
    stream.into_std()
}

/// Registers a connection with this thread's runtime.
///
/// # Errors
/// Errors of the operating system.
pub fn attach(stream: DetachedStream) -> io::Result<TcpStream> {
    TcpStream::from_std(stream)
}

/// Sends an HTTP request.
///
/// # Errors
/// Errors of the HTTP client.
pub async fn send_request(request: reqwest::RequestBuilder) -> reqwest::Result<reqwest::Response> {
    request.send().await
}
