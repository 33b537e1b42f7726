//! Hash schemes of the engines.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::vllm_extra_keys::{VllmEncoding, VllmExtraKeys, VllmHashInputs, VllmMediaItem};
use crate::{cbor, pickle, python};

/// Maximum tokens of a block or chunk. Engines use 1 to 256; the limit keeps a block's pickle in one frame.
pub const MAX_BLOCK_TOKENS: u32 = 8192;
/// Maximum total bytes of the strings in vLLM's extra keys: adapter name and path with the cache salt, and the media of one block.
pub const MAX_EXTRA_KEY_BYTES: usize = 4096;
/// Default chunk size of LMCache in tokens.
pub const LMCACHE_CHUNK_TOKENS: u32 = 256;
/// Seed of vLLM's hash chains when `PYTHONHASHSEED` is not set.
pub const DEFAULT_VLLM_SEED: &str = "vllm-none-hash";
const SGLANG_NAMESPACE: &[u8] = b"sglang-cache-namespace-v1";
const SGLANG_EVENT_SALT: &[u8] = b"sglang-cache-salt-v1\0";
const SGLANG_EVENT_NAMESPACE: &[u8] = b"sglang-kv-event-namespace-v1";

/// How an engine hashes blocks: algorithm, block size and namespace. Cheap to clone.
///
/// A request's namespace (salt, adapter) is part of the scheme, because it changes every hash of the chain.
#[derive(Debug, Clone)]
pub struct HashScheme {
    pub(crate) algorithm: HashAlgorithm,
    pub(crate) block_tokens: u32,
}

/// Why a scheme cannot be created.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HashSchemeError {
    /// The block size is out of bounds.
    #[error("a block of {0} tokens: it must have 1 to {MAX_BLOCK_TOKENS}")]
    BlockTokens(u32),
    /// Adapter and salt exceed the limit together.
    #[error("extra keys of {0} bytes: the maximum is {MAX_EXTRA_KEY_BYTES}")]
    ExtraKeysTooLong(usize),
    /// The scheme has no rule for images.
    #[error("media are only hashed by vLLM")]
    MediaUnsupported,
    /// Ranges of tokens that overlap, are empty or are not sorted.
    #[error("the token ranges of media are not in order")]
    MediaOrder,
}

#[derive(Debug, Clone)]
pub(crate) enum HashAlgorithm {
    Sglang {
        root: Option<[u8; 32]>,
        bigrams: bool,
        /// Hashed together with each hash that is published.
        event_seed: Option<[u8; 32]>,
    },
    VllmPickle(Arc<VllmHashInputs>),
    VllmCbor(Arc<VllmHashInputs>),
    LmcacheCbor {
        root: u64,
    },
    /// `root` is Python's hash of the root.
    LmcacheBuiltin {
        root: i64,
    },
}

/// Namespace that separates SGLang's chains of equal tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SglangNamespace<'a> {
    /// Value of the request's `extra_key`.
    pub extra_key: Option<&'a str>,
    /// Value of the request's `cache_salt`.
    pub cache_salt: Option<&'a str>,
}

impl HashScheme {
    /// SGLang's block hash: SHA-256 over the previous digest and the tokens as 32-bit little-endian numbers.
    ///
    /// SGLang up to 0.5.6 ignores `extra_key` in the hash: pass the default namespace there.
    ///
    /// # Errors
    /// The block size is out of bounds.
    pub fn sglang(block_tokens: u32, namespace: SglangNamespace<'_>) -> Result<Self, HashSchemeError> {
        let root = namespace.seed(SGLANG_NAMESPACE);
        Self::new(block_tokens, HashAlgorithm::Sglang { root, bigrams: false, event_seed: None })
    }

    /// The hashes in SGLang 0.5.23's KV events. Without a namespace they equal those of [`HashScheme::sglang`]. With one they do not:
    /// events include only the request's `cache_salt`, so blocks that differ in `extra_key` have the same hash.
    ///
    /// # Errors
    /// The block size is out of bounds.
    pub fn sglang_events(block_tokens: u32, cache_salt: Option<&str>) -> Result<Self, HashSchemeError> {
        let root = cache_salt
            .map(|salt| Sha256::new_with_prefix(SGLANG_EVENT_SALT).chain_update(salt).finalize().into());
        Self::new(block_tokens, HashAlgorithm::Sglang { root, bigrams: false, event_seed: None })
    }

