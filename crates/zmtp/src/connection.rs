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

use crate::codec::{Command, Decoder, GREETING_BYTES, Greeting, Item, Message, Ready, SocketType};
use crate::options::TcpOptions;
use crate::{Endpoint, Error, Options};

/// Free space to read into. One such buffer is held by each connection.
const READ_BYTES: usize = 32 << 10;
/// Bytes waiting to be sent beyond which neither messages nor answers to heartbeats are added.
const ROOM_BYTES: usize = 256 << 10;
/// What a small message needs with its headers: free space below this is not worth a read.
const LEAST_READ_BYTES: usize = 1 << 10;

/// A connection after its handshake. It works while it is polled.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    decoder: Decoder,
    /// Bytes to send.
    out: BytesMut,
    greeting: Greeting,
}

/// Something that happened on a connection.
#[derive(Debug)]
pub(crate) enum Turn {
    Message(Message),
    /// Add (`true`) or take back a subscription, by a command of ZMTP 3.1.
    Subscription(bool, Bytes),
    /// Everything queued has been given to the kernel.
    Flushed,
}

enum Step {
    Item(Item),
    Flushed,
}

impl Connection {
    /// Resolves, connects and shakes hands.
    pub(crate) async fn dial(
        endpoint: &Endpoint,
        ours: SocketType,
        options: &Options,
    ) -> Result<Self, Error> {
        let dialed = async {
            let addresses = endpoint.addresses().await?;
            Self::shake_hands(TcpStream::connect(&addresses[..]).await?, ours, options).await
        };
        within(options.connect_timeout, dialed).await
    }

    /// Shakes hands on an accepted connection.
    pub(crate) async fn accepted(
        stream: TcpStream,
        ours: SocketType,
        options: &Options,
    ) -> Result<Self, Error> {
        within(options.connect_timeout, Self::shake_hands(stream, ours, options)).await
    }

    async fn shake_hands(stream: TcpStream, ours: SocketType, options: &Options) -> Result<Self, Error> {
        configure(&stream, &options.tcp)?;
        let mut connection = Self {
            stream,
            decoder: Decoder::new(options.limits),
            out: BytesMut::with_capacity(2 * GREETING_BYTES),
            greeting: Greeting { minor: 0 },
        };
        connection.out.extend_from_slice(&Greeting::encode());
        let Item::Greeting(greeting) = connection.item().await? else { return Err(Error::Handshake) };
        connection.greeting = greeting;
        Command::Ready(Ready { socket_type: ours }).encode(&mut connection.out);
        match connection.item().await? {
            Item::Command(Command::Ready(Ready { socket_type: theirs })) if ours.may_talk_to(theirs) => {}
            Item::Command(Command::Ready(Ready { socket_type: theirs })) => {
                Command::Error("Invalid socket type".to_owned()).encode(&mut connection.out);
                connection.flush().await?;
                return Err(Error::SocketType { ours, theirs });
            }
            Item::Command(Command::Error(reason)) => return Err(Error::Refused(reason)),
            _ => return Err(Error::Handshake),
        }
        connection.flush().await?;
        Ok(connection)
    }

    pub(crate) fn peer_addr(&self) -> Result<SocketAddr, Error> {
        Ok(self.stream.peer_addr()?)
    }

    /// Queues a subscription to messages that begin so.
    pub(crate) fn subscribe(&mut self, topic: &Bytes) {
        if self.greeting.subscribes_by_command() {
            Command::Subscribe(topic.clone()).encode(&mut self.out);
        } else {
            Message::from([[&[1], &topic[..]].concat().into()]).encode(&mut self.out);
        }
    }

    /// Queues a message of an envelope and a body, whatever waits already: see [`has_room`](Self::has_room).
    pub(crate) fn queue(&mut self, envelope: &[Bytes], body: &Message) {
        body.encode_after(envelope, &mut self.out);
    }

    /// Whether the peer takes what is sent fast enough to queue more.
    pub(crate) fn has_room(&self) -> bool {
        self.out.len() < ROOM_BYTES
    }

    /// Gives all that is queued to the kernel. Cancel-safe.
    pub(crate) async fn flush(&mut self) -> Result<(), Error> {
        Ok(poll_fn(|cx| self.poll_flush(cx)).await?)
    }

    /// What happens next; meanwhile sends what is queued and answers heartbeats. Cancel-safe.
    pub(crate) async fn turn(&mut self) -> Result<Turn, Error> {
        loop {
            match poll_fn(|cx| self.poll_step(cx)).await? {
                Step::Flushed => return Ok(Turn::Flushed),
                Step::Item(Item::Message(message)) => return Ok(Turn::Message(message)),
                Step::Item(Item::Command(command)) => match command {
                    Command::Ping { context, .. } => Command::Pong(context).encode(&mut self.out),
                    Command::Subscribe(topic) => return Ok(Turn::Subscription(true, topic)),
                    Command::Cancel(topic) => return Ok(Turn::Subscription(false, topic)),
                    Command::Error(reason) => return Err(Error::Refused(reason)),
                    Command::Ready(_) | Command::Pong(_) | Command::Unknown => {}
                },
                Step::Item(Item::Greeting(_)) => return Err(Error::Handshake),
            }
        }
    }

    /// The next message; anything else is dealt with or ignored. Cancel-safe.
    pub(crate) async fn message(&mut self) -> Result<Message, Error> {
        loop {
            if let Turn::Message(message) = self.turn().await? {
                return Ok(message);
            }
        }
    }

    async fn item(&mut self) -> Result<Item, Error> {
        loop {
            if let Step::Item(item) = poll_fn(|cx| self.poll_step(cx)).await? {
                return Ok(item);
            }
        }
    }

    /// Reads first: a peer that is always ready to receive must be heard too. A peer that sends without receiving is not read any
    /// further once its answers fill the queue.
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Result<Step, Error>> {
        while self.has_room() {
            if let Some(item) = self.decoder.decode()? {
                return Poll::Ready(Ok(Step::Item(item)));
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
        Poll::Ready(Ok(Step::Flushed))
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            let buffer = self.decoder.buffer();
            if buffer.capacity() - buffer.len() < LEAST_READ_BYTES {
                buffer.reserve(READ_BYTES);
            }
            match self.stream.try_read_buf(buffer) {
                Ok(0) => return Poll::Ready(Err(Error::Closed)),
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

async fn within(
    limit: Duration,
    dialed: impl Future<Output = Result<Connection, Error>>,
) -> Result<Connection, Error> {
    timeout(limit, dialed).await.unwrap_or(Err(Error::Timeout(limit)))
}

fn configure(stream: &TcpStream, options: &TcpOptions) -> io::Result<()> {
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new()
        .with_time(options.keepalive_idle)
        .with_interval(options.keepalive_interval)
        .with_retries(options.keepalive_probes);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(options.user_timeout))?;
    socket.set_tcp_nodelay(true)
}
