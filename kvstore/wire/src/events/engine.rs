//! Events of engines.
//!
//! vLLM since 0.32 and SGLang since 0.5.23 send a map with the kind under `type`. Older ones send an array: the kind, then members in
//! the order of `STORED` and `REMOVED`, of which later ones may be left away.

use super::list::{BlockHash, ExtraKeys, Hashes, TokenIds};
use super::reader::{Reader, Value};
use super::{DecodeError, Medium};

/// Something that happened to an engine's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// Blocks can be reused from now on.
    Stored(Stored<'a>),
    /// Blocks are gone.
    Removed(Removed<'a>),
    /// All blocks are gone, or those on one medium.
    Cleared(Option<Medium<'a>>),
}

/// Consecutive blocks of one sequence that can be reused from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored<'a> {
    /// The blocks, in the sequence's order.
    pub hashes: Hashes<'a>,
    /// The block before the first one; `None` if the sequence begins with it.
    pub parent: Option<BlockHash<'a>>,
    /// The blocks' tokens, `block_size` for each. `None` if they are not sent or not plain numbers.
    pub tokens: Option<TokenIds<'a>>,
    /// Tokens in a block.
    pub block_size: u32,
    /// Where they lie. `None` is an engine's own KV cache: older engines have nothing else.
    pub medium: Option<Medium<'a>>,
    /// The LoRA adapter that the blocks belong to.
    pub lora: Option<Lora<'a>>,
    /// What else the hashes depend on (vLLM). `None` if the engine does not say, as when the Mooncake connector publishes.
    pub extra_keys: Option<ExtraKeys<'a>>,
    /// The request's cache salt (SGLang). Hashes depend on it.
    pub cache_salt: Option<&'a str>,
    /// Which of several KV-cache groups of a hybrid model (vLLM).
    pub group: Option<u32>,
}

/// Blocks that are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removed<'a> {
    /// The blocks.
    pub hashes: Hashes<'a>,
    /// Where they lay; they may still lie elsewhere.
    pub medium: Option<Medium<'a>>,
    /// Which of several KV-cache groups of a hybrid model (vLLM).
    pub group: Option<u32>,
}

/// A LoRA adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lora<'a> {
    /// By number, where no name is sent.
    Id(u64),
    /// By name.
    Name(&'a str),
}

/// Members that matter, with the names under which they travel.
#[derive(Clone, Copy)]
enum Member {
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
}

const STORED: &[Member] = &[
    Member::Hashes,
    Member::Parent,
    Member::Tokens,
    Member::BlockSize,
    Member::LoraId,
    Member::Medium,
    Member::LoraName,
    Member::ExtraKeys,
    Member::Group,
];
const REMOVED: &[Member] = &[Member::Hashes, Member::Medium, Member::Group];
const CLEARED: &[Member] = &[Member::Medium];

impl Member {
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
            _ => return None,
        })
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Stored,
    Removed,
    Cleared,
}

impl Kind {
    fn from_value(value: Value<'_>) -> Result<Self, DecodeError> {
        match value {
            Value::Text(b"BlockStored") => Ok(Self::Stored),
            Value::Text(b"BlockRemoved") => Ok(Self::Removed),
            Value::Text(b"AllBlocksCleared") => Ok(Self::Cleared),
            _ => Err(DecodeError::UnknownKind),
        }
    }

    /// Members by position.
    fn members(self) -> &'static [Member] {
        match self {
            Self::Stored => STORED,
            Self::Removed => REMOVED,
            Self::Cleared => CLEARED,
        }
    }
}

impl<'a> Event<'a> {
    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let mut members = Members::default();
        let kind = match reader.value()? {
            Value::Map(pairs) => members.read_map(reader, pairs)?,
            Value::Array(length @ 1..) => members.read_array(reader, length - 1)?,
            _ => return Err(DecodeError::UnknownKind),
        };
        let hashes = || members.hashes.ok_or(DecodeError::Missing("block_hashes"));
        Ok(match kind {
            Kind::Stored => Self::Stored(Stored {
                hashes: hashes()?,
                parent: members.parent,
                tokens: members.tokens,
                block_size: members.block_size.ok_or(DecodeError::Missing("block_size"))?,
                medium: members.medium,
                lora: members.lora_name.map(Lora::Name).or(members.lora_id),
                extra_keys: members.extra_keys,
                cache_salt: members.cache_salt,
                group: members.group,
            }),
            Kind::Removed => {
                Self::Removed(Removed { hashes: hashes()?, medium: members.medium, group: members.group })
            }
            Kind::Cleared => Self::Cleared(members.medium),
        })
    }
}

