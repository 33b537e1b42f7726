//! The sockets against bytes written here: what libzmq does not do on demand.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use moongate_zmtp::codec::{Command, Decoder, Greeting, Item, Limits, ProtocolError, Ready, SocketType};
use moongate_zmtp::{Endpoint, Error, Event, Message, Options, Publisher, Subscriber};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Only says when a test hangs.
const LIMIT: Duration = Duration::from_secs(60);

fn any() -> Endpoint {
    "tcp://127.0.0.1:*".parse().unwrap()
}

/// A peer that speaks ZMTP byte by byte.
struct Raw {
    stream: TcpStream,
    decoder: Decoder,
}

impl Raw {
    async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        Self { stream, decoder: Decoder::new(Limits::default()) }
    }

    async fn greet(address: SocketAddr, minor: u8, socket_type: SocketType) -> Self {
        let mut raw = Self::connect(address).await;
        let mut greeting = Greeting::encode();
        greeting[11] = minor;
        raw.send(&greeting).await;
        raw.command(Command::Ready(Ready { socket_type })).await;
        assert!(matches!(raw.item().await, Item::Greeting(_)));
        assert!(matches!(raw.item().await, Item::Command(Command::Ready(_))));
        raw
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    async fn command(&mut self, command: Command) {
        let mut out = BytesMut::new();
        command.encode(&mut out);
        self.send(&out).await;
    }

    async fn item(&mut self) -> Item {
        loop {
            if let Some(item) = self.decoder.decode().unwrap() {
                return item;
            }
            let read = self.stream.read_buf(self.decoder.buffer());
            assert_ne!(tokio::time::timeout(LIMIT, read).await.unwrap().unwrap(), 0, "closed");
        }
    }
}

async fn subscriber(options: Options) -> (Subscriber, SocketAddr) {
    let topics = vec![Bytes::from("a"), Bytes::from("b")];
    let subscriber = Subscriber::bind(&any(), topics, options).await.unwrap();
    let address = subscriber.local_addr().unwrap();
    (subscriber, address)
}

/// The next event while a peer does what it does.
async fn meanwhile<T>(subscriber: &mut Subscriber, peer: impl Future<Output = T>) -> (Event, T) {
    tokio::time::timeout(LIMIT, async { tokio::join!(subscriber.recv(), peer) }).await.unwrap()
}

#[tokio::test]
async fn subscriptions_are_commands_for_3_1_and_messages_for_3_0() {
    let (mut subscriber, address) = subscriber(Options::default()).await;
    let (event, mut new) = meanwhile(&mut subscriber, Raw::greet(address, 1, SocketType::Pub)).await;
    assert!(matches!(event, Event::Connected(_)), "{event:?}");
    assert_eq!(new.item().await, Item::Command(Command::Subscribe(Bytes::from("a"))));
    assert_eq!(new.item().await, Item::Command(Command::Subscribe(Bytes::from("b"))));
    let (event, mut old) = meanwhile(&mut subscriber, Raw::greet(address, 0, SocketType::XPub)).await;
    assert!(matches!(event, Event::Connected(_)), "{event:?}");
    assert_eq!(old.item().await, Item::Message([Bytes::from("\x01a")].into()));
    assert_eq!(old.item().await, Item::Message([Bytes::from("\x01b")].into()));
}

#[tokio::test]
async fn heartbeats_are_answered_while_messages_are_awaited() {
    let (mut subscriber, address) = subscriber(Options::default()).await;
    let (_, mut peer) = meanwhile(&mut subscriber, Raw::greet(address, 1, SocketType::Pub)).await;
    let beat = async {
        let context = Bytes::from("0123456789abcdef");
        peer.command(Command::Ping { ttl: 10, context: context.clone() }).await;
        let answer = loop {
            match peer.item().await {
                Item::Command(Command::Subscribe(_)) => {}
                item => break item,
            }
        };
        assert_eq!(answer, Item::Command(Command::Pong(context)));
        peer.send(b"\0\x01a").await;
    };
    let (event, ()) = meanwhile(&mut subscriber, beat).await;
    assert!(matches!(&event, Event::Message(_, message) if message.parts() == ["a"]), "{event:?}");
}

