//! Which gateway leads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::super::admission_queue::AdmissionQueue;
use super::follower::follow;
use super::peers::{QueuePeer, QueuePeers};
use crate::feedback::SharedQueueMetrics;
use crate::routed_request::random_uuid;

/// Pause between two queries of all peers.
const ELECTION_INTERVAL: Duration = Duration::from_millis(500);

/// A gateway of a shared queue. The least of them leads: the one that has run longest, so that a new one changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct QueueIdentity {
    /// Whether it shuts down; it does not lead then.
    pub(crate) draining: bool,
    /// Start of the process, in milliseconds since 1970. Clocks need not agree: the order is the same for all.
    pub(crate) started_ms: u64,
    /// Random, to find oneself among the peers.
    pub(crate) id: String,
}

impl QueueIdentity {
    /// The identity of this process.
    pub(crate) fn new() -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            draining: false,
            started_ms: u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
            id: random_uuid(),
        }
    }
}

/// The leader among the gateways that answered; `None` if that is this one.
fn elect(own: &QueueIdentity, peers: Vec<QueuePeer>) -> Option<QueuePeer> {
    let others = peers.into_iter().filter(|peer| peer.identity.id != own.id && !peer.identity.draining);
    // One gateway may be reachable under several addresses.
    others
        .min_by(|a, b| (&a.identity, a.address).cmp(&(&b.identity, b.address)))
        .filter(|peer| peer.identity < *own)
}

/// Follows the leader while it is another gateway, until `stop`.
pub(crate) async fn run_election(
    queue: Arc<AdmissionQueue>,
    peers: QueuePeers,
    own: QueueIdentity,
    metrics: SharedQueueMetrics,
    stop: CancellationToken,
) {
    let mut reported = BTreeMap::new();
    // A connection that fails in the same way again is not logged again.
    let mut latest_failure: Option<String> = None;
    while !stop.is_cancelled() {
        let (answered, problems) = peers.query().await;
        report_changes(&mut reported, problems);
        if let Some(leader) = elect(&own, answered) {
            let connected = || metrics.set_follows(true);
            let elected = || async { elect(&own, peers.query().await.0) };
            let reason = follow(&queue, &peers, &leader, connected, elected, &stop).await;
            metrics.set_follows(false);
            let (peer, text) = (leader.address, reason.to_string());
            if reason.is_intended() {
                tracing::info!(leader = %peer, reason = text, "this gateway decides its requests");
            } else if reason.is_over() || latest_failure.as_deref() != Some(&*text) {
                tracing::warn!(leader = %peer, reason = text, "this gateway decides its requests");
            }
            latest_failure = Some(text);
            if reason.is_over() {
                // The next leader is elected at once.
                continue;
            }
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(ELECTION_INTERVAL) => {}
        }
    }
}

/// Logs why peers do not answer, once for each change.
fn report_changes(reported: &mut BTreeMap<String, String>, problems: BTreeMap<String, String>) {
    for (peer, problem) in &problems {
        if reported.get(peer) != Some(problem) {
            tracing::warn!(%peer, %problem, "a gateway of the shared queue does not answer");
        }
    }
    for peer in reported.keys().filter(|peer| !problems.contains_key(*peer)) {
        tracing::info!(%peer, "a gateway of the shared queue answers again, or is no longer listed");
    }
    *reported = problems;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(id: u16, started_ms: u64, draining: bool) -> QueueIdentity {
        QueueIdentity { draining, started_ms, id: id.to_string() }
    }

    fn peer(id: u16, started_ms: u64, draining: bool) -> QueuePeer {
        let address = ([127, 0, 0, 1], id).into();
        QueuePeer { address, identity: identity(id, started_ms, draining), url: String::new() }
    }

    #[test]
    fn oldest_gateway_that_does_not_drain_leads() {
        let own = identity(2, 20, false);
        let leader = |peers: Vec<QueuePeer>| elect(&own, peers).map(|peer| peer.address.port());
        assert_eq!(leader(vec![]), None);
        assert_eq!(leader(vec![peer(2, 20, false), peer(3, 30, false)]), None);
        assert_eq!(leader(vec![peer(3, 15, false), peer(1, 10, false), peer(2, 20, false)]), Some(1));
        assert_eq!(leader(vec![peer(3, 15, false), peer(1, 10, true)]), Some(3));
        assert_eq!(leader(vec![peer(1, 20, false)]), Some(1));
    }
}