/// Members as far as they have been read.
#[derive(Default)]
struct Members<'a> {
    hashes: Option<Hashes<'a>>,
    parent: Option<BlockHash<'a>>,
    tokens: Option<TokenIds<'a>>,
    block_size: Option<u32>,
    medium: Option<Medium<'a>>,
    lora_id: Option<Lora<'a>>,
    lora_name: Option<&'a str>,
    extra_keys: Option<ExtraKeys<'a>>,
    cache_salt: Option<&'a str>,
    group: Option<u32>,
}

impl<'a> Members<'a> {
    /// Members that are not known are passed over.
    fn read_map(&mut self, reader: &mut Reader<'a>, pairs: u32) -> Result<Kind, DecodeError> {
        let mut kind = None;
        for _ in 0..pairs {
            let Value::Text(name) = reader.value()? else {
                return Err(DecodeError::Unexpected("a member's name"));
            };
            match Member::named(name) {
                Some(member) => self.set(member, reader)?,
                None if name == b"type" => kind = Some(Kind::from_value(reader.value()?)?),
                None => {
                    reader.skip()?;
                }
            }
        }
        kind.ok_or(DecodeError::UnknownKind)
    }

    fn read_array(&mut self, reader: &mut Reader<'a>, length: u32) -> Result<Kind, DecodeError> {
        let kind = Kind::from_value(reader.value()?)?;
        let mut members = kind.members().iter();
        for _ in 0..length {
            match members.next() {
                Some(&member) => self.set(member, reader)?,
                None => {
                    reader.skip()?;
                }
            }
        }
        Ok(kind)
    }

    /// Reads the value of a member. Nil leaves it unset.
    fn set(&mut self, member: Member, reader: &mut Reader<'a>) -> Result<(), DecodeError> {
        let start = *reader;
        if reader.value()? == Value::Nil {
            return Ok(());
        }
        *reader = start;
        let wrong = DecodeError::Unexpected;
        match member {
            Member::Hashes => self.hashes = Some(Hashes::read(reader)?.ok_or(wrong("block_hashes"))?),
            Member::Parent => {
                let parent = BlockHash::from_value(reader.value()?);
                self.parent = Some(parent.ok_or(wrong("parent_block_hash"))?);
            }
            Member::Tokens => self.tokens = TokenIds::read(reader)?,
            Member::BlockSize => self.block_size = Some(number(reader, "block_size")?),
            Member::LoraId => {
                self.lora_id = Some(match reader.value()? {
                    Value::Uint(id) => Lora::Id(id),
                    Value::Text(name) => Lora::Name(utf8(name, "lora_id")?),
                    _ => return Err(wrong("lora_id")),
                });
            }
            Member::Medium => self.medium = Some(Medium::from_name(text(reader, "medium")?)),
            Member::LoraName => self.lora_name = Some(text(reader, "lora_name")?),
            Member::ExtraKeys => {
                self.extra_keys = Some(ExtraKeys::read(reader)?.ok_or(wrong("extra_keys"))?);
            }
            Member::CacheSalt => self.cache_salt = Some(text(reader, "cache_salt")?),
            Member::Group => self.group = Some(number(reader, "group_idx")?),
        }
        Ok(())
    }
}

fn number(reader: &mut Reader<'_>, name: &'static str) -> Result<u32, DecodeError> {
    match reader.value()? {
        Value::Uint(number) => u32::try_from(number).map_err(|_| DecodeError::Unexpected(name)),
        _ => Err(DecodeError::Unexpected(name)),
    }
}

pub(super) fn text<'a>(reader: &mut Reader<'a>, name: &'static str) -> Result<&'a str, DecodeError> {
    match reader.value()? {
        Value::Text(text) => utf8(text, name),
        _ => Err(DecodeError::Unexpected(name)),
    }
}

fn utf8<'a>(text: &'a [u8], name: &'static str) -> Result<&'a str, DecodeError> {
    std::str::from_utf8(text).map_err(|_| DecodeError::Unexpected(name))
}
