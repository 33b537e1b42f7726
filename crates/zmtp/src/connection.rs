//! One connection: handshake, heartbeats, messages both ways.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::codec::{
    DecodedItem, GREETING_BYTES, ReadyCommand, ZmtpCommand, ZmtpDecoder, ZmtpGreeting, ZmtpMessage,
    ZmtpSocketType,
};
use crate::options::TcpKeepaliveOptions;
use crate::{ZmtpEndpoint, ZmtpError, ZmtpOptions};

/// Free space to read into. One such buffer is held by each connection.
const READ_BYTES: usize = 32 << 10;
/// Bytes waiting to be sent beyond which neither messages nor answers to heartbeats are added.
const MAX_QUEUED_BYTES: usize = 256 << 10;
/// What a small message needs with its headers: free space below this is not worth a read.
const MIN_READ_BYTES: usize = 1 << 10;

/// A connection after its handshake. It works while it is polled.
#[derive(Debug)]
pub(crate) struct ZmtpConnection {
    stream: TcpStream,
    decoder: ZmtpDecoder,
    /// Bytes to send.
    out: BytesMut,
    greeting: ZmtpGreeting,
}

/// Something that happened on a connection.
#[derive(Debug)]
pub(crate) enum ZmtpConnectionEvent {
    Message(ZmtpMessage),
    /// Add (`true`) or take back a subscription, by a command of ZMTP 3.1.
    Subscription(bool, Bytes),
    /// Everything queued has been given to the kernel.
    Flushed,
}

enum ConnectionProgress {
    Item(DecodedItem),
    Flushed,
}

impl ZmtpConnection {
    /// Resolves, connects and shakes hands.
    pub(crate) async fn dial(
        endpoint: &ZmtpEndpoint,
        ours: ZmtpSocketType,
        options: &ZmtpOptions,
    ) -> Result<Self, ZmtpError> {
        let dialed = async {
            let addresses = endpoint.addresses().await?;
            Self::handshake(TcpStream::connect(&addresses[..]).await?, ours, options).await
        };
        with_timeout(options.connect_timeout, dialed).await
    }

    /// Shakes hands on an accepted connection.
    pub(crate) async fn accepted(
        stream: TcpStream,
        ours: ZmtpSocketType,
        options: &ZmtpOptions,
    ) -> Result<Self, ZmtpError> {
        with_timeout(options.connect_timeout, Self::handshake(stream, ours, options)).await
    }

    async fn handshake(
        stream: TcpStream,
        ours: ZmtpSocketType,
        options: &ZmtpOptions,
    ) -> Result<Self, ZmtpError> {
        configure(&stream, &options.tcp)?;
        let mut connection = Self {
            stream,
            decoder: ZmtpDecoder::new(options.limits),
            out: BytesMut::with_capacity(2 * GREETING_BYTES),
            greeting: ZmtpGreeting { minor: 0 },
        };
        connection.out.extend_from_slice(&ZmtpGreeting::encode());
        let DecodedItem::Greeting(greeting) = connection.next_item().await? else {
            return Err(ZmtpError::Handshake);
        };
        connection.greeting = greeting;
        ZmtpCommand::Ready(ReadyCommand { socket_type: ours }).encode(&mut connection.out);
        match connection.next_item().await? {
            DecodedItem::Command(ZmtpCommand::Ready(ReadyCommand { socket_type: theirs }))
                if ours.is_compatible_with(theirs) => {}
            DecodedItem::Command(ZmtpCommand::Ready(ReadyCommand { socket_type: theirs })) => {
                ZmtpCommand::Error("Invalid socket type".to_owned()).encode(&mut connection.out);
                connection.flush().await?;
                return Err(ZmtpError::SocketType { ours, theirs });
            }
            DecodedItem::Command(ZmtpCommand::Error(reason)) => return Err(ZmtpError::Refused(reason)),
            _ => return Err(ZmtpError::Handshake),
        }
        connection.flush().await?;
        Ok(connection)
    }

    pub(crate) fn peer_addr(&self) -> Result<SocketAddr, ZmtpError> {
        Ok(self.stream.peer_addr()?)
    }

    /// Queues a subscription to messages that begin so.
    pub(crate) fn subscribe(&mut self, topic: &Bytes) {
        if self.greeting.subscribes_by_command() {
            ZmtpCommand::Subscribe(topic.clone()).encode(&mut self.out);
        } else {
            ZmtpMessage::from([[&[1], &topic[..]].concat().into()]).encode(&mut self.out);
        }
    }

