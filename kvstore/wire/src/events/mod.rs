//! KV events: what engines and the Mooncake master publish about the blocks that they hold.
//!
//! All of them send three frames, [`EventFrames`]: a topic, a sequence number, and a MessagePack payload `[timestamp, [event…], dp_rank]`.
//! Engines (vLLM, SGLang) describe blocks by hash and tokens: [`EngineEventBatch`]. The Mooncake master describes objects by key:
//! [`mooncake::EngineEventBatch`]. Who subscribes knows which of the two it hears.
//!
//! [`encode_engine_batch`] writes what engines write; a gateway has no use for it, but simulated engines have.
//!
//! Decoding borrows from the payload and allocates nothing. A payload that is not MessagePack is refused as a whole; an event that is
//! not understood is refused alone, and the others of its batch are still read.

mod batch;
mod encode;
mod engine;
mod error;
mod frames;
mod list;
mod medium;
pub mod mooncake;
mod reader;
mod writer;

pub use batch::EngineEventBatch;
pub use encode::{EngineEventFormat, OutgoingBlocks, OutgoingEngineEvent, encode_engine_batch};
pub use engine::{BlockRemoved, BlockStored, EngineEvent, LoraAdapter};
pub use error::EventDecodeError;
pub use frames::EventFrames;
pub use list::{BlockHash, BlockHashes, ExtraKey, ExtraKeys, TokenIds};
pub use medium::StorageMedium;
