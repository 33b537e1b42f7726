//! Connections to fake nodes that are implemented from the protocol's specification.

use std::time::Duration;

use bytes::BufMut as _;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use moongate_runtime::{BackoffPolicy, Supervisor};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::connection::{NodeConnectionEvent, UnwatchableNodeError, events};
use super::descriptor::{DescriptorLookup, MetadataSource};
use super::{NodeLossReason, NodeWatchOptions};

/// Generous, because it only detects tests that hang.
const LIMIT: Duration = Duration::from_secs(30);

fn watch(endpoint: &str) -> BoxStream<'static, NodeConnectionEvent> {
    let retry = BackoffPolicy { initial: Duration::from_millis(1), max: Duration::from_millis(10) };
    let lookup = DescriptorLookup::new(MetadataSource::Handshake, reqwest::Client::new(), None);
    events(endpoint.to_owned(), lookup, &NodeWatchOptions { retry, ..NodeWatchOptions::default() })
}

async fn next(events: &mut BoxStream<'static, NodeConnectionEvent>) -> Option<NodeConnectionEvent> {
    tokio::time::timeout(LIMIT, events.next()).await.unwrap()
}

async fn connected(events: &mut BoxStream<'static, NodeConnectionEvent>) {
    let event = next(events).await;
    assert!(matches!(event, Some(NodeConnectionEvent::Connected)), "{event:?}");
}

/// Responds to handshakes on `listener` with `descriptor`.
fn serve_handshakes(supervisor: &Supervisor, listener: TcpListener, descriptor: String) {
    supervisor.spawn("handshakes", async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let size = stream.read_u64_le().await.unwrap();
            let mut request = vec![0; usize::try_from(size).unwrap()];
            stream.read_exact(&mut request).await.unwrap();
            assert_eq!(request, b"\x01{}");
            let mut response = Vec::new();
            response.put_u64_le(descriptor.len() as u64 + 1);
            response.put_u8(1);
            response.put_slice(descriptor.as_bytes());
            stream.write_all(&response).await.unwrap();
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

/// Accepts connections and sends nothing. Cancelling the returned token closes them and the listener.
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
async fn connection_ends_with_its_node_and_is_reopened() {
    let supervisor = Supervisor::new();
    let ((handshakes, endpoint), (transfers, address)) = (listener().await, listener().await);
    serve_handshakes(&supervisor, handshakes, descriptor(&transfers));
    let end = accept(&supervisor, transfers);
    let mut events = watch(&endpoint);
    connected(&mut events).await;
    end.cancel();
    let event = next(&mut events).await;
    assert!(
        matches!(event, Some(NodeConnectionEvent::Closed(NodeLossReason::Unreachable { .. }))),
        "{event:?}"
    );
    let restarted = TcpListener::bind(&address).await.unwrap();
    accept(&supervisor, restarted);
    connected(&mut events).await;
}

#[tokio::test]
async fn successor_on_the_same_endpoint_reports_replaced() {
    let supervisor = Supervisor::new();
    let ((handshakes, endpoint), (transfers, _)) = (listener().await, listener().await);
    let first = Supervisor::new();
    serve_handshakes(&first, handshakes, descriptor(&transfers));
    let end = accept(&supervisor, transfers);
    let mut events = watch(&endpoint);
    connected(&mut events).await;
    // The successor listens before the first process ends.
    let _ = first.shutdown(Duration::ZERO).await;
    let (successor, _) = listener().await;
    serve_handshakes(&supervisor, TcpListener::bind(&endpoint).await.unwrap(), descriptor(&successor));
    accept(&supervisor, successor);
    end.cancel();
    let event = next(&mut events).await;
    assert!(matches!(event, Some(NodeConnectionEvent::Closed(NodeLossReason::Replaced))), "{event:?}");
    connected(&mut events).await;
}

#[tokio::test]
async fn rdma_only_and_closing_nodes_are_unwatchable() {
    let supervisor = Supervisor::new();
    let (handshakes, endpoint) = listener().await;
    serve_handshakes(&supervisor, handshakes, r#"{"protocol":"rdma","devices":[]}"#.to_owned());
    let mut rdma = watch(&endpoint);
    let event = next(&mut rdma).await;
    assert!(
        matches!(event, Some(NodeConnectionEvent::Unwatchable(UnwatchableNodeError::NoPort(_)))),
        "{event:?}"
    );
    assert!(next(&mut rdma).await.is_none());

    let ((handshakes, endpoint), (transfers, _)) = (listener().await, listener().await);
    serve_handshakes(&supervisor, handshakes, descriptor(&transfers));
    supervisor.spawn("closes at once", async move {
        loop {
            let _ = transfers.accept().await.unwrap();
        }
    });
    let mut closing = watch(&endpoint);
    connected(&mut closing).await;
    let event = next(&mut closing).await;
    assert!(
        matches!(event, Some(NodeConnectionEvent::Unwatchable(UnwatchableNodeError::ClosesIdle(_)))),
        "{event:?}"
    );
}
