//! What vLLM hashes into blocks besides their tokens: adapter, media and salt (`generate_block_hash_extra_keys` of version 0.32).

use std::sync::Arc;

use crate::hash_scheme::{HashSchemeError, MAX_EXTRA_KEY_BYTES};
use crate::{cbor, pickle};

/// Values that a pickle memoizes before the extra keys: the parent's digest and the tuple of tokens.
const MEMOIZED_BEFORE: u8 = 2;
/// Tag of media.
const MEDIA_TAG: &str = "mm";
/// Encoded bytes of one media item besides its identifier.
const MEDIA_OVERHEAD_BYTES: usize = 32;

/// A LoRA adapter of vLLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VllmLoraAdapter<'a> {
    /// Name of the adapter.
    pub name: &'a str,
    /// Path that the engine loads it from. vLLM 0.32 hashes name and path, older releases only the name.
    pub path: Option<&'a str>,
}

/// What vLLM hashes into all blocks of a request besides their tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VllmExtraKeys<'a> {
    /// The request's adapter, hashed into every block.
    pub adapter: Option<VllmLoraAdapter<'a>>,
    /// The request's `cache_salt`, hashed into the first block.
    pub cache_salt: Option<&'a str>,
}

/// An image, recording or video in a prompt of vLLM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VllmMediaItem {
    /// The engine's hash of the content and of the options with which it is processed, or the client's `uuid`.
    pub identifier: Arc<str>,
    /// Its first token.
    pub offset: u32,
    /// Number of its tokens.
    pub length: u32,
}

/// How extra keys are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VllmEncoding {
    Pickle,
    Cbor,
}

/// Inputs of vLLM's hash other than tokens.
#[derive(Debug, Clone)]
pub(crate) struct VllmHashInputs {
    pub(crate) root: [u8; 32],
    encoding: VllmEncoding,
    adapter: EncodedItems,
    salt: EncodedItems,
    /// Sorted by their tokens.
    media: Vec<VllmMediaItem>,
}

/// Items of the extra keys that are the same for several blocks.
#[derive(Debug, Clone, Default)]
struct EncodedItems {
    bytes: Vec<u8>,
    count: usize,
    /// Values that a pickle memoizes for them.
    memoized: u8,
}

impl VllmHashInputs {
    pub(crate) fn new(root: [u8; 32], encoding: VllmEncoding, extra: VllmExtraKeys<'_>) -> Self {
        let adapter = extra.adapter.map(|VllmLoraAdapter { name, path }| match path {
            Some(path) => vec!["lora", name, path],
            None => vec![name],
        });
        let salt = extra.cache_salt.map(|salt| vec!["cache_salt", salt]);
        let encoded = |item: Option<Vec<&str>>| item.map(|item| EncodedItems::of(&item, encoding));
        let (adapter, salt) = (encoded(adapter).unwrap_or_default(), encoded(salt).unwrap_or_default());
        Self { root, encoding, adapter, salt, media: Vec::new() }
    }

    pub(crate) fn with_media(&self, media: Vec<VllmMediaItem>) -> Self {
        Self { media, ..self.clone() }
    }

    /// Writes the extra keys of a block.
    pub(crate) fn write_extra_keys(&self, out: &mut Vec<u8>, block: u32, block_tokens: u32) {
        let start = i64::from(block) * i64::from(block_tokens);
        let media = self.media_in(start, start + i64::from(block_tokens));
        let salt = if block == 0 { self.salt.bytes.as_slice() } else { &[] };
        let salts = if block == 0 { self.salt.count } else { 0 };
        let count = self.adapter.count + media.len() + salts;
        match self.encoding {
            VllmEncoding::Pickle if count == 0 => pickle::none(out),
            VllmEncoding::Cbor if count == 0 => out.push(cbor::NULL),
            VllmEncoding::Pickle => {
                pickle::begin_tuple(out, count);
                out.extend_from_slice(&self.adapter.bytes);
                for (number, item) in media.iter().enumerate() {
                    // Python's tag is one object, which a pickle writes once.
                    match number {
                        0 => pickle::text(out, MEDIA_TAG),
                        _ => pickle::reference(out, MEMOIZED_BEFORE + self.adapter.memoized),
                    }
                    pickle::text(out, &item.identifier);
                    pickle::signed(out, item.relative_to(start));
                    pickle::end_tuple(out, 3);
                }
                out.extend_from_slice(salt);
                pickle::end_tuple(out, count);
            }
            VllmEncoding::Cbor => {
                cbor::array(out, count);
                out.extend_from_slice(&self.adapter.bytes);
                for item in media {
                    cbor::array(out, 3);
                    cbor::text(out, MEDIA_TAG);
                    cbor::text(out, &item.identifier);
                    cbor::signed(out, i64::from(item.relative_to(start)));
                }
                out.extend_from_slice(salt);
            }
        }
    }

    /// Media that have tokens from `start` on and before `end`.
    fn media_in(&self, start: i64, end: i64) -> &[VllmMediaItem] {
        let first = self.media.partition_point(|item| item.end() <= start);
        let after = self.media.partition_point(|item| i64::from(item.offset) < end);
        self.media.get(first..after).unwrap_or_default()
    }
}

