//! Lines to nodes that are written from the protocol.

use std::time::Duration;

use bytes::BufMut as _;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use moongate_runtime::Supervisor;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::connection::{NodeConnectionEvent, events};
use super::descriptor::{DescriptorLookup, MetadataSource};
use super::{NodeLossReason, NodeWatchOptions};
use crate::backoff::BackoffPolicy;

/// Long, because it only says when a test hangs.
const LIMIT: Duration = Duration::from_secs(30);

fn line(endpoint: &str) -> BoxStream<'static, NodeConnectionEvent> {
    let retry = BackoffPolicy { initial: Duration::from_millis(1), max: Duration::from_millis(10) };
    let lookup = DescriptorLookup::new(MetadataSource::Handshake, reqwest::Client::new(), None);
    events(endpoint.to_owned(), lookup, &NodeWatchOptions { retry, ..NodeWatchOptions::default() })
}

async fn next(line: &mut BoxStream<'static, NodeConnectionEvent>) -> Option<NodeConnectionEvent> {
    tokio::time::timeout(LIMIT, line.next()).await.unwrap()
}

/// Answers handshakes on `listener` with `descriptor`.
fn shake_hands(supervisor: &Supervisor, listener: TcpListener, descriptor: String) {
    supervisor.spawn("handshakes", async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let size = stream.read_u64_le().await.unwrap();
            let mut asked = vec![0; usize::try_from(size).unwrap()];
            stream.read_exact(&mut asked).await.unwrap();
            assert_eq!(asked, b"\x01{}");
            let mut answer = Vec::new();
            answer.put_u64_le(descriptor.len() as u64 + 1);
            answer.put_u8(1);
            answer.put_slice(descriptor.as_bytes());
            stream.write_all(&answer).await.unwrap();
        }
    });
}

async fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address.to_string())
}

fn descriptor(transfers: &TcpListener) -> String {
    let port = transfers.local_addr().unwrap().port();
    format!(r#"{{"protocol":"tcp","tcp_data_port":{port},"buffers":[{{"addr":1,"length":2}}]}}"#)
}

/// Accepts transfers and is silent, until cancelled; then all is closed.
fn accept(supervisor: &Supervisor, transfers: TcpListener) -> CancellationToken {
    let end = CancellationToken::new();
    let ended = end.clone();
    supervisor.spawn("transfers", async move {
        let mut open = Vec::new();
        loop {
            tokio::select! {
                accepted = transfers.accept() => open.push(accepted.unwrap()),
                () = ended.cancelled() => return,
            }
        }
    });
    end
}

#[tokio::test]
async fn a_line_ends_with_its_node_and_comes_back_with_it() {
    let supervisor = Supervisor::new();
    let ((handshakes, endpoint), (transfers, address)) = (listener().await, listener().await);
    shake_hands(&supervisor, handshakes, descriptor(&transfers));
    let end = accept(&supervisor, transfers);
    let mut line = line(&endpoint);
    assert_eq!(next(&mut line).await, Some(NodeConnectionEvent::Connected));
    end.cancel();
    let event = next(&mut line).await;
    assert!(matches!(event, Some(NodeConnectionEvent::Closed(NodeLossReason::Unreachable(_)))), "{event:?}");
    let again = TcpListener::bind(&address).await.unwrap();
    accept(&supervisor, again);
    assert_eq!(next(&mut line).await, Some(NodeConnectionEvent::Connected));
}

#[tokio::test]
async fn another_process_on_the_same_endpoint_is_another_node() {
    let supervisor = Supervisor::new();
    let ((handshakes, endpoint), (transfers, _)) = (listener().await, listener().await);
    let first = Supervisor::new();
    shake_hands(&first, handshakes, descriptor(&transfers));
    let end = accept(&supervisor, transfers);
    let mut line = line(&endpoint);
    assert_eq!(next(&mut line).await, Some(NodeConnectionEvent::Connected));
    // Its successor listens before the first has gone.
    let _ = first.shutdown(Duration::ZERO).await;
    let (successor, _) = listener().await;
    shake_hands(&supervisor, TcpListener::bind(&endpoint).await.unwrap(), descriptor(&successor));
    accept(&supervisor, successor);
    end.cancel();
    assert_eq!(next(&mut line).await, Some(NodeConnectionEvent::Closed(NodeLossReason::Replaced)));
    assert_eq!(next(&mut line).await, Some(NodeConnectionEvent::Connected));
}

#[tokio::test]
async fn nodes_that_cannot_be_watched_are_left_alone() {
    let supervisor = Supervisor::new();
    let (handshakes, endpoint) = listener().await;
    shake_hands(&supervisor, handshakes, r#"{"protocol":"rdma","devices":[]}"#.to_owned());
    let mut rdma = line(&endpoint);
    let event = next(&mut rdma).await;
    assert!(
        matches!(&event, Some(NodeConnectionEvent::Unwatchable(why)) if why.contains("rdma")),
        "{event:?}"
    );
    assert_eq!(next(&mut rdma).await, None);

    let ((handshakes, endpoint), (transfers, _)) = (listener().await, listener().await);
    shake_hands(&supervisor, handshakes, descriptor(&transfers));
    supervisor.spawn("closes at once", async move {
        loop {
            let _ = transfers.accept().await.unwrap();
        }
    });
    let mut shy = line(&endpoint);
    assert_eq!(next(&mut shy).await, Some(NodeConnectionEvent::Connected));
    let event = next(&mut shy).await;
    assert!(
        matches!(&event, Some(NodeConnectionEvent::Unwatchable(why)) if why.contains("silent")),
        "{event:?}"
    );
}
