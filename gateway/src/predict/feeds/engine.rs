//! Follows what one engine publishes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_wire::events::EventFrames;
use moongate_zmtp::{
    SubscriberEvent, ZmtpEndpoint, ZmtpEndpointError, ZmtpMessage, ZmtpOptions, ZmtpSubscriber,
};
use tokio::time::timeout;

use super::apply::EngineEventApplier;
use crate::feedback::EventFeedMetrics;

/// Time for a replay to bring its next message.
const REPLAY_STEP_TIMEOUT: Duration = Duration::from_secs(2);

/// Where an engine publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EngineFeedSource {
    endpoint: ZmtpEndpoint,
    /// `false`: the engine connects to us.
    engine_binds: bool,
    replay: Option<ZmtpEndpoint>,
    topic: Bytes,
}

impl EngineFeedSource {
    pub(super) fn new(told: &moongate_discovery::KvEventSource) -> Result<Self, ZmtpEndpointError> {
        Ok(Self {
            endpoint: told.endpoint.parse()?,
            engine_binds: told.engine_binds,
            replay: told.replay.as_deref().map(str::parse).transpose()?,
            topic: Bytes::copy_from_slice(told.topic.as_bytes()),
        })
    }
}

/// One subscription, with what was heard so far.
#[derive(Debug)]
pub(super) struct EngineFeed {
    name: String,
    source: EngineFeedSource,
    applier: EngineEventApplier,
    metrics: Arc<EventFeedMetrics>,
    /// Sequence number of the next message; 0 before the first.
    next_sequence: u64,
    /// Connections open now.
    peers: i64,
    /// A connection is new, so a smaller sequence number means that the engine has restarted.
    newly_connected: bool,
}

impl EngineFeed {
    pub(super) fn new(
        name: String,
        source: EngineFeedSource,
        applier: EngineEventApplier,
        metrics: Arc<EventFeedMetrics>,
    ) -> Self {
        Self { name, source, applier, metrics, next_sequence: 0, peers: 0, newly_connected: true }
    }

    /// Runs until dropped.
    pub(super) async fn run(mut self) {
        let mut subscriber = self.subscribe().await;
        loop {
            match subscriber.recv().await {
                SubscriberEvent::Connected(_) => {
                    self.metrics.connected.inc();
                    self.peers += 1;
                    tracing::debug!(engine = self.name, "KV events: connected");
                    self.newly_connected = true;
                    self.catch_up().await;
                }
                SubscriberEvent::Message(_, message) => self.message(&message).await,
                SubscriberEvent::Disconnected(_, error) => {
                    self.metrics.connected.dec();
                    self.peers -= 1;
                    tracing::info!(engine = self.name, %error, "KV events: connection lost");
                }
                SubscriberEvent::Failed(_, error) => {
                    tracing::debug!(engine = self.name, %error, "KV events: no connection");
                }
            }
        }
    }

    async fn subscribe(&self) -> ZmtpSubscriber {
        let EngineFeedSource { endpoint, engine_binds, topic, .. } = &self.source;
        loop {
            if *engine_binds {
                return ZmtpSubscriber::connect(
                    endpoint.clone(),
                    vec![topic.clone()],
                    ZmtpOptions::default(),
                );
            }
            match ZmtpSubscriber::bind(endpoint, vec![topic.clone()], ZmtpOptions::default()).await {
                Ok(subscriber) => return subscriber,
                Err(error) => {
                    tracing::warn!(engine = self.name, %endpoint, %error,
                        "KV events: the engine connects to this address, but it cannot be listened on here; let the engine bind \
                         by an endpoint like tcp://*:5557");
                    tokio::time::sleep(REPLAY_STEP_TIMEOUT).await;
                }
            }
        }
    }

    async fn message(&mut self, message: &ZmtpMessage) {
        let Ok(frames) = EventFrames::parse(message.parts()) else {
            self.metrics.undecodable.inc();
            return;
        };
        let sequence = frames.sequence;
        if sequence < self.next_sequence {
            if !std::mem::take(&mut self.newly_connected) {
                // Came in a replay already.
                return;
            }
            self.restarted();
        }
        self.newly_connected = false;
        if sequence > self.next_sequence {
            self.replay(self.next_sequence, Some(sequence)).await;
        }
        if sequence >= self.next_sequence {
            self.apply(sequence, frames.payload);
        }
    }

    fn apply(&mut self, sequence: u64, payload: &[u8]) {
        let lost = sequence - self.next_sequence;
        if lost > 0 && self.next_sequence > 0 {
            self.metrics.lost.inc_by(lost);
            tracing::warn!(
                engine = self.name,
                lost,
                "KV events were lost and are not kept for a replay: predictions for this engine may be wrong; set its replay endpoint"
            );
        }
        self.next_sequence = sequence + 1;
        match self.applier.apply(payload) {
            Ok(unread) => {
                self.metrics.applied.inc();
                self.metrics.undecodable.inc_by(unread);
            }
            Err(error) => {
                self.metrics.undecodable.inc();
                tracing::debug!(engine = self.name, %error, "KV events: a message cannot be read");
            }
        }
    }

    /// After connecting: gets what was published before, as far as the engine keeps it, and finds out whether it has restarted: an
    /// engine that has not still knows the last message that was heard.
    async fn catch_up(&mut self) {
        let heard = self.next_sequence;
        if self.replay(heard.saturating_sub(1), None).await == ReplayOutcome::Unavailable && heard > 0 {
            self.restarted();
            self.replay(0, None).await;
        }
    }

    fn restarted(&mut self) {
        tracing::info!(engine = self.name, "KV events: the engine has restarted, its cache is empty");
        self.applier.clear(None);
        self.next_sequence = 0;
    }

    /// Asks for messages again: from `from` up to the message before `until`, or all that the engine has.
    async fn replay(&mut self, from: u64, until: Option<u64>) -> ReplayOutcome {
        let Some(endpoint) = self.source.replay.clone() else { return ReplayOutcome::Failed };
        self.metrics.replays.inc();
        let start = ZmtpMessage::new(vec![Bytes::copy_from_slice(&from.to_be_bytes())]);
        let mut replies = match moongate_zmtp::request(&endpoint, start, &ZmtpOptions::default()).await {
            Ok(replies) => replies,
            Err(error) => {
                tracing::debug!(engine = self.name, %error, "KV events: no replay");
                return ReplayOutcome::Failed;
            }
        };
        let mut replayed = ReplayOutcome::Unavailable;
        while let Ok(Ok(reply)) = timeout(REPLAY_STEP_TIMEOUT, replies.recv()).await {
            let Ok(frames) = EventFrames::parse(reply.parts()) else { return ReplayOutcome::Failed };
            if frames.ends_replay() || until.is_some_and(|until| frames.sequence >= until) {
                return replayed;
            }
            replayed = ReplayOutcome::Partial;
            if frames.sequence >= self.next_sequence {
                self.newly_connected = false;
                self.apply(frames.sequence, frames.payload);
            }
        }
        ReplayOutcome::Failed
    }
}

/// What came of asking for messages again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReplayOutcome {
    /// The engine has none of them.
    Unavailable,
    /// It sent some.
    Partial,
    /// It did not answer to the end.
    Failed,
}

impl Drop for EngineFeed {
    fn drop(&mut self) {
        self.metrics.connected.dec_by(self.peers);
    }
}
