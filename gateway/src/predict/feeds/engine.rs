//! Follows what one engine publishes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_wire::events::Frames;
use moongate_zmtp::{Endpoint, EndpointError, Event, Message, Options, Subscriber};
use tokio::time::timeout;

use super::apply::Target;
use crate::feedback::FeedMetrics;

/// Time for a replay to bring its next message.
const REPLAY_STEP: Duration = Duration::from_secs(2);

/// Where an engine publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    endpoint: Endpoint,
    /// `false`: the engine connects to us.
    engine_binds: bool,
    replay: Option<Endpoint>,
    topic: Bytes,
}

impl Source {
    pub(super) fn new(told: &moongate_discovery::KvEventSource) -> Result<Self, EndpointError> {
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
    source: Source,
    target: Target,
    metrics: Arc<FeedMetrics>,
    /// Sequence number of the next message; 0 before the first.
    next: u64,
    /// Connections open now.
    peers: i64,
    /// A connection is new, so a smaller sequence number means that the engine has restarted.
    fresh: bool,
}

impl EngineFeed {
    pub(super) fn new(name: String, source: Source, target: Target, metrics: Arc<FeedMetrics>) -> Self {
        Self { name, source, target, metrics, next: 0, peers: 0, fresh: true }
    }

    /// Runs until dropped.
    pub(super) async fn run(mut self) {
        let mut subscriber = self.subscribe().await;
        loop {
            match subscriber.recv().await {
                Event::Connected(_) => {
                    self.metrics.connected.inc();
                    self.peers += 1;
                    tracing::debug!(engine = self.name, "KV events: connected");
                    self.fresh = true;
                    self.catch_up().await;
                }
                Event::Message(_, message) => self.message(&message).await,
                Event::Disconnected(_, error) => {
                    self.metrics.connected.dec();
                    self.peers -= 1;
                    tracing::info!(engine = self.name, %error, "KV events: connection lost");
                }
                Event::Failed(_, error) => {
                    tracing::debug!(engine = self.name, %error, "KV events: no connection");
                }
            }
        }
    }

    async fn subscribe(&self) -> Subscriber {
        let Source { endpoint, engine_binds, topic, .. } = &self.source;
        loop {
            if *engine_binds {
                return Subscriber::connect(endpoint.clone(), vec![topic.clone()], Options::default());
            }
            match Subscriber::bind(endpoint, vec![topic.clone()], Options::default()).await {
                Ok(subscriber) => return subscriber,
                Err(error) => {
                    tracing::warn!(engine = self.name, %endpoint, %error,
                        "KV events: the engine connects to this address, but it cannot be listened on here; let the engine bind \
                         by an endpoint like tcp://*:5557");
                    tokio::time::sleep(REPLAY_STEP).await;
                }
            }
        }
    }

    async fn message(&mut self, message: &Message) {
        let Ok(frames) = Frames::parse(message.parts()) else {
            self.metrics.unread.inc();
            return;
        };
        let sequence = frames.sequence;
        if sequence < self.next {
            if !std::mem::take(&mut self.fresh) {
                // Came in a replay already.
                return;
            }
            self.restarted();
        }
        self.fresh = false;
        if sequence > self.next {
            self.replay(self.next, Some(sequence)).await;
        }
        if sequence >= self.next {
            self.apply(sequence, frames.payload);
        }
    }

    fn apply(&mut self, sequence: u64, payload: &[u8]) {
        let lost = sequence - self.next;
        if lost > 0 && self.next > 0 {
            self.metrics.lost.inc_by(lost);
            tracing::warn!(
                engine = self.name,
                lost,
                "KV events were lost and are not kept for a replay: predictions for this engine may be wrong; set its replay endpoint"
            );
        }
        self.next = sequence + 1;
        match self.target.apply(payload) {
            Ok(unread) => {
                self.metrics.applied.inc();
                self.metrics.unread.inc_by(unread);
            }
            Err(error) => {
                self.metrics.unread.inc();
                tracing::debug!(engine = self.name, %error, "KV events: a message cannot be read");
            }
        }
    }

    /// After connecting: gets what was published before, as far as the engine keeps it, and finds out whether it has restarted: an
    /// engine that has not still knows the last message that was heard.
    async fn catch_up(&mut self) {
        let heard = self.next;
        if self.replay(heard.saturating_sub(1), None).await == Replayed::Nothing && heard > 0 {
            self.restarted();
            self.replay(0, None).await;
        }
    }

    fn restarted(&mut self) {
        tracing::info!(engine = self.name, "KV events: the engine has restarted, its cache is empty");
        self.target.clear(None);
        self.next = 0;
    }

    /// Asks for messages again: from `from` up to the message before `until`, or all that the engine has.
    async fn replay(&mut self, from: u64, until: Option<u64>) -> Replayed {
        let Some(endpoint) = self.source.replay.clone() else { return Replayed::Failed };
        self.metrics.replays.inc();
        let start = Message::new(vec![Bytes::copy_from_slice(&from.to_be_bytes())]);
        let mut replies = match moongate_zmtp::request(&endpoint, start, &Options::default()).await {
            Ok(replies) => replies,
            Err(error) => {
                tracing::debug!(engine = self.name, %error, "KV events: no replay");
                return Replayed::Failed;
            }
        };
        let mut replayed = Replayed::Nothing;
        while let Ok(Ok(reply)) = timeout(REPLAY_STEP, replies.recv()).await {
            let Ok(frames) = Frames::parse(reply.parts()) else { return Replayed::Failed };
            if frames.ends_replay() || until.is_some_and(|until| frames.sequence >= until) {
                return replayed;
            }
            replayed = Replayed::Something;
            if frames.sequence >= self.next {
                self.fresh = false;
                self.apply(frames.sequence, frames.payload);
            }
        }
        Replayed::Failed
    }
}

/// What came of asking for messages again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Replayed {
    /// The engine has none of them.
    Nothing,
    /// It sent some.
    Something,
    /// It did not answer to the end.
    Failed,
}

impl Drop for EngineFeed {
    fn drop(&mut self) {
        self.metrics.connected.dec_by(self.peers);
    }
}
