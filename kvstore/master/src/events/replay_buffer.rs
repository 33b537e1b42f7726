//! Messages that are kept for those who missed them.

use std::collections::VecDeque;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use moongate_zmtp::ZmtpMessage;
use parking_lot::Mutex;

/// Number of a replay's end marker.
const END_OF_REPLAY: u64 = u64::MAX;

/// The newest messages.
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
    /// Keeps about `capacity` bytes.
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

    /// The first message from a number on.
    fn after(&self, number: u64) -> Option<(u64, Bytes)> {
        let messages = self.messages.lock();
        let at = messages.all.partition_point(|(known, _)| *known < number);
        messages.all.get(at).cloned()
    }

    /// What is kept from the requested number on, then the end marker. A request that is no number gets nothing.
    pub(super) fn replay<'a>(&'a self, request: &ZmtpMessage) -> impl Stream<Item = ZmtpMessage> + use<'a> {
        let from = request.parts().last().and_then(|part| <[u8; 8]>::try_from(&part[..]).ok());
        stream::unfold(from.map(u64::from_be_bytes), move |next| async move {
            // A reader who is slower than the messages are forgotten gets a gap, and sees it.
            match self.after(next?) {
                Some((number, payload)) => Some((message(number, payload), Some(number.saturating_add(1)))),
                None => Some((message(END_OF_REPLAY, Bytes::new()), None)),
            }
        })
    }
}