    /// Queues a message of an envelope and a body, whatever waits already: see [`can_queue`](Self::has_room).
    pub(crate) fn queue(&mut self, envelope: &[Bytes], body: &ZmtpMessage) {
        body.encode_after(envelope, &mut self.out);
    }

    /// Whether the peer takes what is sent fast enough to queue more.
    pub(crate) fn can_queue(&self) -> bool {
        self.out.len() < MAX_QUEUED_BYTES
    }

    /// Gives all that is queued to the kernel. Cancel-safe.
    pub(crate) async fn flush(&mut self) -> Result<(), ZmtpError> {
        Ok(poll_fn(|cx| self.poll_flush(cx)).await?)
    }

    /// What happens next; meanwhile sends what is queued and answers heartbeats. Cancel-safe.
    pub(crate) async fn next_event(&mut self) -> Result<ZmtpConnectionEvent, ZmtpError> {
        loop {
            match poll_fn(|cx| self.poll_progress(cx)).await? {
                ConnectionProgress::Flushed => return Ok(ZmtpConnectionEvent::Flushed),
                ConnectionProgress::Item(DecodedItem::Message(message)) => {
                    return Ok(ZmtpConnectionEvent::Message(message));
                }
                ConnectionProgress::Item(DecodedItem::Command(command)) => match command {
                    ZmtpCommand::Ping { context, .. } => ZmtpCommand::Pong(context).encode(&mut self.out),
                    ZmtpCommand::Subscribe(topic) => {
                        return Ok(ZmtpConnectionEvent::Subscription(true, topic));
                    }
                    ZmtpCommand::Cancel(topic) => return Ok(ZmtpConnectionEvent::Subscription(false, topic)),
                    ZmtpCommand::Error(reason) => return Err(ZmtpError::Refused(reason)),
                    ZmtpCommand::Ready(_) | ZmtpCommand::Pong(_) | ZmtpCommand::Unknown => {}
                },
                ConnectionProgress::Item(DecodedItem::Greeting(_)) => return Err(ZmtpError::Handshake),
            }
        }
    }

    /// The next message; anything else is dealt with or ignored. Cancel-safe.
    pub(crate) async fn next_message(&mut self) -> Result<ZmtpMessage, ZmtpError> {
        loop {
            if let ZmtpConnectionEvent::Message(message) = self.next_event().await? {
                return Ok(message);
            }
        }
    }

    async fn next_item(&mut self) -> Result<DecodedItem, ZmtpError> {
        loop {
            if let ConnectionProgress::Item(item) = poll_fn(|cx| self.poll_progress(cx)).await? {
                return Ok(item);
            }
        }
    }

    /// Reads first: a peer that is always ready to receive must be heard too. A peer that sends without receiving is not read any
    /// further once its answers fill the queue.
    fn poll_progress(&mut self, cx: &mut Context<'_>) -> Poll<Result<ConnectionProgress, ZmtpError>> {
        while self.can_queue() {
            if let Some(item) = self.decoder.decode()? {
                return Poll::Ready(Ok(ConnectionProgress::Item(item)));
            }
            match self.poll_fill(cx)? {
                Poll::Ready(()) => {}
                Poll::Pending => break,
            }
        }
        if self.out.is_empty() {
            return Poll::Pending;
        }
        ready!(self.poll_flush(cx))?;
        Poll::Ready(Ok(ConnectionProgress::Flushed))
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ZmtpError>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            let buffer = self.decoder.buffer();
            if buffer.capacity() - buffer.len() < MIN_READ_BYTES {
                buffer.reserve(READ_BYTES);
            }
            match self.stream.try_read_buf(buffer) {
                Ok(0) => return Poll::Ready(Err(ZmtpError::Closed)),
                Ok(_) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            ready!(self.stream.poll_write_ready(cx))?;
            match self.stream.try_write(&self.out) {
                Ok(written) => self.out.advance(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }
}

async fn with_timeout(
    limit: Duration,
    dialed: impl Future<Output = Result<ZmtpConnection, ZmtpError>>,
) -> Result<ZmtpConnection, ZmtpError> {
    timeout(limit, dialed).await.unwrap_or(Err(ZmtpError::Timeout(limit)))
}

fn configure(stream: &TcpStream, options: &TcpKeepaliveOptions) -> io::Result<()> {
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new()
        .with_time(options.keepalive_idle)
        .with_interval(options.keepalive_interval)
        .with_retries(options.keepalive_probes);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(options.user_timeout))?;
    socket.set_tcp_nodelay(true)
}
