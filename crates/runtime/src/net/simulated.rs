//! Sockets of a simulated network.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use turmoil::ToSocketAddrs;
use turmoil::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

pub use super::http::send_request;
use super::simulation_trace::record_bytes;
pub use super::simulation_trace::{capture_trace, record, trace_hash};

/// A connection that is moved to another task.
pub type DetachedStream = TcpStream;

/// Opens a simulated listening socket.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    // A simulated bind never waits.
    TcpListener::bind(address).now_or_never().unwrap_or(Err(io::ErrorKind::WouldBlock.into()))
}

/// No-op counterpart of detaching a connection from its runtime.
///
/// # Errors
/// None.
pub fn detach(stream: TcpStream) -> io::Result<DetachedStream> {
    Ok(stream)
}

/// No-op counterpart of registering a connection with a runtime.
///
/// # Errors
/// None.
pub fn attach(stream: DetachedStream) -> io::Result<TcpStream> {
    Ok(stream)
}

thread_local! {
    static DISCONNECTS: RefCell<DisconnectInjector> =
        const { RefCell::new(DisconnectInjector { random: fastrand::Rng::with_seed(0), per_million: 0, injected: 0 }) };
}

/// Decides when connections are broken.
struct DisconnectInjector {
    random: fastrand::Rng,
    per_million: u32,
    injected: u64,
}

/// From now on, `per_million` of a million writes break their connection: a part of the bytes is sent, then both sides get an error.
pub fn inject_disconnects(seed: u64, per_million: u32) {
    DISCONNECTS.with_borrow_mut(|injector| {
        injector.random = fastrand::Rng::with_seed(seed);
        injector.per_million = per_million;
    });
}

/// Number of connections broken so far.
#[must_use]
pub fn injected_disconnects() -> u64 {
    DISCONNECTS.with_borrow(|injector| injector.injected)
}

/// Number of bytes sent before the connection breaks; `None` if it does not.
fn disconnect_after(bytes: usize) -> Option<usize> {
    DISCONNECTS.with_borrow_mut(|injector| {
        if injector.per_million == 0 || injector.random.u32(..1_000_000) >= injector.per_million {
            return None;
        }
        injector.injected += 1;
        Some(injector.random.usize(..=bytes))
    })
}

pub struct TcpListener(turmoil::net::TcpListener);

impl TcpListener {
    /// Opens a listening socket.
    ///
    /// # Errors
    /// When the port is in use.
    pub async fn bind<A: ToSocketAddrs>(address: A) -> io::Result<Self> {
        turmoil::net::TcpListener::bind(address).await.map(Self)
    }

    /// Accepts the next connection.
    ///
    /// # Errors
    /// None that ends the listener.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let (stream, peer) = self.0.accept().await?;
        Ok((TcpStream::new(stream)?, peer))
    }

    /// The address of the listener.
    ///
    /// # Errors
    /// None.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl std::fmt::Debug for TcpListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpListener").finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub struct TcpStream(Box<SplitTcpStream>);

/// State of a connection, boxed so that the handle is as small as a system socket.
#[derive(Debug)]
struct SplitTcpStream {
    /// `None` once the connection is broken.
    reader: Mutex<Option<OwnedReadHalf>>,
    writer: Mutex<Option<OwnedWriteHalf>>,
    local: SocketAddr,
    peer: SocketAddr,
}

impl TcpStream {
    fn new(stream: turmoil::net::TcpStream) -> io::Result<Self> {
        let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
        record(format_args!("{local} connected with {peer}"));
        let (reader, writer) = stream.into_split();
        let (reader, writer) = (Mutex::new(Some(reader)), Mutex::new(Some(writer)));
        Ok(Self(Box::new(SplitTcpStream { reader, writer, local, peer })))
    }

    /// Connects to a listening address.
    ///
    /// # Errors
    /// When no listener has that address.
    pub async fn connect<A: ToSocketAddrs>(address: A) -> io::Result<Self> {
        Self::new(turmoil::net::TcpStream::connect(address).await?)
    }

    /// Address of the peer.
    ///
    /// # Errors
    /// None.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.peer)
    }

    /// Address of this side.
    ///
    /// # Errors
    /// None.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.local)
    }

    /// No-op: every write is sent at once.
    ///
    /// # Errors
    /// None.
    pub fn set_nodelay(&self, _: bool) -> io::Result<()> {
        Ok(())
    }

    /// No-op in a simulation.
    ///
    /// # Errors
    /// None.
    pub fn set_zero_linger(&self) -> io::Result<()> {
        Ok(())
    }

    /// Waits for bytes and copies them without consuming them.
    ///
    /// # Errors
    /// When the connection is broken.
    pub async fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut into = ReadBuf::new(into);
        poll_fn(|context| match &mut *self.0.reader.lock() {
            Some(reader) => Pin::new(reader).poll_peek(context, &mut into),
            None => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
        })
        .await
    }

    /// Reads available bytes without waiting.
    ///
    /// # Errors
    /// `WouldBlock` when there are none.
    pub fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut into = ReadBuf::new(into);
        match self.poll_receive(&mut Context::from_waker(Waker::noop()), &mut into) {
            Poll::Ready(read) => read.map(|()| into.filled().len()),
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Sends as many bytes as fit without waiting.
    ///
    /// # Errors
    /// `WouldBlock` when none fit.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self.poll_send(&mut Context::from_waker(Waker::noop()), bytes) {
            Poll::Ready(sent) => sent,
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Borrows both directions for concurrent use.
    pub fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        (ReadHalf(self), WriteHalf(self))
    }

    /// Splits both directions for separate tasks.
    #[must_use]
    pub fn into_split(self) -> (tokio::io::ReadHalf<Self>, tokio::io::WriteHalf<Self>) {
        tokio::io::split(self)
    }

    fn poll_receive(&self, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut *self.0.reader.lock() {
            Some(reader) => Pin::new(reader).poll_read(context, into),
            None => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
        }
    }

    fn poll_send(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut writer = self.0.writer.lock();
        let Some(half) = writer.as_mut() else {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        };
        let Some(sent) = disconnect_after(bytes.len()) else {
            let written = Pin::new(half).poll_write(context, bytes);
            if let Poll::Ready(Ok(sent)) = &written {
                record_bytes(self.0.local, self.0.peer, bytes.get(..*sent).unwrap_or_default());
            }
            return written;
        };
        record(format_args!("{} -> {} disconnected", self.0.local, self.0.peer));
        // The result does not matter: a broken connection loses bytes in flight.
        let _ = Pin::new(half).poll_write(context, bytes.get(..sent).unwrap_or_default());
        *writer = None;
        drop(writer);
        *self.0.reader.lock() = None;
        Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
    }

    fn poll_shutdown_write(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self.0.writer.lock() {
            Some(writer) => Pin::new(writer).poll_shutdown(context),
            None => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
        }
    }
}

/// Receiving direction of a connection.
#[derive(Debug)]
pub struct ReadHalf<'a>(&'a TcpStream);

impl AsRef<TcpStream> for ReadHalf<'_> {
    fn as_ref(&self) -> &TcpStream {
        self.0
    }
}

/// Sending direction of a connection.
#[derive(Debug)]
pub struct WriteHalf<'a>(&'a TcpStream);

impl AsyncRead for TcpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_receive(context, into)
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_shutdown_write(context)
    }
}

impl AsyncRead for ReadHalf<'_> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.poll_receive(context, into)
    }
}

impl AsyncWrite for WriteHalf<'_> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_send(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_shutdown_write(context)
    }
}
