//! Buffer of the newest messages, for replays.

use std::collections::VecDeque;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use moongate_zmtp::ZmtpMessage;
use parking_lot::Mutex;

/// Message number that ends a replay.
const END_OF_REPLAY: u64 = u64::MAX;

/// The newest messages within a size limit.
#[derive(Debug)]
pub(super) struct EventReplayBuffer {
    messages: Mutex<BufferedMessages>,
    capacity: usize,
}

#[derive(Debug, Default)]
struct BufferedMessages {
    all: VecDeque<(u64, Bytes)>,
    bytes: usize,
}

pub(super) fn message(number: u64, payload: Bytes) -> ZmtpMessage {
    [Bytes::new(), Bytes::copy_from_slice(&number.to_be_bytes()), payload].into()
}

impl EventReplayBuffer {
    /// Holds about `capacity` bytes.
    pub(super) fn new(capacity: usize) -> Self {
        Self { messages: Mutex::default(), capacity }
    }

    pub(super) fn push(&self, number: u64, payload: Bytes) {
        let mut messages = self.messages.lock();
        messages.bytes += payload.len();
        messages.all.push_back((number, payload));
        while messages.bytes > self.capacity {
            let Some((_, oldest)) = messages.all.pop_front() else { break };
            messages.bytes -= oldest.len();
        }
    }

    /// The first message with this number or a later one.
    fn after(&self, number: u64) -> Option<(u64, Bytes)> {
        let messages = self.messages.lock();
        let index = messages.all.partition_point(|(buffered, _)| *buffered < number);
        messages.all.get(index).cloned()
    }

    /// Yields the buffered messages from the requested number on, then the end marker. Yields nothing for an invalid request.
    pub(super) fn replay<'a>(&'a self, request: &ZmtpMessage) -> impl Stream<Item = ZmtpMessage> + use<'a> {
        let from = request.parts().last().and_then(|part| <[u8; 8]>::try_from(&part[..]).ok());
        stream::unfold(from.map(u64::from_be_bytes), move |next| async move {
            // If messages are evicted faster than the reader reads, it receives a gap in the numbers.
            match self.after(next?) {
                Some((number, payload)) => Some((message(number, payload), Some(number.saturating_add(1)))),
                None => Some((message(END_OF_REPLAY, Bytes::new()), None)),
            }
        })
    }
}
