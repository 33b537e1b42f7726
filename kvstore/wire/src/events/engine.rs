//! Events of engines.
//!
//! vLLM since 0.32 and SGLang since 0.5.23 send a map with the kind under `type`. Older releases send an array: the kind, then fields
//! in the order of `STORED` and `REMOVED`, of which later ones may be missing.

use super::list::{BlockHash, BlockHashes, ExtraKeys, TokenIds};
use super::reader::{MsgpackReader, MsgpackValue};
use super::{EventDecodeError, StorageMedium};

/// An event about an engine's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineEvent<'a> {
    /// Blocks were stored and are reusable.
    Stored(BlockStored<'a>),
    Removed(BlockRemoved<'a>),
    /// All blocks were removed, or those on one medium.
    Cleared(Option<StorageMedium<'a>>),
}

/// Consecutive blocks of one sequence that are reusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockStored<'a> {
    /// The blocks, in the sequence's order.
    pub hashes: BlockHashes<'a>,
    /// The block before the first one; `None` if the first one starts the sequence.
    pub parent: Option<BlockHash<'a>>,
    /// Tokens of the blocks, `block_size` each. `None` if they are not sent or not plain numbers.
    pub tokens: Option<TokenIds<'a>>,
    /// Number of tokens per block.
    pub block_size: u32,
    /// Medium that contains the blocks. `None` means the engine's own KV cache: older engines have no other.
    pub medium: Option<StorageMedium<'a>>,
    /// The LoRA adapter that the blocks belong to.
    pub lora: Option<LoraAdapter<'a>>,
    /// Other inputs of the hashes (vLLM). `None` if they are not sent, as by the Mooncake connector.
    pub extra_keys: Option<ExtraKeys<'a>>,
    /// Cache salt of the request (SGLang), an input of the hashes.
    pub cache_salt: Option<&'a str>,
    /// Index of the KV-cache group of a hybrid model (vLLM).
    pub group: Option<u32>,
    /// Attention of the group's layers (vLLM).
    pub attention: Option<AttentionKind>,
    /// Tokens of the group's sliding window (vLLM).
    pub sliding_window: Option<u32>,
}

/// Attention of the layers that share a KV-cache group (vLLM's `kv_cache_spec_kind`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// Every token attends to all earlier ones, also with latent attention or sinks.
    Full,
    /// To the tokens of a window.
    SlidingWindow,
    /// To the earlier tokens of its own chunk.
    ChunkedLocal,
    /// A recurrent state instead of a cache of tokens.
    Recurrent,
    /// Another kind, which does not decide about reuse or is not supported.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRemoved<'a> {
    pub hashes: BlockHashes<'a>,
    /// Medium that contained the blocks; copies may exist on other media.
    pub medium: Option<StorageMedium<'a>>,
    /// Index of the KV-cache group of a hybrid model (vLLM).
    pub group: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LoraAdapter<'a> {
    /// Numeric id, if no name is sent.
    Id(u64),
    Name(&'a str),
}

/// The decoded fields of an event.
#[derive(Clone, Copy)]
enum EventField {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    CacheSalt,
    Group,
    Attention,
    SlidingWindow,
}

const STORED: &[EventField] = &[
    EventField::Hashes,
    EventField::Parent,
    EventField::Tokens,
    EventField::BlockSize,
    EventField::LoraId,
    EventField::Medium,
    EventField::LoraName,
    EventField::ExtraKeys,
    EventField::Group,
    EventField::Attention,
    EventField::SlidingWindow,
];
const REMOVED: &[EventField] = &[EventField::Hashes, EventField::Medium, EventField::Group];
const CLEARED: &[EventField] = &[EventField::Medium];

impl EventField {
    fn named(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"block_hashes" => Self::Hashes,
            b"parent_block_hash" => Self::Parent,
            b"token_ids" => Self::Tokens,
            b"block_size" => Self::BlockSize,
            b"lora_id" => Self::LoraId,
            b"medium" => Self::Medium,
            b"lora_name" => Self::LoraName,
            b"extra_keys" => Self::ExtraKeys,
            b"cache_salt" => Self::CacheSalt,
            b"group_idx" => Self::Group,
            b"kv_cache_spec_kind" => Self::Attention,
            b"kv_cache_spec_sliding_window" => Self::SlidingWindow,
            _ => return None,
        })
    }
}