    /// SGLang's events with hashes of a namespace: [`HashScheme::sglang_events`], hashed once more. LoRA adapters have a namespace
    /// of their `extra_key` in all events, other requests only in the event format `dynamo`.
    ///
    /// # Errors
    /// The block size is out of bounds.
    pub fn sglang_namespaced_events(
        block_tokens: u32,
        cache_salt: Option<&str>,
        namespace: SglangNamespace<'_>,
    ) -> Result<Self, HashSchemeError> {
        let mut scheme = Self::sglang_events(block_tokens, cache_salt)?;
        if let HashAlgorithm::Sglang { event_seed, .. } = &mut scheme.algorithm {
            *event_seed = namespace.seed(SGLANG_EVENT_NAMESPACE);
        }
        Ok(scheme)
    }

    /// SGLang with EAGLE speculation, which hashes pairs of adjacent tokens: a block is complete one token later.
    ///
    /// # Errors
    /// The block size is out of bounds.
    pub fn sglang_bigrams(
        block_tokens: u32,
        namespace: SglangNamespace<'_>,
    ) -> Result<Self, HashSchemeError> {
        let mut scheme = Self::sglang(block_tokens, namespace)?;
        if let HashAlgorithm::Sglang { bigrams, .. } = &mut scheme.algorithm {
            *bigrams = true;
        }
        Ok(scheme)
    }

    /// vLLM's `sha256`: SHA-256 over a Python pickle. `seed` is the engine's `PYTHONHASHSEED`, or
    /// [`DEFAULT_VLLM_SEED`].
    ///
    /// # Errors
    /// The block size is out of bounds, or `seed` or `extra` are too long.
    pub fn vllm_sha256(
        block_tokens: u32,
        seed: &str,
        extra: VllmExtraKeys<'_>,
    ) -> Result<Self, HashSchemeError> {
        extra.check(seed)?;
        let mut buffer = Vec::new();
        pickle::begin(&mut buffer);
        pickle::text(&mut buffer, seed);
        pickle::finish(&mut buffer);
        let vllm = VllmHashInputs::new(Sha256::digest(&buffer).into(), VllmEncoding::Pickle, extra);
        Self::new(block_tokens, HashAlgorithm::VllmPickle(Arc::new(vllm)))
    }

    /// vLLM's `sha256_cbor`: SHA-256 over canonical CBOR. `seed` as in [`HashScheme::vllm_sha256`].
    ///
    /// # Errors
    /// The block size is out of bounds, or `seed` or `extra` are too long.
    pub fn vllm_sha256_cbor(
        block_tokens: u32,
        seed: &str,
        extra: VllmExtraKeys<'_>,
    ) -> Result<Self, HashSchemeError> {
        extra.check(seed)?;
        let vllm = VllmHashInputs::new(vllm_cbor_root(seed), VllmEncoding::Cbor, extra);
        Self::new(block_tokens, HashAlgorithm::VllmCbor(Arc::new(vllm)))
    }

    /// LMCache's `sha256_cbor`: the first 8 bytes of SHA-256 over canonical CBOR. `root` is the parent of the first chunk: 0, or with vLLM
    /// the value of [`HashScheme::lmcache_root_of_vllm`].
    ///
    /// # Errors
    /// The chunk size is out of bounds.
    pub fn lmcache_sha256_cbor(chunk_tokens: u32, root: u64) -> Result<Self, HashSchemeError> {
        Self::new(chunk_tokens, HashAlgorithm::LmcacheCbor { root })
    }

    /// LMCache's `builtin`: Python's `hash` of nested tuples. `root` as in [`HashScheme::lmcache_sha256_cbor`].
    ///
    /// # Errors
    /// The chunk size is out of bounds.
    pub fn lmcache_builtin(chunk_tokens: u32, root: u64) -> Result<Self, HashSchemeError> {
        Self::new(chunk_tokens, HashAlgorithm::LmcacheBuiltin { root: python::unsigned(root) })
    }

