//! Interoperability with libzmq, in both directions.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use moongate_zmtp::{
    SubscriberEvent, ZmtpEndpoint, ZmtpMessage, ZmtpOptions, ZmtpPublisher, ZmtpResponder, ZmtpSubscriber,
    request,
};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// Timeout of the first pyzmq installation on a slow network.
const SETUP_LIMIT: Duration = Duration::from_secs(300);
/// Timeout of all other steps; exceeded only when a test hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// Number of messages that `peer.py` expects.
const COUNT: u64 = 1000;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libzmq")
}

/// Installs pyzmq if missing; returns its Python interpreter.
async fn python() -> PathBuf {
    let into = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("libzmq");
    let mut setup = Command::new(folder().join("setup"));
    let output = tokio::time::timeout(SETUP_LIMIT, setup.arg(&into).kill_on_drop(true).output()).await;
    let output = output.expect("tests/libzmq/setup ends in time").expect("tests/libzmq/setup can be run");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "tests/libzmq/setup failed; it needs python3 with venv:\n{text}");
    into.join("venv/bin/python")
}

/// A process with a libzmq socket, killed on drop.
struct LibzmqProcess {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl LibzmqProcess {
    async fn start(role: &str, endpoint: &str) -> Self {
        let mut command = Command::new(python().await);
        command.arg(folder().join("peer.py")).args([role, endpoint]);
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    async fn line(&mut self) -> String {
        let line = tokio::time::timeout(LIMIT, self.lines.next_line()).await;
        line.expect("a line from peer.py in time").unwrap().expect("peer.py failed")
    }

    async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }
}

async fn next(subscriber: &mut ZmtpSubscriber) -> SubscriberEvent {
    tokio::time::timeout(LIMIT, subscriber.recv()).await.expect("an event in time")
}

fn number(message: &ZmtpMessage) -> u64 {
    u64::from_be_bytes(message.parts()[1][..].try_into().unwrap())
}

/// Receives the next message, which must be one of `peer.py`'s.
async fn message(subscriber: &mut ZmtpSubscriber) -> u64 {
    let event = next(subscriber).await;
    let SubscriberEvent::Message(_, message) = event else { panic!("{event:?}") };
    let [topic, _, empty, body] = message.parts() else { panic!("{message:?}") };
    let n = number(&message);
    assert_eq!((&topic[..], empty.len()), (&b"topic"[..], 0));
    assert_eq!(body.len() as u64, n % 7 * 50_000);
    assert!(body.iter().all(|&byte| u64::from(byte) == n % 256));
    n
}

/// Receives 50 messages, which must be in order without a gap.
async fn expect_messages_in_order(subscriber: &mut ZmtpSubscriber) {
    let first = message(subscriber).await;
    for n in first + 1..first + 50 {
        assert_eq!(message(subscriber).await, n);
    }
}

async fn wait_until_connected(subscriber: &mut ZmtpSubscriber) -> moongate_zmtp::PublisherPeer {
    loop {
        match next(subscriber).await {
            SubscriberEvent::Connected(peer) => return peer,
            SubscriberEvent::Failed(..) => {}
            event => panic!("{event:?}"),
        }
    }
}

fn topics() -> Vec<Bytes> {
    vec![Bytes::from("topic")]
}

#[tokio::test]
async fn a_subscriber_reconnects_to_a_restarted_publisher() {
    let mut publisher = LibzmqProcess::start("pub_bind", "tcp://127.0.0.1:*").await;
    let endpoint = publisher.line().await;
    let mut subscriber = ZmtpSubscriber::connect(endpoint.parse().unwrap(), topics(), ZmtpOptions::default());
    let first = wait_until_connected(&mut subscriber).await;
    expect_messages_in_order(&mut subscriber).await;

    publisher.kill().await;
    loop {
        match next(&mut subscriber).await {
            SubscriberEvent::Message(..) => {}
            SubscriberEvent::Disconnected(peer, _) => break assert_eq!(peer, first),
            event => panic!("{event:?}"),
        }
    }
    let failed = next(&mut subscriber).await;
    assert!(matches!(failed, SubscriberEvent::Failed(None, _)), "{failed:?}");

    let _publisher = LibzmqProcess::start("pub_bind", &endpoint).await;
    let second = wait_until_connected(&mut subscriber).await;
    assert_ne!(second.id, first.id);
    expect_messages_in_order(&mut subscriber).await;
}

#[tokio::test]
async fn a_bound_subscriber_accepts_several_publishers() {
    let any: ZmtpEndpoint = "tcp://127.0.0.1:*".parse().unwrap();
    let mut subscriber = ZmtpSubscriber::bind(&any, topics(), ZmtpOptions::default()).await.unwrap();
    let endpoint = ZmtpEndpoint::from(subscriber.local_addr().unwrap()).to_string();
    let first_process = LibzmqProcess::start("pub_connect", &endpoint).await;
    let first = wait_until_connected(&mut subscriber).await;
    expect_messages_in_order(&mut subscriber).await;

    let _second_process = LibzmqProcess::start("pub_connect", &endpoint).await;
    let mut counts = [0, 0];
    let second = loop {
        match next(&mut subscriber).await {
            SubscriberEvent::Connected(peer) => break peer,
            event => {
                assert!(matches!(event, SubscriberEvent::Message(peer, _) if peer == first), "{event:?}");
            }
        }
    };
    while counts.contains(&0) {
        match next(&mut subscriber).await {
            SubscriberEvent::Message(peer, _) => counts[usize::from(peer == second)] += 1,
            event => panic!("{event:?}"),
        }
    }
    first_process.kill().await;
    loop {
        match next(&mut subscriber).await {
            SubscriberEvent::Message(..) => {}
            SubscriberEvent::Disconnected(peer, _) => break assert_eq!(peer, first),
            event => panic!("{event:?}"),
        }
    }
    expect_messages_in_order(&mut subscriber).await;
}

#[tokio::test]
async fn a_publisher_sends_to_a_libzmq_subscriber() {
    let any: ZmtpEndpoint = "tcp://127.0.0.1:*".parse().unwrap();
    let (publisher, server) = ZmtpPublisher::bind(&any, ZmtpOptions::default()).await.unwrap();
    let mut peer = LibzmqProcess::start("sub", &ZmtpEndpoint::from(server.local_addr()).to_string()).await;
    let published = async {
        let mut tick = tokio::time::interval(Duration::from_millis(5));
        // The peer cancels one of its two subscriptions; only then are both commands known to be processed.
        while publisher.stats().subscriptions != 1 {
            tick.tick().await;
        }
        for n in 0..COUNT {
            publisher.publish([Bytes::from("other"), Bytes::from("unwanted")].into());
            let body = "x".repeat(n as usize * 100);
            let number = Bytes::copy_from_slice(&n.to_be_bytes());
            publisher.publish([Bytes::from("topic"), number, Bytes::new(), body.into()].into());
        }
        peer.line().await
    };
    tokio::select! {
        () = server.run() => {}
        line = published => assert_eq!(line, format!("received {COUNT}")),
    }
    let stats = publisher.stats();
    assert_eq!((stats.sent, stats.dropped), (COUNT, 0));
}

#[tokio::test]
async fn a_replay_is_requested_from_a_libzmq_router() {
    let mut replay = LibzmqProcess::start("replay", "tcp://127.0.0.1:*").await;
    let endpoint = replay.line().await.parse().unwrap();
    for start in [0_u64, 7] {
        let body = ZmtpMessage::from([Bytes::copy_from_slice(&start.to_be_bytes())]);
        let mut replies = request(&endpoint, body, &ZmtpOptions::default()).await.unwrap();
        let mut next = async || tokio::time::timeout(LIMIT, replies.recv()).await.unwrap().unwrap();
        for n in start..10 {
            let reply = next().await;
            assert_eq!(number(&reply), n);
            assert_eq!(reply.parts()[2], format!("batch {n}"));
        }
        let end = next().await;
        // An empty topic looks like the end of an envelope; here it is the second of two empty parts.
        assert_eq!(end.parts()[end.parts().len() - 2..], [Bytes::copy_from_slice(&[0xff; 8]), Bytes::new()]);
    }
}

#[tokio::test]
async fn requests_of_libzmq_sockets_get_responses() {
    let any: ZmtpEndpoint = "tcp://127.0.0.1:*".parse().unwrap();
    let responder = ZmtpResponder::bind(&any, ZmtpOptions::default()).await.unwrap();
    let mut peer =
        LibzmqProcess::start("request", &ZmtpEndpoint::from(responder.local_addr()).to_string()).await;
    let served = responder.run(|request: ZmtpMessage| {
        let start = u64::from_be_bytes(request.parts()[0][..].try_into().unwrap());
        let number = |n: u64| Bytes::copy_from_slice(&n.to_be_bytes());
        let batches = (start..COUNT).map(move |n| [number(n), "x".repeat(n as usize * 100).into()].into());
        let end = ZmtpMessage::from([number(u64::MAX), Bytes::new()]);
        stream::iter(batches.chain([end]))
    });
    tokio::select! {
        () = served => {}
        line = peer.line() => assert_eq!(line, "all replies received"),
    }
}
