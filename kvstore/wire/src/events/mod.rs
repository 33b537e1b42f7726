//! KV events: messages of engines and the Mooncake master about their cached blocks.
//!
//! All publishers send three frames, [`EventFrames`]: a topic, a sequence number, and a MessagePack payload
//! `[timestamp, [event…], dp_rank]`. Engines (vLLM, SGLang) describe blocks by hash and tokens: [`EngineEventBatch`]. The Mooncake
//! master describes objects by key: [`mooncake::StoreEventBatch`]. The subscriber must choose the right one of the two.
//!
//! [`encode_engine_batch`] encodes payloads as engines do. It is used by simulated engines, not by the gateway.
//!
//! Decoding borrows from the payload and allocates nothing. A payload that is not MessagePack is rejected as a whole; an unsupported
//! event is rejected alone, and the others of its batch are still decoded.

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
pub use engine::{AttentionKind, BlockRemoved, BlockStored, EngineEvent, LoraAdapter};
pub use error::EventDecodeError;
pub use frames::EventFrames;
pub use list::{BlockHash, BlockHashes, ExtraKey, ExtraKeys, TokenIds};
pub use medium::StorageMedium;