impl AttentionKind {
    fn from_name(name: &str) -> Self {
        match name {
            "full_attention" | "mla_attention" | "sink_full_attention" => Self::Full,
            "sliding_window" | "sliding_window_mla" => Self::SlidingWindow,
            "chunked_local_attention" => Self::ChunkedLocal,
            "mamba" => Self::Recurrent,
            _ => Self::Other,
        }
    }
}

#[derive(Clone, Copy)]
enum EngineEventKind {
    Stored,
    Removed,
    Cleared,
}

impl EngineEventKind {
    fn from_value(value: MsgpackValue<'_>) -> Result<Self, EventDecodeError> {
        match value {
            MsgpackValue::Text(b"BlockStored") => Ok(Self::Stored),
            MsgpackValue::Text(b"BlockRemoved") => Ok(Self::Removed),
            MsgpackValue::Text(b"AllBlocksCleared") => Ok(Self::Cleared),
            _ => Err(EventDecodeError::UnknownKind),
        }
    }

    /// Fields by position in an array.
    fn fields(self) -> &'static [EventField] {
        match self {
            Self::Stored => STORED,
            Self::Removed => REMOVED,
            Self::Cleared => CLEARED,
        }
    }
}

impl<'a> EngineEvent<'a> {
    pub(super) fn read(reader: &mut MsgpackReader<'a>) -> Result<Self, EventDecodeError> {
        let mut fields = EventFields::default();
        let kind = match reader.value()? {
            MsgpackValue::Map(pairs) => fields.read_map(reader, pairs)?,
            MsgpackValue::Array(length @ 1..) => fields.read_array(reader, length - 1)?,
            _ => return Err(EventDecodeError::UnknownKind),
        };
        let hashes = || fields.hashes.ok_or(EventDecodeError::Missing("block_hashes"));
        Ok(match kind {
            EngineEventKind::Stored => Self::Stored(BlockStored {
                hashes: hashes()?,
                parent: fields.parent,
                tokens: fields.tokens,
                block_size: fields.block_size.ok_or(EventDecodeError::Missing("block_size"))?,
                medium: fields.medium,
                lora: fields.lora_name.map(LoraAdapter::Name).or(fields.lora_id),
                extra_keys: fields.extra_keys,
                cache_salt: fields.cache_salt,
                group: fields.group,
                attention: fields.attention,
                sliding_window: fields.sliding_window,
            }),
            EngineEventKind::Removed => {
                Self::Removed(BlockRemoved { hashes: hashes()?, medium: fields.medium, group: fields.group })
            }
            EngineEventKind::Cleared => Self::Cleared(fields.medium),
        })
    }
}

#[derive(Default)]
struct EventFields<'a> {
    hashes: Option<BlockHashes<'a>>,
    parent: Option<BlockHash<'a>>,
    tokens: Option<TokenIds<'a>>,
    block_size: Option<u32>,
    medium: Option<StorageMedium<'a>>,
    lora_id: Option<LoraAdapter<'a>>,
    lora_name: Option<&'a str>,
    extra_keys: Option<ExtraKeys<'a>>,
    cache_salt: Option<&'a str>,
    group: Option<u32>,
    attention: Option<AttentionKind>,
    sliding_window: Option<u32>,
}