    /// LMCache's `builtin` for chunks after one with this hash, which is a signed number.
    ///
    /// # Errors
    /// The chunk size is out of bounds.
    pub fn lmcache_builtin_after(chunk_tokens: u32, parent: i64) -> Result<Self, HashSchemeError> {
        Self::new(chunk_tokens, HashAlgorithm::LmcacheBuiltin { root: python::signed(parent) })
    }

    /// The parent of a chunk with this hash under LMCache's `builtin`: for the first chunk of a prompt, the root, which differs in every
    /// process without a `PYTHONHASHSEED`. `None` if the hash follows another rule; only three of four are recognized.
    #[must_use]
    pub fn lmcache_builtin_parent(chunk: &[u32], hash: u64) -> Option<i64> {
        let tokens = python::tuple(chunk.iter().map(|&token| i64::from(token)));
        python::first_of_tuple(hash as i64, &[tokens, python::tuple([].into_iter())])
    }

    /// The root of LMCache's chains inside a vLLM that runs `sha256_cbor` with this seed.
    #[must_use]
    pub fn lmcache_root_of_vllm(seed: &str) -> u64 {
        crate::block::first_u64(&vllm_cbor_root(seed))
    }

    /// The scheme of a prompt with images, recordings or videos, in the order of their tokens. vLLM hashes each of them into the blocks that
    /// have any of its tokens.
    ///
    /// # Errors
    /// The scheme is not vLLM's, or the items are out of order or too many for one block.
    pub fn with_media(self, media: Vec<VllmMediaItem>) -> Result<Self, HashSchemeError> {
        VllmMediaItem::check(&media, self.block_tokens)?;
        let algorithm = match self.algorithm {
            HashAlgorithm::VllmPickle(vllm) => HashAlgorithm::VllmPickle(Arc::new(vllm.with_media(media))),
            HashAlgorithm::VllmCbor(vllm) => HashAlgorithm::VllmCbor(Arc::new(vllm.with_media(media))),
            HashAlgorithm::Sglang { .. }
            | HashAlgorithm::LmcacheCbor { .. }
            | HashAlgorithm::LmcacheBuiltin { .. } => return Err(HashSchemeError::MediaUnsupported),
        };
        Ok(Self { algorithm, block_tokens: self.block_tokens })
    }

    /// Number of tokens per block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    fn new(block_tokens: u32, algorithm: HashAlgorithm) -> Result<Self, HashSchemeError> {
        if !(1..=MAX_BLOCK_TOKENS).contains(&block_tokens) {
            return Err(HashSchemeError::BlockTokens(block_tokens));
        }
        Ok(Self { algorithm, block_tokens })
    }
}

impl SglangNamespace<'_> {
    /// SHA-256 over a tag and the parts; `None` without any.
    fn seed(&self, tag: &[u8]) -> Option<[u8; 32]> {
        let Self { extra_key, cache_salt } = *self;
        (extra_key.is_some() || cache_salt.is_some()).then(|| {
            let mut hasher = Sha256::new_with_prefix(tag);
            for part in [extra_key, cache_salt] {
                let Some(part) = part else {
                    hasher.update([0]);
                    continue;
                };
                hasher.update([1]);
                hasher.update((part.len() as u64).to_le_bytes());
                hasher.update(part);
            }
            hasher.finalize().into()
        })
    }
}

fn vllm_cbor_root(seed: &str) -> [u8; 32] {
    let mut buffer = Vec::new();
    cbor::text(&mut buffer, seed);
    Sha256::digest(&buffer).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_out_of_bounds_are_rejected() {
        let none = SglangNamespace::default();
        assert_eq!(HashScheme::sglang(0, none).unwrap_err(), HashSchemeError::BlockTokens(0));
        assert!(HashScheme::sglang(MAX_BLOCK_TOKENS + 1, none).is_err());
        let salt = "s".repeat(MAX_EXTRA_KEY_BYTES);
        let extra = VllmExtraKeys { adapter: None, cache_salt: Some(&salt) };
        assert!(HashScheme::vllm_sha256(16, "", extra).is_ok());
        assert_eq!(
            HashScheme::vllm_sha256(16, "0", extra).unwrap_err(),
            HashSchemeError::ExtraKeysTooLong(MAX_EXTRA_KEY_BYTES + 1)
        );
    }
}
