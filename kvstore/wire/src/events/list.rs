//! Lists in an event, decoded lazily.

use std::fmt;

use super::EventDecodeError;
use super::reader::{MsgpackReader, MsgpackValue};

/// Minimum size of a hash sent as bytes. vLLM's are 16 (xxhash) and 32 (SHA-256) bytes long.
const DIGEST_BYTES: usize = 8;

/// An engine's hash of a block and all blocks before it. Comparable only among engines with the same hash function and settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockHash<'a> {
    /// 64 bits. SGLang sends them signed; here they are unsigned with the same bits.
    Int(u64),
    /// The whole digest, 8 bytes or more.
    Digest(&'a [u8]),
}

impl<'a> BlockHash<'a> {
    /// 64 bits of the hash: for a digest its last 8 bytes, which vLLM sends when it sends integers.
    pub fn low64(self) -> u64 {
        match self {
            Self::Int(hash) => hash,
            Self::Digest(digest) => digest.last_chunk().map_or(0, |last| u64::from_be_bytes(*last)),
        }
    }

    pub(super) fn from_value(value: MsgpackValue<'a>) -> Option<Self> {
        match value {
            MsgpackValue::Uint(hash) => Some(Self::Int(hash)),
            MsgpackValue::Negative(hash) => Some(Self::Int(hash.cast_unsigned())),
            MsgpackValue::Binary(digest) if digest.len() >= DIGEST_BYTES => Some(Self::Digest(digest)),
            _ => None,
        }
    }
}

/// Elements of a validated array.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct MsgpackArray<'a> {
    length: u32,
    elements: &'a [u8],
}

impl<'a> MsgpackArray<'a> {
    /// Reads an array and validates each element with `check`. `None` if the value is not an array or an element is rejected; the
    /// position of `reader` is unspecified then.
    fn read(
        reader: &mut MsgpackReader<'a>,
        mut check: impl FnMut(&mut MsgpackReader<'a>) -> Result<bool, EventDecodeError>,
    ) -> Result<Option<Self>, EventDecodeError> {
        let MsgpackValue::Array(length) = reader.value()? else { return Ok(None) };
        let start = *reader;
        for _ in 0..length {
            if !check(reader)? {
                return Ok(None);
            }
        }
        Ok(Some(Self { length, elements: reader.since(&start) }))
    }

    fn iter<T>(
        self,
        mut read: impl FnMut(&mut MsgpackReader<'a>) -> Option<T>,
    ) -> impl ExactSizeIterator<Item = T>
    where
        T: Default,
    {
        let mut reader = MsgpackReader::new(self.elements);
        // The elements are validated, so the default is never used.
        (0..self.length).map(move |_| read(&mut reader).unwrap_or_default())
    }
}

/// Hashes of consecutive blocks. Iterating decodes them.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockHashes<'a>(MsgpackArray<'a>);

impl<'a> BlockHashes<'a> {
    pub(super) fn read(reader: &mut MsgpackReader<'a>) -> Result<Option<Self>, EventDecodeError> {
        let list = MsgpackArray::read(reader, |reader| Ok(BlockHash::from_value(reader.value()?).is_some()))?;
        Ok(list.map(Self))
    }

    pub fn len(&self) -> usize {
        self.0.length as usize
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.0.length == 0
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = BlockHash<'a>> + use<'a> {
        self.0.iter(|reader| reader.value().ok().and_then(BlockHash::from_value))
    }
}

impl Default for BlockHash<'_> {
    fn default() -> Self {
        Self::Int(0)
    }
}

/// Tokens of consecutive blocks, one block after the other. Iterating decodes them.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenIds<'a>(MsgpackArray<'a>);

impl<'a> TokenIds<'a> {
    /// `None`, with the value skipped, for anything but an array of 32-bit numbers. (Speculative decoding may send pairs.)
    pub(super) fn read(reader: &mut MsgpackReader<'a>) -> Result<Option<Self>, EventDecodeError> {
        let start = *reader;
        let list = MsgpackArray::read(reader, |reader| Ok(reader.small_uint()?.is_some()))?;
        if list.is_none() {
            *reader = start;
            reader.skip()?;
        }
        Ok(list.map(Self))
    }

    pub fn len(&self) -> usize {
        self.0.length as usize
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.0.length == 0
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + use<'a> {
        self.0.iter(|reader| reader.small_uint().ok().flatten())
    }
}

/// Inputs of the hashes of consecutive blocks other than tokens: a cache salt, a LoRA name, images.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct ExtraKeys<'a>(MsgpackArray<'a>);

/// One input of a hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExtraKey<'a> {
    /// A text. vLLM sends salts and names untagged: only other fields of the event distinguish them.
    Text(&'a str),
    /// Any other value. A hash that depends on it cannot be recomputed.
    #[default]
    Opaque,
}

impl<'a> ExtraKeys<'a> {
    pub(super) fn read(reader: &mut MsgpackReader<'a>) -> Result<Option<Self>, EventDecodeError> {
        let list = MsgpackArray::read(reader, |reader| {
            let value = reader.skip()?;
            Ok(matches!(MsgpackReader::new(value).value()?, MsgpackValue::Nil | MsgpackValue::Array(_)))
        })?;
        Ok(list.map(Self))
    }

    pub fn len(&self) -> usize {
        self.0.length as usize
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.0.length == 0
    }

    /// Whether any block's hash depends on more than tokens.
    pub fn has_any(&self) -> bool {
        self.iter().any(|keys| keys.len() > 0)
    }

    /// Per block, the inputs of its hash, which are mostly empty.
    pub fn iter(
        &self,
    ) -> impl ExactSizeIterator<Item = impl ExactSizeIterator<Item = ExtraKey<'a>> + use<'a>> + use<'a> {
        let blocks = self.0.iter(|reader| {
            let mut block = MsgpackReader::new(reader.skip().ok()?);
            match block.value() {
                Ok(MsgpackValue::Array(length)) => Some(MsgpackArray { length, elements: block.rest() }),
                _ => None,
            }
        });
        blocks.map(|keys| {
            keys.iter(|reader| {
                let mut key = MsgpackReader::new(reader.skip().ok()?);
                match key.value() {
                    Ok(MsgpackValue::Text(text)) => std::str::from_utf8(text).ok().map(ExtraKey::Text),
                    _ => None,
                }
            })
        })
    }
}

impl fmt::Debug for BlockHashes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl fmt::Debug for TokenIds<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl fmt::Debug for ExtraKeys<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(Iterator::collect::<Vec<_>>)).finish()
    }
}
