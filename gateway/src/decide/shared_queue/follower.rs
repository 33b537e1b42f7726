//! The connection to the gateway that leads.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use http::header::CONTENT_TYPE;
use tokio::sync::mpsc;
use tokio::time::{Instant, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::super::admission_queue::AdmissionQueue;
use super::super::admission_state::LeaderLink;
use super::lines::{LineReader, line};
use super::messages::{LeaderMessage, TicketMessage};
use super::peers::{QueuePeer, QueuePeers};

/// Longest silence of a connected gateway. It sends a sign of life four times as often.
pub(super) const SILENCE_LIMIT: Duration = Duration::from_secs(1);
/// Pause after which a gateway without messages sends a sign of life.
pub(super) const ALIVE_INTERVAL: Duration = Duration::from_millis(250);
/// Messages that wait to be sent; with more, the connection is too slow to be of use.
const MAX_WAITING_MESSAGES: usize = 16_384;
/// Pause between two checks whether another gateway leads.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Why a gateway stopped following another one.
#[derive(Debug)]
pub(super) enum FollowEnd {
    Stopped,
    AnotherLeads,
    Unreachable(reqwest::Error),
    Unanswered,
    Silent,
    Closed,
    Malformed(super::lines::LineError),
    TooSlow,
}

impl FollowEnd {
    /// Whether nothing has failed.
    pub(super) fn is_intended(&self) -> bool {
        matches!(self, Self::Stopped | Self::AnotherLeads)
    }

    /// Whether the leader was reached and is gone, or another one leads. Otherwise a new attempt would fail in the same way.
    pub(super) fn is_over(&self) -> bool {
        matches!(self, Self::Stopped | Self::AnotherLeads | Self::Silent | Self::Closed)
    }
}

impl fmt::Display for FollowEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopped => f.write_str("this gateway stops"),
            Self::AnotherLeads => f.write_str("another gateway leads now"),
            Self::Unreachable(error) => write!(f, "cannot connect: {error}"),
            Self::Unanswered => write!(f, "no response to the connection for {SILENCE_LIMIT:?}"),
            Self::Silent => write!(f, "no message for {SILENCE_LIMIT:?}"),
            Self::Closed => f.write_str("it closed the connection"),
            Self::Malformed(error) => write!(f, "it sent an invalid message: {error}"),
            Self::TooSlow => write!(f, "{MAX_WAITING_MESSAGES} messages wait to be sent"),
        }
    }
}

/// Sends this gateway's requests to `leader` until the connection fails, or `elect` returns another one. Calls `connected` once they
/// are decided there.
pub(super) async fn follow<F: Future<Output = Option<QueuePeer>>>(
    queue: &Arc<AdmissionQueue>,
    peers: &QueuePeers,
    leader: &QueuePeer,
    connected: impl FnOnce(),
    elect: impl Fn() -> F,
    stop: &CancellationToken,
) -> FollowEnd {
    let (messages, receiver) = mpsc::channel(MAX_WAITING_MESSAGES);
    let request = peers
        .connect(leader)
        .header(CONTENT_TYPE, "application/x-ndjson")
        .body(reqwest::Body::wrap_stream(outgoing(receiver)));
    let response = match timeout(SILENCE_LIMIT, request.send()).await {
        Err(_) => return FollowEnd::Unanswered,
        Ok(response) => match response.and_then(reqwest::Response::error_for_status) {
            Err(error) => return FollowEnd::Unreachable(error),
            Ok(response) => response,
        },
    };
    let closing = CancellationToken::new();
    queue.set_leader(Some(LeaderLink { messages, closing: closing.clone() }));
    connected();
    tracing::info!(leader = %leader.address, "another gateway decides this one's requests");
    let changed = async {
        let mut checks = interval(CHECK_INTERVAL);
        checks.tick().await;
        loop {
            checks.tick().await;
            if elect().await.is_some_and(|elected| elected.identity.id != leader.identity.id) {
                return;
            }
        }
    };
    let reason = tokio::select! {
        () = stop.cancelled() => FollowEnd::Stopped,
        () = closing.cancelled() => FollowEnd::TooSlow,
        () = changed => FollowEnd::AnotherLeads,
        reason = receive(queue, Box::pin(response.bytes_stream())) => reason,
    };
    queue.set_leader(None);
    reason
}

/// The body of the request: messages, and signs of life.
fn outgoing(receiver: mpsc::Receiver<TicketMessage>) -> impl Stream<Item = Result<Bytes, Infallible>> {
    stream::unfold(receiver, |mut receiver| async move {
        let message = match timeout(ALIVE_INTERVAL, receiver.recv()).await {
            Err(_) => TicketMessage::Alive,
            Ok(message) => message?,
        };
        Some((Ok(line(&message)), receiver))
    })
}

async fn receive(
    queue: &Arc<AdmissionQueue>,
    mut response: impl Stream<Item = Result<Bytes, reqwest::Error>> + Unpin,
) -> FollowEnd {
    let mut lines = LineReader::default();
    let mut latest = Instant::now();
    loop {
        let received = match tokio::time::timeout_at(latest + SILENCE_LIMIT, response.next()).await {
            Err(_) => return FollowEnd::Silent,
            Ok(None) => return FollowEnd::Closed,
            Ok(Some(Err(error))) => return FollowEnd::Unreachable(error),
            Ok(Some(Ok(bytes))) => lines.push::<LeaderMessage>(&bytes),
        };
        latest = Instant::now();
        match received {
            Ok(messages) => messages.into_iter().for_each(|message| queue.receive_decision(message)),
            Err(error) => return FollowEnd::Malformed(error),
        }
    }
}