#[tokio::test]
async fn peers_that_do_not_fit_are_refused() {
    let (mut subscriber, address) = subscriber(Options::default()).await;
    let http = async {
        let mut raw = Raw::connect(address).await;
        raw.send(b"GET / HTTP/1.1\r\n\r\n").await;
        raw
    };
    let (event, _raw) = meanwhile(&mut subscriber, http).await;
    let not_zmtp = matches!(event, Event::Failed(Some(_), Error::Protocol(ProtocolError::NotZmtp)));
    assert!(not_zmtp, "{event:?}");

    let (event, mut raw) = meanwhile(&mut subscriber, Raw::greet(address, 1, SocketType::Dealer)).await;
    let theirs = SocketType::Dealer;
    assert!(
        matches!(event, Event::Failed(_, Error::SocketType { theirs: t, .. }) if t == theirs),
        "{event:?}"
    );
    assert!(matches!(raw.item().await, Item::Command(Command::Error(_))));
}

#[tokio::test]
async fn a_message_above_the_limit_ends_the_connection() {
    let limits = Limits { message_bytes: 10, ..Limits::default() };
    let (mut subscriber, address) = subscriber(Options { limits, ..Options::default() }).await;
    let (_, mut peer) = meanwhile(&mut subscriber, Raw::greet(address, 1, SocketType::Pub)).await;
    let (event, ()) = meanwhile(&mut subscriber, peer.send(b"\0\x0b")).await;
    let Event::Disconnected(_, Error::Protocol(ProtocolError::TooLong { length: 11, left: 10 })) = event
    else {
        panic!("{event:?}")
    };
}

#[tokio::test]
async fn peers_beyond_the_limit_wait_for_a_place() {
    let (mut subscriber, address) = subscriber(Options { peers: 1, ..Options::default() }).await;
    let (_, first) = meanwhile(&mut subscriber, Raw::greet(address, 1, SocketType::Pub)).await;
    let second = Raw::greet(address, 1, SocketType::Pub);
    let events = async {
        drop(first);
        let gone = subscriber.recv().await;
        assert!(matches!(gone, Event::Disconnected(..)), "{gone:?}");
        subscriber.recv().await
    };
    let (event, _second) = tokio::time::timeout(LIMIT, async { tokio::join!(events, second) }).await.unwrap();
    assert!(matches!(event, Event::Connected(_)), "{event:?}");
}

#[tokio::test]
async fn a_slow_subscriber_loses_counted_messages_and_hinders_nobody() {
    let options = Options { publish_queue: 16, ..Options::default() };
    let (publisher, server) = Publisher::bind(&any(), options).await.unwrap();
    let address = server.local_addr();
    let body = Bytes::from(vec![7; 100_000]);
    let exchange = async {
        // ZMTP 3.0, so that subscriptions as messages are tried too.
        let mut slow = Raw::greet(address, 0, SocketType::Sub).await;
        slow.send(b"\0\x01\x01").await;
        let mut fast = Subscriber::connect(address.into(), vec![Bytes::new()], Options::default());
        assert!(matches!(fast.recv().await, Event::Connected(_)));
        let mut tick = tokio::time::interval(Duration::from_millis(5));
        while publisher.stats().subscriptions != 2 {
            tick.tick().await;
        }
        let mut n = 0_u64;
        // More than any socket buffer holds, then until the loss shows.
        while n < 400 || publisher.stats().lost == 0 {
            publisher.publish([Bytes::copy_from_slice(&n.to_be_bytes()), body.clone()].into());
            let Event::Message(_, message) = fast.recv().await else { panic!("the fast one has gone") };
            assert_eq!(message.parts()[0][..], n.to_be_bytes());
            n += 1;
        }
        drop(slow);
        while publisher.stats().subscribers != 1 {
            publisher.publish(Message::new(Vec::new()));
            tick.tick().await;
        }
    };
    tokio::select! {
        () = server.run() => {}
        done = tokio::time::timeout(LIMIT, exchange) => done.unwrap(),
    }
}