impl<'a> EventFields<'a> {
    /// Reads a map. Unknown fields are skipped.
    fn read_map(
        &mut self,
        reader: &mut MsgpackReader<'a>,
        pairs: u32,
    ) -> Result<EngineEventKind, EventDecodeError> {
        let mut kind = None;
        for _ in 0..pairs {
            let MsgpackValue::Text(name) = reader.value()? else {
                return Err(EventDecodeError::Unexpected("a field name"));
            };
            match EventField::named(name) {
                Some(field) => self.set(field, reader)?,
                None if name == b"type" => kind = Some(EngineEventKind::from_value(reader.value()?)?),
                None => {
                    reader.skip()?;
                }
            }
        }
        kind.ok_or(EventDecodeError::UnknownKind)
    }

    fn read_array(
        &mut self,
        reader: &mut MsgpackReader<'a>,
        length: u32,
    ) -> Result<EngineEventKind, EventDecodeError> {
        let kind = EngineEventKind::from_value(reader.value()?)?;
        let mut fields = kind.fields().iter();
        for _ in 0..length {
            match fields.next() {
                Some(&field) => self.set(field, reader)?,
                None => {
                    reader.skip()?;
                }
            }
        }
        Ok(kind)
    }

    /// Reads the value of a field. Nil leaves it unset.
    fn set(&mut self, field: EventField, reader: &mut MsgpackReader<'a>) -> Result<(), EventDecodeError> {
        let start = *reader;
        if reader.value()? == MsgpackValue::Nil {
            return Ok(());
        }
        *reader = start;
        let unexpected = EventDecodeError::Unexpected;
        match field {
            EventField::Hashes => {
                self.hashes = Some(BlockHashes::read(reader)?.ok_or(unexpected("block_hashes"))?);
            }
            EventField::Parent => {
                let parent = BlockHash::from_value(reader.value()?);
                self.parent = Some(parent.ok_or(unexpected("parent_block_hash"))?);
            }
            EventField::Tokens => self.tokens = TokenIds::read(reader)?,
            EventField::BlockSize => self.block_size = Some(number(reader, "block_size")?),
            EventField::LoraId => {
                self.lora_id = Some(match reader.value()? {
                    MsgpackValue::Uint(id) => LoraAdapter::Id(id),
                    MsgpackValue::Text(name) => LoraAdapter::Name(utf8(name, "lora_id")?),
                    _ => return Err(unexpected("lora_id")),
                });
            }
            EventField::Medium => self.medium = Some(StorageMedium::from_name(text(reader, "medium")?)),
            EventField::LoraName => self.lora_name = Some(text(reader, "lora_name")?),
            EventField::ExtraKeys => {
                self.extra_keys = Some(ExtraKeys::read(reader)?.ok_or(unexpected("extra_keys"))?);
            }
            EventField::CacheSalt => self.cache_salt = Some(text(reader, "cache_salt")?),
            EventField::Group => self.group = Some(number(reader, "group_idx")?),
            EventField::Attention => {
                self.attention = Some(AttentionKind::from_name(text(reader, "kv_cache_spec_kind")?));
            }
            EventField::SlidingWindow => {
                self.sliding_window = Some(number(reader, "kv_cache_spec_sliding_window")?);
            }
        }
        Ok(())
    }
}

fn number(reader: &mut MsgpackReader<'_>, name: &'static str) -> Result<u32, EventDecodeError> {
    match reader.value()? {
        MsgpackValue::Uint(number) => u32::try_from(number).map_err(|_| EventDecodeError::Unexpected(name)),
        _ => Err(EventDecodeError::Unexpected(name)),
    }
}

pub(super) fn text<'a>(
    reader: &mut MsgpackReader<'a>,
    name: &'static str,
) -> Result<&'a str, EventDecodeError> {
    match reader.value()? {
        MsgpackValue::Text(text) => utf8(text, name),
        _ => Err(EventDecodeError::Unexpected(name)),
    }
}

fn utf8<'a>(text: &'a [u8], name: &'static str) -> Result<&'a str, EventDecodeError> {
    std::str::from_utf8(text).map_err(|_| EventDecodeError::Unexpected(name))
}