impl EncodedItems {
    /// One item: a plain string, or a tuple that starts with a tag.
    fn of(item: &[&str], encoding: VllmEncoding) -> Self {
        let mut bytes = Vec::new();
        let is_tuple = item.len() > 1;
        match encoding {
            VllmEncoding::Pickle => {
                item.iter().for_each(|text| pickle::text(&mut bytes, text));
                if is_tuple {
                    pickle::end_tuple(&mut bytes, item.len());
                }
            }
            VllmEncoding::Cbor => {
                if is_tuple {
                    cbor::array(&mut bytes, item.len());
                }
                item.iter().for_each(|text| cbor::text(&mut bytes, text));
            }
        }
        let memoized = item.len() + usize::from(is_tuple);
        Self { bytes, count: 1, memoized: u8::try_from(memoized).unwrap_or(u8::MAX) }
    }
}

impl VllmMediaItem {
    fn end(&self) -> i64 {
        i64::from(self.offset) + i64::from(self.length)
    }

    /// Position of the first token relative to a block's. It is checked to fit.
    fn relative_to(&self, start: i64) -> i32 {
        i32::try_from(i64::from(self.offset) - start).unwrap_or(i32::MIN)
    }

    /// Checks that the items are sorted, and that their keys fit into the encoding of each block.
    pub(crate) fn check(media: &[Self], block_tokens: u32) -> Result<(), HashSchemeError> {
        let in_order = media.windows(2).all(|pair| pair[0].end() <= i64::from(pair[1].offset));
        let is_valid = |item: &Self| item.length > 0 && item.end() <= i64::from(i32::MAX);
        if !in_order || !media.iter().all(is_valid) {
            return Err(HashSchemeError::MediaOrder);
        }
        for (number, first) in media.iter().enumerate() {
            // The items that may share a block with the end of this one.
            let shared = media[number..]
                .iter()
                .take_while(|item| i64::from(item.offset) < first.end() + i64::from(block_tokens));
            let bytes: usize = shared.map(|item| item.identifier.len() + MEDIA_OVERHEAD_BYTES).sum();
            if bytes > MAX_EXTRA_KEY_BYTES {
                return Err(HashSchemeError::ExtraKeysTooLong(bytes));
            }
        }
        Ok(())
    }
}

impl VllmExtraKeys<'_> {
    pub(crate) fn check(&self, seed: &str) -> Result<(), HashSchemeError> {
        let adapter = self.adapter.map_or(0, |adapter| adapter.name.len() + adapter.path.map_or(0, str::len));
        let bytes = seed.len() + adapter + self.cache_salt.map_or(0, str::len);
        if bytes > MAX_EXTRA_KEY_BYTES { Err(HashSchemeError::ExtraKeysTooLong(bytes)) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(media: Vec<VllmMediaItem>) -> VllmHashInputs {
        let adapter = Some(VllmLoraAdapter { name: "n", path: Some("/p") });
        let extra = VllmExtraKeys { adapter, cache_salt: Some("t1") };
        VllmHashInputs::new([0; 32], VllmEncoding::Pickle, extra).with_media(media)
    }

    fn item(offset: u32, length: u32) -> VllmMediaItem {
        VllmMediaItem { identifier: "0123456789".into(), offset, length }
    }

    #[test]
    fn extra_keys_are_pickled_as_python_does() {
        // pickle.dumps((("lora", "n", "/p"), ("cache_salt", "t1")), 5) without header and STOP, from CPython.
        let expected = b"\x8c\x04lora\x94\x8c\x01n\x94\x8c\x02/p\x94\x87\x94\x8c\x0acache_salt\x94\x8c\x02t1\x94\x86\x94\x86\x94";
        let mut out = Vec::new();
        inputs(Vec::new()).write_extra_keys(&mut out, 0, 16);
        assert_eq!(out, expected);
    }

    #[test]
    fn media_are_in_the_blocks_that_have_their_tokens() {
        let inputs = inputs(vec![item(15, 2), item(17, 15), item(40, 1)]);
        let found = |block: i64| {
            let media = inputs.media_in(16 * block, 16 * block + 16);
            media.iter().map(|item| item.offset).collect::<Vec<_>>()
        };
        assert_eq!([0, 1, 2, 3].map(found), [vec![15], vec![15, 17], vec![40], vec![]]);
    }

    #[test]
    fn media_out_of_order_are_rejected() {
        let check = |media: &[VllmMediaItem]| VllmMediaItem::check(media, 16);
        assert_eq!(check(&[item(3, 4), item(7, 1)]), Ok(()));
        assert_eq!(check(&[item(3, 4), item(6, 1)]), Err(HashSchemeError::MediaOrder));
        assert_eq!(check(&[item(3, 0)]), Err(HashSchemeError::MediaOrder));
        assert_eq!(check(&[item(u32::MAX, 4)]), Err(HashSchemeError::MediaOrder));
        let many: Vec<_> = (0..200).map(|number| item(number, 1)).collect();
        assert_eq!(check(&many), Ok(()), "17 of them share a block");
        assert!(VllmMediaItem::check(&many, 150).is_err());
    }
}
