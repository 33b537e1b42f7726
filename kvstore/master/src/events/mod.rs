//! KV events: what becomes readable and what vanishes, published over ZeroMQ as Mooncake's master does it (RFC 1527).
//!
//! A message has three parts: an empty topic, its number as 8 bytes (big-endian, from 1), and a batch of at most 64 events in
//! MessagePack. Beyond Mooncake's, every way is told in which an object can vanish, segments are told of in messages of their own, and
//! who missed messages can have them again: a ROUTER socket takes a number (8 bytes, big-endian), sends what is kept from there on as
//! (empty part, topic, number, batch), and ends with the number 2^64 - 1 and an empty batch. Engines replay in the same way.
//!
//! A number that is left out says that events before it were lost, because nobody published them in time, or because the master was
//! started anew. No number is given out twice ([`EventNumberAllocator`]).

mod number_allocator;
mod publish;
mod queue;
mod replay_buffer;
#[cfg(test)]
mod tests;

pub use number_allocator::EventNumberAllocator;
pub use publish::{KvEventBindError, KvEventPublisher, KvEventPublisherOptions};
pub use queue::KvEventQueue;
