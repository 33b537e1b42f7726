//! One rank's event sockets: messages are numbered, buffered, published, and replayed on request.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use mooncake_wire::events::{EngineEventFormat, OutgoingEngineEvent, encode_engine_batch};
use moongate_runtime::Supervisor;
use moongate_zmtp::{ZmtpMessage, ZmtpPublisher};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::KvEventOptions;
use super::ports::{KvEventPorts, KvEventSockets};
use crate::engine::stats::unix_s;

/// Maximum bytes of payloads buffered for replays, whatever [`KvEventOptions::buffer_steps`] says: many simulated
/// engines share a machine.
const MAX_REPLAY_BYTES: usize = 64 * 1024 * 1024;
/// Delay between attempts to bind.
const BIND_RETRY: Duration = Duration::from_millis(50);
/// Sequence number of a replay's end marker.
const REPLAY_END_SEQUENCE: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct KvEventChannel {
    sender: EngineEventFormat,
    rank: u32,
    topic: Bytes,
    buffer_steps: usize,
    log: Mutex<KvEventLog>,
    restarts: watch::Sender<u64>,
}

#[derive(Debug)]
struct KvEventLog {
    publisher: ZmtpPublisher,
    next_sequence: u64,
    replay_buffer: VecDeque<(u64, Bytes)>,
    replay_bytes: usize,
    /// Of this many messages the last one is dropped; 0 drops none.
    drop_every: u64,
    /// Messages since `drop_every` was set.
    since_drop_set: u64,
}

/// A rank, with its opened sockets.
#[derive(Debug)]
pub(crate) struct KvEventSource {
    pub(crate) sender: EngineEventFormat,
    pub(crate) rank: u32,
    /// Where the sockets are opened again.
    pub(crate) ports: KvEventPorts,
    pub(crate) sockets: KvEventSockets,
}

impl KvEventChannel {
    /// Serves opened sockets until the supervisor stops. The sockets are closed while `refusing` is true.
    pub(crate) fn start(
        source: KvEventSource,
        settings: &KvEventOptions,
        refusing: watch::Receiver<bool>,
        supervisor: &Supervisor,
    ) -> Arc<Self> {
        let KvEventSource { sender, rank, ports, sockets } = source;
        let log = KvEventLog {
            publisher: sockets.publisher.clone(),
            next_sequence: 0,
            replay_buffer: VecDeque::new(),
            replay_bytes: 0,
            drop_every: 0,
            since_drop_set: 0,
        };
        let channel = Arc::new(Self {
            sender,
            rank,
            topic: Bytes::from(settings.topic.clone()),
            buffer_steps: settings.buffer_steps,
            log: Mutex::new(log),
            restarts: watch::Sender::new(0),
        });
        let (serving, stop) = (Arc::clone(&channel), supervisor.token());
        supervisor.spawn("sim-engine-events", async move {
            tokio::select! {
                () = serving.serve(ports, sockets, refusing) => {}
                () = stop.cancelled() => {}
            }
        });
        channel
    }

    /// Publishes a batch under the next sequence number.
    pub(crate) fn publish(&self, events: &[OutgoingEngineEvent<'_>]) {
        let mut payload = Vec::new();
        encode_engine_batch(self.sender, unix_s(), events, self.rank, &mut payload);
        let payload = Bytes::from(payload);
        let mut log = self.log.lock();
        let number = log.next_sequence;
        log.next_sequence += 1;
        log.buffer(number, payload.clone(), self.buffer_steps);
        if !log.drops_next() {
            log.publisher.publish(self.message(number, payload));
        }
    }

    /// Drops every `every`-th message from now on: it has a sequence number and can be replayed, but is not published.
    /// 0 drops none.
    pub(crate) fn set_drop_every(&self, every: u64) {
        let mut log = self.log.lock();
        (log.drop_every, log.since_drop_set) = (every, 0);
    }

    /// Drops all messages and restarts numbering at 0. Closes connections.
    pub(crate) fn restart(&self) {
        let mut log = self.log.lock();
        (log.next_sequence, log.replay_bytes) = (0, 0);
        log.replay_buffer.clear();
        self.restarts.send_modify(|restarts| *restarts += 1);
    }

    fn message(&self, number: u64, payload: Bytes) -> ZmtpMessage {
        [self.topic.clone(), Bytes::copy_from_slice(&number.to_be_bytes()), payload].into()
    }

    async fn serve(&self, ports: KvEventPorts, first: KvEventSockets, mut refusing: watch::Receiver<bool>) {
        let mut sockets = Some(first);
        let mut restarts = self.restarts.subscribe();
        loop {
            if refusing.wait_for(|refusing| !refusing).await.is_err() {
                return;
            }
            let opened = match sockets.take() {
                Some(sockets) => sockets,
                None => self.reopen(ports).await,
            };
            tokio::select! {
                () = opened.server.run() => {}
                () = opened.responder.run(|request| self.replay(&request)) => {}
                _ = restarts.changed() => {}
                _ = refusing.wait_for(|refusing| *refusing) => {}
            }
        }
    }

    async fn reopen(&self, ports: KvEventPorts) -> KvEventSockets {
        loop {
            match KvEventSockets::open(ports.live(self.rank), ports.replay(self.rank)).await {
                Ok(sockets) => {
                    self.log.lock().publisher = sockets.publisher.clone();
                    return sockets;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot bind the event port again; retrying");
                    tokio::time::sleep(BIND_RETRY).await;
                }
            }
        }
    }

    /// Buffered messages from the requested number on, and the end marker. A request that is not a number gets nothing.
    fn replay(&self, request: &ZmtpMessage) -> impl Stream<Item = ZmtpMessage> + use<> {
        let from = request.parts().first().and_then(|part| <[u8; 8]>::try_from(&part[..]).ok());
        let replies = from.map(u64::from_be_bytes).map(|from| {
            let log = self.log.lock();
            let buffered = log.replay_buffer.iter().filter(|(number, _)| *number >= from);
            let mut replies: Vec<ZmtpMessage> =
                buffered.map(|(number, payload)| self.message(*number, payload.clone())).collect();
            let end =
                [Bytes::new(), Bytes::copy_from_slice(&REPLAY_END_SEQUENCE.to_be_bytes()), Bytes::new()];
            replies.push(end.into());
            replies
        });
        stream::iter(replies.unwrap_or_default())
    }
}

impl KvEventLog {
    fn buffer(&mut self, number: u64, payload: Bytes, steps: usize) {
        self.replay_bytes += payload.len();
        self.replay_buffer.push_back((number, payload));
        while self.replay_buffer.len() > steps || self.replay_bytes > MAX_REPLAY_BYTES {
            let Some((_, oldest)) = self.replay_buffer.pop_front() else { break };
            self.replay_bytes -= oldest.len();
        }
    }

    fn drops_next(&mut self) -> bool {
        self.since_drop_set += 1;
        self.drop_every > 0 && self.since_drop_set.is_multiple_of(self.drop_every)
    }
}
