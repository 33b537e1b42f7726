//! Lists inside an event, read when they are asked for.

use std::fmt;

use super::EventDecodeError;
use super::reader::{MsgpackReader, MsgpackValue};

/// Shortest hash that travels as bytes. vLLM's are 16 (xxhash) and 32 (SHA-256) long.
const DIGEST_BYTES: usize = 8;

/// An engine's name for a block and all before it. Equal only among engines with the same hash function and settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockHash<'a> {
    /// 64 bits. SGLang sends them signed; here they are unsigned with the same bits.
    Int(u64),
    /// The whole digest, 8 bytes or more.
    Digest(&'a [u8]),
}

impl<'a> BlockHash<'a> {
    /// 64 bits of the hash: for a digest its last 8 bytes, which is what vLLM sends where it sends integers.
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

/// Elements of an array that has been checked already.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct MsgpackArray<'a> {
    length: u32,
    elements: &'a [u8],
}

impl<'a> MsgpackArray<'a> {
    /// Reads an array, all of whose elements `check` must take. `None` if it is none or has another element; then `reader` is
    /// anywhere.
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
        // Elements have been checked, so that nothing falls back to a default.
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

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.0.length as usize
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.length == 0
    }

    /// The hashes in order.
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
    /// `None`, and past the value, if it is anything but an array of 32-bit numbers. (Speculative decoding may have pairs.)
    pub(super) fn read(reader: &mut MsgpackReader<'a>) -> Result<Option<Self>, EventDecodeError> {
        let start = *reader;
        let list = MsgpackArray::read(reader, |reader| Ok(reader.small_uint()?.is_some()))?;
        if list.is_none() {
            *reader = start;
            reader.skip()?;
        }
        Ok(list.map(Self))
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.0.length as usize
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.length == 0
    }

    /// The tokens in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + use<'a> {
        self.0.iter(|reader| reader.small_uint().ok().flatten())
    }
}

/// What besides tokens went into the hashes of consecutive blocks: a cache salt, a LoRA's name, images.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct ExtraKeys<'a>(MsgpackArray<'a>);

/// One such thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExtraKey<'a> {
    /// A text. vLLM sends salts and names untagged, so that only the rest of the event tells which it is.
    Text(&'a str),
    /// Anything else. A hash that depends on it cannot be computed again.
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

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.0.length as usize
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.length == 0
    }

    /// Whether some block's hash depends on more than tokens.
    pub fn has_any(&self) -> bool {
        self.iter().any(|keys| keys.len() > 0)
    }

    /// For each block what its hash depends on, which is mostly nothing.
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
