//! The sockets against raw bytes: cases that libzmq cannot produce on demand.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use moongate_zmtp::codec::{
    DecodedItem, ReadyCommand, ZmtpCommand, ZmtpDecoder, ZmtpGreeting, ZmtpLimits, ZmtpProtocolError,
    ZmtpSocketType,
};
use moongate_zmtp::{
    SubscriberEvent, ZmtpEndpoint, ZmtpError, ZmtpMessage, ZmtpOptions, ZmtpPublisher, ZmtpSubscriber,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Exceeded only when a test hangs.
const LIMIT: Duration = Duration::from_secs(60);

fn any() -> ZmtpEndpoint {
    "tcp://127.0.0.1:*".parse().unwrap()
}

/// A peer that sends and receives raw ZMTP bytes.
struct RawZmtpPeer {
    stream: TcpStream,
    decoder: ZmtpDecoder,
}

impl RawZmtpPeer {
    async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        Self { stream, decoder: ZmtpDecoder::new(ZmtpLimits::default()) }
    }

    async fn greet(address: SocketAddr, minor: u8, socket_type: ZmtpSocketType) -> Self {
        let mut raw = Self::connect(address).await;
        let mut greeting = ZmtpGreeting::encode();
        greeting[11] = minor;
        raw.send(&greeting).await;
        raw.command(ZmtpCommand::Ready(ReadyCommand { socket_type })).await;
        assert!(matches!(raw.item().await, DecodedItem::Greeting(_)));
        assert!(matches!(raw.item().await, DecodedItem::Command(ZmtpCommand::Ready(_))));
        raw
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    async fn command(&mut self, command: ZmtpCommand) {
        let mut out = BytesMut::new();
        command.encode(&mut out);
        self.send(&out).await;
    }

    async fn item(&mut self) -> DecodedItem {
        loop {
            if let Some(item) = self.decoder.decode().unwrap() {
                return item;
            }
            let read = self.stream.read_buf(self.decoder.buffer());
            assert_ne!(tokio::time::timeout(LIMIT, read).await.unwrap().unwrap(), 0, "closed");
        }
    }
}

async fn subscriber(options: ZmtpOptions) -> (ZmtpSubscriber, SocketAddr) {
    let topics = vec![Bytes::from("a"), Bytes::from("b")];
    let subscriber = ZmtpSubscriber::bind(&any(), topics, options).await.unwrap();
    let address = subscriber.local_addr().unwrap();
    (subscriber, address)
}

/// Waits for the next event while the peer's future runs.
async fn recv_while<T>(
    subscriber: &mut ZmtpSubscriber,
    peer: impl Future<Output = T>,
) -> (SubscriberEvent, T) {
    tokio::time::timeout(LIMIT, async { tokio::join!(subscriber.recv(), peer) }).await.unwrap()
}

#[tokio::test]
async fn subscriptions_are_commands_for_3_1_and_messages_for_3_0() {
    let (mut subscriber, address) = subscriber(ZmtpOptions::default()).await;
    let (event, mut new) =
        recv_while(&mut subscriber, RawZmtpPeer::greet(address, 1, ZmtpSocketType::Pub)).await;
    assert!(matches!(event, SubscriberEvent::Connected(_)), "{event:?}");
    assert_eq!(new.item().await, DecodedItem::Command(ZmtpCommand::Subscribe(Bytes::from("a"))));
    assert_eq!(new.item().await, DecodedItem::Command(ZmtpCommand::Subscribe(Bytes::from("b"))));
    let (event, mut old) =
        recv_while(&mut subscriber, RawZmtpPeer::greet(address, 0, ZmtpSocketType::XPub)).await;
    assert!(matches!(event, SubscriberEvent::Connected(_)), "{event:?}");
    assert_eq!(old.item().await, DecodedItem::Message([Bytes::from("\x01a")].into()));
    assert_eq!(old.item().await, DecodedItem::Message([Bytes::from("\x01b")].into()));
}

#[tokio::test]
async fn pings_are_answered_while_waiting_for_messages() {
    let (mut subscriber, address) = subscriber(ZmtpOptions::default()).await;
    let (_, mut peer) =
        recv_while(&mut subscriber, RawZmtpPeer::greet(address, 1, ZmtpSocketType::Pub)).await;
    let beat = async {
        let context = Bytes::from("0123456789abcdef");
        peer.command(ZmtpCommand::Ping { ttl: 10, context: context.clone() }).await;
        let reply = loop {
            match peer.item().await {
                DecodedItem::Command(ZmtpCommand::Subscribe(_)) => {}
                item => break item,
            }
        };
        assert_eq!(reply, DecodedItem::Command(ZmtpCommand::Pong(context)));
        peer.send(b"\0\x01a").await;
    };
    let (event, ()) = recv_while(&mut subscriber, beat).await;
    assert!(matches!(&event, SubscriberEvent::Message(_, message) if message.parts() == ["a"]), "{event:?}");
}

#[tokio::test]
async fn incompatible_peers_are_rejected() {
    let (mut subscriber, address) = subscriber(ZmtpOptions::default()).await;
    let http = async {
        let mut raw = RawZmtpPeer::connect(address).await;
        raw.send(b"GET / HTTP/1.1\r\n\r\n").await;
        raw
    };
    let (event, _raw) = recv_while(&mut subscriber, http).await;
    let not_zmtp =
        matches!(event, SubscriberEvent::Failed(Some(_), ZmtpError::Protocol(ZmtpProtocolError::NotZmtp)));
    assert!(not_zmtp, "{event:?}");

    let (event, mut raw) =
        recv_while(&mut subscriber, RawZmtpPeer::greet(address, 1, ZmtpSocketType::Dealer)).await;
    let theirs = ZmtpSocketType::Dealer;
    assert!(
        matches!(event, SubscriberEvent::Failed(_, ZmtpError::SocketType { theirs: t, .. }) if t == theirs),
        "{event:?}"
    );
    assert!(matches!(raw.item().await, DecodedItem::Command(ZmtpCommand::Error(_))));
}

#[tokio::test]
async fn a_message_above_the_limit_ends_the_connection() {
    let limits = ZmtpLimits { message_bytes: 10, ..ZmtpLimits::default() };
    let (mut subscriber, address) = subscriber(ZmtpOptions { limits, ..ZmtpOptions::default() }).await;
    let (_, mut peer) =
        recv_while(&mut subscriber, RawZmtpPeer::greet(address, 1, ZmtpSocketType::Pub)).await;
    let (event, ()) = recv_while(&mut subscriber, peer.send(b"\0\x0b")).await;
    let SubscriberEvent::Disconnected(
        _,
        ZmtpError::Protocol(ZmtpProtocolError::TooLong { length: 11, left: 10 }),
    ) = event
    else {
        panic!("{event:?}")
    };
}

#[tokio::test]
async fn peers_beyond_the_limit_wait_for_a_slot() {
    let (mut subscriber, address) = subscriber(ZmtpOptions { max_peers: 1, ..ZmtpOptions::default() }).await;
    let (_, first) = recv_while(&mut subscriber, RawZmtpPeer::greet(address, 1, ZmtpSocketType::Pub)).await;
    let second = RawZmtpPeer::greet(address, 1, ZmtpSocketType::Pub);
    let events = async {
        drop(first);
        let disconnected = subscriber.recv().await;
        assert!(matches!(disconnected, SubscriberEvent::Disconnected(..)), "{disconnected:?}");
        subscriber.recv().await
    };
    let (event, _second) = tokio::time::timeout(LIMIT, async { tokio::join!(events, second) }).await.unwrap();
    assert!(matches!(event, SubscriberEvent::Connected(_)), "{event:?}");
}

#[tokio::test]
async fn a_slow_subscriber_drops_messages_without_delaying_others() {
    let options = ZmtpOptions { publish_queue: 16, ..ZmtpOptions::default() };
    let (publisher, server) = ZmtpPublisher::bind(&any(), options).await.unwrap();
    let address = server.local_addr();
    let body = Bytes::from(vec![7; 100_000]);
    let exchange = async {
        // ZMTP 3.0, to test subscriptions sent as messages.
        let mut slow = RawZmtpPeer::greet(address, 0, ZmtpSocketType::Sub).await;
        slow.send(b"\0\x01\x01").await;
        let mut fast = ZmtpSubscriber::connect(address.into(), vec![Bytes::new()], ZmtpOptions::default());
        assert!(matches!(fast.recv().await, SubscriberEvent::Connected(_)));
        let mut tick = tokio::time::interval(Duration::from_millis(5));
        while publisher.stats().subscriptions != 2 {
            tick.tick().await;
        }
        let mut n = 0_u64;
        // More than any socket buffer holds, then until a drop is counted.
        while n < 400 || publisher.stats().dropped == 0 {
            publisher.publish([Bytes::copy_from_slice(&n.to_be_bytes()), body.clone()].into());
            let SubscriberEvent::Message(_, message) = fast.recv().await else {
                panic!("the fast subscriber disconnected")
            };
            assert_eq!(message.parts()[0][..], n.to_be_bytes());
            n += 1;
        }
        drop(slow);
        while publisher.stats().subscribers != 1 {
            publisher.publish(ZmtpMessage::new(Vec::new()));
            tick.tick().await;
        }
    };
    tokio::select! {
        () = server.run() => {}
        done = tokio::time::timeout(LIMIT, exchange) => done.unwrap(),
    }
}
