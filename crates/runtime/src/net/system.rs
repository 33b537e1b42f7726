//! Sockets of the operating system.

use std::io;
use std::net::SocketAddr;

use tokio::net::TcpSocket;

pub use tokio::net::tcp::ReadHalf;
pub use tokio::net::{TcpListener, TcpStream};

/// A connection on its way to the runtime of another thread.
pub type DetachedStream = std::net::TcpStream;

/// Connections the kernel keeps ready while the accept loop is busy (bounded by `net.core.somaxconn` too).
const BACKLOG: u32 = 4096;

/// Opens a listening socket whose address can be taken again while connections of a previous process linger.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Takes a connection from this thread's runtime.
///
/// # Errors
/// As the operating system reports them.
pub fn detach(stream: TcpStream) -> io::Result<DetachedStream> {
    stream.into_std()
}

/// Registers a connection with this thread's runtime.
///
/// # Errors
/// As the operating system reports them.
pub fn attach(stream: DetachedStream) -> io::Result<TcpStream> {
    TcpStream::from_std(stream)
}

/// Sends an HTTP request.
///
/// # Errors
/// Those of the client.
pub async fn send_request(request: reqwest::RequestBuilder) -> reqwest::Result<reqwest::Response> {
    request.send().await
}
