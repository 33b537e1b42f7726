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

/// A connection on its way to another task.
pub type DetachedStream = TcpStream;

/// Opens a listening socket.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    // A simulated bind never waits.
    TcpListener::bind(address).now_or_never().unwrap_or(Err(io::ErrorKind::WouldBlock.into()))
}

/// As in a system with threads, where the connection leaves its runtime.
///
/// # Errors
/// None.
pub fn detach(stream: TcpStream) -> io::Result<DetachedStream> {
    Ok(stream)
}

/// As in a system with threads, where the connection is registered with a runtime.
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

/// When connections are cut.
struct DisconnectInjector {
    random: fastrand::Rng,
    per_million: u32,
    injected: u64,
}

/// From now on, of a million writes on any connection so many end it: a part of the bytes is sent, and then both sides find it broken.
pub fn inject_disconnects(seed: u64, per_million: u32) {
    DISCONNECTS.with_borrow_mut(|cuts| {
        cuts.random = fastrand::Rng::with_seed(seed);
        cuts.per_million = per_million;
    });
}

/// Connections that were cut.
#[must_use]
pub fn injected_disconnects() -> u64 {
    DISCONNECTS.with_borrow(|cuts| cuts.injected)
}

/// How many of these bytes are sent before the connection is cut, if it is.
fn disconnect_after(bytes: usize) -> Option<usize> {
    DISCONNECTS.with_borrow_mut(|cuts| {
        if cuts.per_million == 0 || cuts.random.u32(..1_000_000) >= cuts.per_million {
            return None;
        }
        cuts.injected += 1;
        Some(cuts.random.usize(..=bytes))
    })
}

/// A listening socket.
pub struct TcpListener(turmoil::net::TcpListener);

impl TcpListener {
    /// Opens it.
    ///
    /// # Errors
    /// When the port is taken.
    pub async fn bind<A: ToSocketAddrs>(address: A) -> io::Result<Self> {
        turmoil::net::TcpListener::bind(address).await.map(Self)
    }

    /// The next connection.
    ///
    /// # Errors
    /// None that ends the listener.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let (stream, peer) = self.0.accept().await?;
        Ok((TcpStream::new(stream)?, peer))
    }

    /// Where it listens.
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

/// A connection.
#[derive(Debug)]
pub struct TcpStream(Box<SplitTcpStream>);

/// What makes a connection, beside the place that a system's connection takes.
#[derive(Debug)]
struct SplitTcpStream {
    /// `None` once the connection has been cut.
    reader: Mutex<Option<OwnedReadHalf>>,
    writer: Mutex<Option<OwnedWriteHalf>>,
    local: SocketAddr,
    peer: SocketAddr,
}

impl TcpStream {
    fn new(stream: turmoil::net::TcpStream) -> io::Result<Self> {
        let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
        record(format_args!("{local} has a connection with {peer}"));
        let (reader, writer) = stream.into_split();
        let (reader, writer) = (Mutex::new(Some(reader)), Mutex::new(Some(writer)));
        Ok(Self(Box::new(SplitTcpStream { reader, writer, local, peer })))
    }

    /// Connects.
    ///
    /// # Errors
    /// When nothing listens there.
    pub async fn connect<A: ToSocketAddrs>(address: A) -> io::Result<Self> {
        Self::new(turmoil::net::TcpStream::connect(address).await?)
    }

    /// The other side.
    ///
    /// # Errors
    /// None.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.peer)
    }

    /// This side.
    ///
    /// # Errors
    /// None.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.local)
    }

    /// Changes nothing: every write is sent at once.
    ///
    /// # Errors
    /// None.
    pub fn set_nodelay(&self, _: bool) -> io::Result<()> {
        Ok(())
    }

    /// Changes nothing.
    ///
    /// # Errors
    /// None.
    pub fn set_zero_linger(&self) -> io::Result<()> {
        Ok(())
    }

    /// Waits for bytes and copies them; they are read again.
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

    /// Reads what is there.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is.
    pub fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut into = ReadBuf::new(into);
        match self.poll_receive(&mut Context::from_waker(Waker::noop()), &mut into) {
            Poll::Ready(read) => read.map(|()| into.filled().len()),
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Sends what there is room for.
    ///
    /// # Errors
    /// `WouldBlock` when there is none.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self.poll_send(&mut Context::from_waker(Waker::noop()), bytes) {
            Poll::Ready(sent) => sent,
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Both directions, to be used at once.
    pub fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        (ReadHalf(self), WriteHalf(self))
    }

    /// Both directions, each for a task of its own.
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
        record(format_args!("{} -> {} is cut", self.0.local, self.0.peer));
        // Whether these arrive does not matter: a cut loses what is under way.
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

/// The receiving direction.
#[derive(Debug)]
pub struct ReadHalf<'a>(&'a TcpStream);

impl AsRef<TcpStream> for ReadHalf<'_> {
    fn as_ref(&self) -> &TcpStream {
        self.0
    }
}

/// The sending direction.
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
