//! One connection: handshake, heartbeats, and messages in both directions.

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

/// Size of the read buffer that each connection holds.
const READ_BYTES: usize = 32 << 10;
/// Send queue limit: beyond it neither messages nor heartbeat responses are added.
const MAX_QUEUED_BYTES: usize = 256 << 10;
/// Minimum free space for a read: a small message with its headers.
const MIN_READ_BYTES: usize = 1 << 10;

/// A connection after its handshake. It makes progress only while polled.
#[derive(Debug)]
pub(crate) struct ZmtpConnection {
    stream: TcpStream,
    decoder: ZmtpDecoder,
    /// Bytes queued for sending.
    out: BytesMut,
    greeting: ZmtpGreeting,
}

/// An event on a connection.
#[derive(Debug)]
pub(crate) enum ZmtpConnectionEvent {
    Message(ZmtpMessage),
    /// Adds (`true`) or cancels a subscription, by a ZMTP 3.1 command.
    Subscription(bool, Bytes),
    /// All queued bytes are handed to the kernel.
    Flushed,
}

enum ConnectionProgress {
    Item(DecodedItem),
    Flushed,
}

impl ZmtpConnection {
    /// Resolves, connects and performs the handshake.
    pub(crate) async fn dial(
        endpoint: &ZmtpEndpoint,
        local_type: ZmtpSocketType,
        options: &ZmtpOptions,
    ) -> Result<Self, ZmtpError> {
        let connect = async {
            let addresses = endpoint.addresses().await?;
            Self::handshake(TcpStream::connect(&addresses[..]).await?, local_type, options).await
        };
        with_timeout(options.connect_timeout, connect).await
    }

    /// Performs the handshake on an accepted connection.
    pub(crate) async fn accepted(
        stream: TcpStream,
        local_type: ZmtpSocketType,
        options: &ZmtpOptions,
    ) -> Result<Self, ZmtpError> {
        with_timeout(options.connect_timeout, Self::handshake(stream, local_type, options)).await
    }

    async fn handshake(
        stream: TcpStream,
        local_type: ZmtpSocketType,
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
        ZmtpCommand::Ready(ReadyCommand { socket_type: local_type }).encode(&mut connection.out);
        match connection.next_item().await? {
            DecodedItem::Command(ZmtpCommand::Ready(ReadyCommand { socket_type: peer_type }))
                if local_type.is_compatible_with(peer_type) => {}
            DecodedItem::Command(ZmtpCommand::Ready(ReadyCommand { socket_type: peer_type })) => {
                ZmtpCommand::Error("Invalid socket type".to_owned()).encode(&mut connection.out);
                connection.flush().await?;
                return Err(ZmtpError::SocketType { ours: local_type, theirs: peer_type });
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

    /// Queues a subscription to messages with this prefix.
    pub(crate) fn subscribe(&mut self, topic: &Bytes) {
        if self.greeting.subscribes_by_command() {
            ZmtpCommand::Subscribe(topic.clone()).encode(&mut self.out);
        } else {
            ZmtpMessage::from([[&[1], &topic[..]].concat().into()]).encode(&mut self.out);
        }
    }

    /// Queues a message of an envelope and a body without a limit: check [`can_queue`](Self::can_queue) first.
    pub(crate) fn queue(&mut self, envelope: &[Bytes], body: &ZmtpMessage) {
        body.encode_after(envelope, &mut self.out);
    }

    /// Whether the send queue is below its limit.
    pub(crate) fn can_queue(&self) -> bool {
        self.out.len() < MAX_QUEUED_BYTES
    }

    /// Hands all queued bytes to the kernel. Cancel-safe.
    pub(crate) async fn flush(&mut self) -> Result<(), ZmtpError> {
        Ok(poll_fn(|cx| self.poll_flush(cx)).await?)
    }

    /// Waits for the next event; meanwhile sends queued bytes and responds to heartbeats. Cancel-safe.
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

    /// Waits for the next message; handles or ignores all other events. Cancel-safe.
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

    /// Reads before writing, so that a peer that is always ready to receive cannot block reads. A peer that sends without receiving is no
    /// longer read when its responses fill the queue.
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
    connect: impl Future<Output = Result<ZmtpConnection, ZmtpError>>,
) -> Result<ZmtpConnection, ZmtpError> {
    timeout(limit, connect).await.unwrap_or(Err(ZmtpError::Timeout(limit)))
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
