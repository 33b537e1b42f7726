//! One rank's event sockets: messages are numbered, kept for a while, published, and sent again on request.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use mooncake_wire::events::{NewEvent, Sender, encode_engine_batch};
use moongate_runtime::Supervisor;
use moongate_zmtp::{Message, Publisher};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::KvEvents;
use super::ports::{Ports, Sockets};
use crate::engine::stats::unix_s;

/// Most bytes of payloads kept for a replay, whatever [`KvEvents::buffer_steps`] says: a simulator shares its machine.
const MAX_KEPT_BYTES: usize = 64 * 1024 * 1024;
/// How long after a failed bind the next one is tried.
const BIND_RETRY: Duration = Duration::from_millis(50);
/// Number of a replay's end marker.
const END: u64 = u64::MAX;

/// A rank's event channel.
#[derive(Debug)]
pub(crate) struct Channel {
    sender: Sender,
    rank: u32,
    topic: Bytes,
    buffer_steps: usize,
    log: Mutex<Log>,
    /// Counts restarts.
    restarts: watch::Sender<u64>,
}

#[derive(Debug)]
struct Log {
    publisher: Publisher,
    next: u64,
    kept: VecDeque<(u64, Bytes)>,
    kept_bytes: usize,
    /// Of so many messages the last one is lost; 0 loses none.
    lose_every: u64,
    /// Messages since `lose_every` was set.
    counted: u64,
}

impl Channel {
    /// Starts to serve opened sockets, until the supervisor stops. `refusing`: the sockets are closed while it is true.
    pub(crate) fn start(
        sender: Sender,
        rank: u32,
        settings: &KvEvents,
        (ports, sockets): (Ports, Sockets),
        refusing: watch::Receiver<bool>,
        supervisor: &Supervisor,
    ) -> Arc<Self> {
        let log = Log {
            publisher: sockets.publisher.clone(),
            next: 0,
            kept: VecDeque::new(),
            kept_bytes: 0,
            lose_every: 0,
            counted: 0,
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

    /// Publishes a batch under the next number.
    pub(crate) fn publish(&self, events: &[NewEvent<'_>]) {
        let mut payload = Vec::new();
        encode_engine_batch(self.sender, unix_s(), events, self.rank, &mut payload);
        let payload = Bytes::from(payload);
        let mut log = self.log.lock();
        let number = log.next;
        log.next += 1;
        log.keep(number, payload.clone(), self.buffer_steps);
        if !log.loses() {
            log.publisher.publish(self.message(number, payload));
        }
    }

    /// Loses every `every`-th message from now on: it has a number and can be replayed, but nobody gets it. 0 loses none.
    pub(crate) fn lose(&self, every: u64) {
        let mut log = self.log.lock();
        (log.lose_every, log.counted) = (every, 0);
    }

    /// Forgets all messages and numbers the next one 0. Connections end.
    pub(crate) fn restart(&self) {
        let mut log = self.log.lock();
        (log.next, log.kept_bytes) = (0, 0);
        log.kept.clear();
        self.restarts.send_modify(|restarts| *restarts += 1);
    }

    fn message(&self, number: u64, payload: Bytes) -> Message {
        [self.topic.clone(), Bytes::copy_from_slice(&number.to_be_bytes()), payload].into()
    }

    async fn serve(&self, ports: Ports, first: Sockets, mut refusing: watch::Receiver<bool>) {
        let mut sockets = Some(first);
        let mut restarts = self.restarts.subscribe();
        loop {
            if refusing.wait_for(|refusing| !refusing).await.is_err() {
                return;
            }
            let opened = match sockets.take() {
                Some(sockets) => sockets,
                None => self.open_again(ports).await,
            };
            tokio::select! {
                () = opened.server.run() => {}
                () = opened.responder.serve(|request| self.replay(&request)) => {}
                _ = restarts.changed() => {}
                _ = refusing.wait_for(|refusing| *refusing) => {}
            }
        }
    }

    async fn open_again(&self, ports: Ports) -> Sockets {
        loop {
            match Sockets::open(ports.live(self.rank), ports.replay(self.rank)).await {
                Ok(sockets) => {
                    self.log.lock().publisher = sockets.publisher.clone();
                    return sockets;
                }
                Err(error) => {
                    tracing::warn!(%error, "a simulated engine cannot come back to its event port yet");
                    tokio::time::sleep(BIND_RETRY).await;
                }
            }
        }
    }

    /// What is kept from the requested number on, and the end marker. A request that is no number gets nothing.
    fn replay(&self, request: &Message) -> impl Stream<Item = Message> + use<> {
        let from = request.parts().first().and_then(|part| <[u8; 8]>::try_from(&part[..]).ok());
        let replies = from.map(u64::from_be_bytes).map(|from| {
            let log = self.log.lock();
            let kept = log.kept.iter().filter(|(number, _)| *number >= from);
            let mut replies: Vec<Message> =
                kept.map(|(number, payload)| self.message(*number, payload.clone())).collect();
            let end = [Bytes::new(), Bytes::copy_from_slice(&END.to_be_bytes()), Bytes::new()];
            replies.push(end.into());
            replies
        });
        stream::iter(replies.unwrap_or_default())
    }
}

impl Log {
    fn keep(&mut self, number: u64, payload: Bytes, steps: usize) {
        self.kept_bytes += payload.len();
        self.kept.push_back((number, payload));
        while self.kept.len() > steps || self.kept_bytes > MAX_KEPT_BYTES {
            let Some((_, oldest)) = self.kept.pop_front() else { break };
            self.kept_bytes -= oldest.len();
        }
    }

    fn loses(&mut self) -> bool {
        self.counted += 1;
        self.lose_every > 0 && self.counted.is_multiple_of(self.lose_every)
    }
}
