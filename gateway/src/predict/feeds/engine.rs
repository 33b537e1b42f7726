//! Subscribes to the KV events of one engine.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_wire::events::EventFrames;
use moongate_zmtp::{
    SubscriberEvent, ZmtpEndpoint, ZmtpEndpointError, ZmtpMessage, ZmtpOptions, ZmtpSubscriber,
};
use tokio::time::timeout;

use super::apply::{AppliedEvents, EngineEventApplier};
use crate::feedback::EventFeedMetrics;
use crate::kv_index::{ChunkRuleStatus, HashRuleStatus, LeftOutBlocks};

/// Time limit for the next message of a replay.
const REPLAY_STEP_TIMEOUT: Duration = Duration::from_secs(2);

/// Endpoints of one engine's events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EngineFeedSource {
    endpoint: ZmtpEndpoint,
    /// `false`: the engine connects to the gateway.
    engine_binds: bool,
    replay: Option<ZmtpEndpoint>,
    topic: Bytes,
}

impl EngineFeedSource {
    pub(super) fn new(facts: &moongate_discovery::KvEventSource) -> Result<Self, ZmtpEndpointError> {
        Ok(Self {
            endpoint: facts.endpoint.parse()?,
            engine_binds: facts.engine_binds,
            replay: facts.replay.as_deref().map(str::parse).transpose()?,
            topic: Bytes::copy_from_slice(facts.topic.as_bytes()),
        })
    }
}

/// One subscription, with its position in the event stream.
#[derive(Debug)]
pub(super) struct EngineFeed {
    name: String,
    source: EngineFeedSource,
    applier: EngineEventApplier,
    metrics: Arc<EventFeedMetrics>,
    /// Sequence number of the next message; 0 before the first.
    next_sequence: u64,
    peers: i64,
    /// After a new connection, a smaller sequence number means that the engine has restarted.
    newly_connected: bool,
    /// Whether it was reported that the engine has too many blocks.
    is_over_capacity: bool,
}

impl EngineFeed {
    pub(super) fn new(
        name: String,
        source: EngineFeedSource,
        applier: EngineEventApplier,
        metrics: Arc<EventFeedMetrics>,
    ) -> Self {
        Self {
            name,
            source,
            applier,
            metrics,
            next_sequence: 0,
            peers: 0,
            newly_connected: true,
            is_over_capacity: false,
        }
    }

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
                    tracing::debug!(engine = self.name, %error, "KV events: connection failed");
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
                        "KV events: the engine connects to this address, but the gateway cannot bind it; configure the engine to bind \
                         an endpoint such as tcp://*:5557");
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
                // Already received in a replay.
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
                "KV events were lost and cannot be replayed: predictions for this engine may be wrong; configure its replay endpoint"
            );
        }
        self.next_sequence = sequence + 1;
        match self.applier.apply(payload) {
            Ok(AppliedEvents { undecodable, left_out, hash_rule, chunk_rule }) => {
                self.metrics.applied.inc();
                self.metrics.undecodable.inc_by(undecodable);
                self.report_left_out(left_out);
                if let Some(status) = hash_rule {
                    self.report_hash_rule(&status);
                }
                if let Some(status) = chunk_rule {
                    self.report_chunk_rule(status);
                }
            }
            Err(error) => {
                self.metrics.undecodable.inc();
                tracing::debug!(engine = self.name, %error, "KV events: cannot decode a message");
            }
        }
    }

    fn report_left_out(&mut self, left_out: LeftOutBlocks) {
        self.metrics.record_left_out(left_out);
        if left_out.over_capacity > 0 && !std::mem::replace(&mut self.is_over_capacity, true) {
            tracing::warn!(
                engine = self.name,
                "KV events: the engine has more blocks than can be indexed by their tokens, so some hits are not predicted; declare \
                 the rule of its hashes (`hash_algorithm` and `hash_seed`) if it can be"
            );
        }
    }

    fn report_hash_rule(&self, status: &HashRuleStatus) {
        self.metrics.record_hash_rule(status);
        let engine = &self.name;
        match status {
            HashRuleStatus::Unchecked => {}
            HashRuleStatus::Confirmed => {
                tracing::debug!(engine, "KV events: the engine's block hashes are as assumed");
            }
            HashRuleStatus::Different { actual: Some(actual) } => tracing::warn!(
                engine,
                actual,
                "KV events: the engine's block hashes follow another rule than assumed, so its blocks are indexed by the tokens in \
                 its events, without adapters and a store; declare the rule (`hash_algorithm` and `hash_seed`) if it can be"
            ),
            HashRuleStatus::Different { actual: None } => tracing::warn!(
                engine,
                "KV events: the engine's block hashes follow an unknown rule, so its blocks are indexed by the tokens in its \
                 events, without adapters and a store; check its release and whether speculative decoding changes its hashes"
            ),
        }
    }

    fn report_chunk_rule(&self, status: ChunkRuleStatus) {
        let engine = &self.name;
        match status {
            ChunkRuleStatus::NoChunks | ChunkRuleStatus::Learning => {}
            ChunkRuleStatus::Known(rule) => {
                tracing::info!(engine, %rule, "KV events: the engine uses LMCache, whose chunks are predicted");
            }
            ChunkRuleStatus::Unknown => tracing::warn!(
                engine,
                "KV events: the engine uses LMCache with an unknown hash rule, so that hits in LMCache are not predicted; configure \
                 LMCache with `pre_caching_hash_algorithm: sha256_cbor`"
            ),
        }
    }

    /// After connecting: requests earlier messages, as far as the engine buffers them, and detects a restart: an engine that has
    /// not restarted still has the last message that was received.
    async fn catch_up(&mut self) {
        let received = self.next_sequence;
        if self.replay(received.saturating_sub(1), None).await == ReplayOutcome::Unavailable && received > 0 {
            self.restarted();
            self.replay(0, None).await;
        }
    }

    fn restarted(&mut self) {
        tracing::info!(engine = self.name, "KV events: the engine has restarted with an empty cache");
        self.applier.restarted();
        self.next_sequence = 0;
    }

    /// Requests a replay: from `from` up to the message before `until`, or everything that the engine buffers.
    async fn replay(&mut self, from: u64, until: Option<u64>) -> ReplayOutcome {
        let Some(endpoint) = self.source.replay.clone() else { return ReplayOutcome::Failed };
        self.metrics.replays.inc();
        let start = ZmtpMessage::new(vec![Bytes::copy_from_slice(&from.to_be_bytes())]);
        let mut replies = match moongate_zmtp::request(&endpoint, start, &ZmtpOptions::default()).await {
            Ok(replies) => replies,
            Err(error) => {
                tracing::debug!(engine = self.name, %error, "KV events: replay failed");
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

/// Outcome of a replay request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReplayOutcome {
    /// The engine has none of the requested messages.
    Unavailable,
    /// The engine sent at least one message.
    Partial,
    /// The replay failed before its end.
    Failed,
}

impl Drop for EngineFeed {
    fn drop(&mut self) {
        self.metrics.connected.dec_by(self.peers);
    }
}
