//! Encoding of payloads as engines do it, for simulated engines and for tests.

use super::writer::MsgpackWriter;
use super::{BlockHash, StorageMedium};

/// Value of vLLM's `kv_cache_spec_kind` for models without hybrid layers.
const FULL_ATTENTION: &str = "full_attention";
/// The only KV-cache group of such models.
const ONLY_GROUP: u64 = 0;

/// Event format of an engine. Formats differ in fields and in the sign of hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineEventFormat {
    /// Format of SGLang release 0.5.23.
    Sglang,
    /// Format of vLLM release 0.32.
    Vllm,
}

/// An event to be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutgoingEngineEvent<'a> {
    /// Blocks were stored and are reusable.
    Stored(OutgoingBlocks<'a>),
    Removed {
        hashes: &'a [BlockHash<'a>],
        /// Medium that contained the blocks.
        medium: StorageMedium<'a>,
    },
    Cleared,
}

/// Consecutive blocks of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutgoingBlocks<'a> {
    /// The blocks, in the sequence's order.
    pub hashes: &'a [BlockHash<'a>],
    /// The block before the first one.
    pub parent: Option<BlockHash<'a>>,
    pub tokens: &'a [u32],
    /// Number of tokens per block.
    pub block_size: u32,
    /// Medium that contains the blocks.
    pub medium: StorageMedium<'a>,
    /// Cache salt of the request. Only SGLang sends the field, and only with a salt.
    pub cache_salt: Option<&'a str>,
    /// Per block, the text that its hash depends on. Only vLLM sends the field; its Mooncake connector omits it together with
    /// `kv_cache_spec_kind`: `None`.
    pub extra_keys: Option<&'a [Option<&'a str>]>,
}

/// Appends a payload with these events, identical to the engine's bytes. `timestamp` is in seconds since 1970.
pub fn encode_engine_batch(
    sender: EngineEventFormat,
    timestamp: f64,
    events: &[OutgoingEngineEvent<'_>],
    dp_rank: u32,
    out: &mut Vec<u8>,
) {
    let mut writer = MsgpackWriter::new(out);
    writer.array(3);
    writer.float(timestamp);
    writer.array(events.len());
    for event in events {
        match event {
            OutgoingEngineEvent::Stored(blocks) => blocks.write(sender, &mut writer),
            OutgoingEngineEvent::Removed { hashes, medium } => {
                write_removed(sender, hashes, *medium, &mut writer);
            }
            OutgoingEngineEvent::Cleared => {
                writer.map(1);
                kind(&mut writer, "AllBlocksCleared");
            }
        }
    }
    writer.uint(dp_rank.into());
}

impl OutgoingBlocks<'_> {
    fn write(&self, sender: EngineEventFormat, writer: &mut MsgpackWriter<'_>) {
        let salt = self.cache_salt.filter(|_| sender == EngineEventFormat::Sglang);
        let extra_keys = self.extra_keys.filter(|_| sender == EngineEventFormat::Vllm);
        writer.map(match sender {
            EngineEventFormat::Sglang => 7 + usize::from(salt.is_some()),
            EngineEventFormat::Vllm => 9 + 2 * usize::from(extra_keys.is_some()),
        });
        kind(writer, "BlockStored");
        write_hashes(sender, self.hashes, writer);
        writer.text("parent_block_hash");
        match self.parent {
            Some(parent) => write_hash(sender, parent, writer),
            None => writer.nil(),
        }
        writer.text("token_ids");
        writer.array(self.tokens.len());
        for &token in self.tokens {
            writer.uint(token.into());
        }
        writer.text("block_size");
        writer.uint(self.block_size.into());
        writer.text("lora_id");
        writer.nil();
        writer.text("medium");
        writer.text(self.medium.name());
        if let Some(salt) = salt {
            writer.text("cache_salt");
            writer.text(salt);
        }
        if sender == EngineEventFormat::Vllm {
            writer.text("lora_name");
            writer.nil();
            if let Some(extra_keys) = extra_keys {
                write_extra_keys(extra_keys, writer);
            }
            writer.text("group_idx");
            writer.uint(ONLY_GROUP);
            if extra_keys.is_some() {
                writer.text("kv_cache_spec_kind");
                writer.text(FULL_ATTENTION);
            }
        }
    }
}

fn write_removed(
    sender: EngineEventFormat,
    hashes: &[BlockHash<'_>],
    medium: StorageMedium<'_>,
    writer: &mut MsgpackWriter<'_>,
) {
    writer.map(if sender == EngineEventFormat::Vllm { 4 } else { 3 });
    kind(writer, "BlockRemoved");
    write_hashes(sender, hashes, writer);
    writer.text("medium");
    writer.text(medium.name());
    if sender == EngineEventFormat::Vllm {
        writer.text("group_idx");
        writer.uint(ONLY_GROUP);
    }
}

fn kind(writer: &mut MsgpackWriter<'_>, name: &str) {
    writer.text("type");
    writer.text(name);
}

fn write_hashes(sender: EngineEventFormat, hashes: &[BlockHash<'_>], writer: &mut MsgpackWriter<'_>) {
    writer.text("block_hashes");
    writer.array(hashes.len());
    for &hash in hashes {
        write_hash(sender, hash, writer);
    }
}

fn write_hash(sender: EngineEventFormat, hash: BlockHash<'_>, writer: &mut MsgpackWriter<'_>) {
    match (hash, sender) {
        (BlockHash::Int(hash), EngineEventFormat::Sglang) => writer.int(hash.cast_signed()),
        (BlockHash::Int(hash), EngineEventFormat::Vllm) => writer.uint(hash),
        (BlockHash::Digest(digest), _) => writer.binary(digest),
    }
}

fn write_extra_keys(extra_keys: &[Option<&str>], writer: &mut MsgpackWriter<'_>) {
    writer.text("extra_keys");
    writer.array(extra_keys.len());
    for key in extra_keys {
        match key {
            Some(key) => {
                writer.array(1);
                writer.text(key);
            }
            None => writer.nil(),
        }
    }
}
