//! KV events: objects that become readable or are removed, published over ZeroMQ in the format of Mooncake's master (RFC 1527).
//!
//! A message has three parts: an empty topic, its number as 8 bytes (big-endian, from 1), and a batch of at most 64 events in
//! MessagePack. Extensions of Mooncake's protocol: every removal of an object is reported whatever its cause, changes of segments are
//! reported in messages of their own, and missed messages can be replayed: a ROUTER socket takes a number (8 bytes, big-endian), sends
//! the buffered messages from that number on as (empty part, topic, number, batch), and ends with the number 2^64 - 1 and an empty batch.
//! This is the replay protocol of the engines.
//!
//! A skipped number means that earlier events were lost: the queue was full, or the master was restarted. No number is used twice
//! ([`EventNumberAllocator`]).

mod number_allocator;
mod publish;
mod queue;
mod replay_buffer;
#[cfg(test)]
mod tests;

pub use number_allocator::EventNumberAllocator;
pub use publish::{KvEventBindError, KvEventLabels, KvEventPublisher, KvEventPublisherOptions};
pub use queue::KvEventQueue;
