//! Hash schemes of the engines.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::{cbor, pickle};

/// Maximum tokens of a block or chunk. Engines use 1 to 256; the limit keeps a block's pickle in one frame.
pub const MAX_BLOCK_TOKENS: u32 = 8192;
/// Maximum total bytes of the strings in vLLM's extra keys (adapter name and path, cache salt).
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
    LmcacheBuiltin {
        root: u64,
    },
}

/// Encoded inputs of vLLM's hash other than tokens.
#[derive(Debug)]
pub(crate) struct VllmHashInputs {
    pub(crate) root: [u8; 32],
    pub(crate) first_block_extra: Vec<u8>,
    pub(crate) later_block_extra: Vec<u8>,
}

/// Namespace that separates SGLang's chains of equal tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SglangNamespace<'a> {
    /// Value of the request's `extra_key`.
    pub extra_key: Option<&'a str>,
    /// Value of the request's `cache_salt`.
    pub cache_salt: Option<&'a str>,
}

/// A LoRA adapter of vLLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VllmLoraAdapter<'a> {
    /// Name of the adapter.
    pub name: &'a str,
    /// Path that the engine loads it from. vLLM 0.32 hashes name and path, older releases only the name.
    pub path: Option<&'a str>,
}

/// What vLLM hashes into blocks besides their tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VllmExtraKeys<'a> {
    /// The request's adapter, hashed into every block.
    pub adapter: Option<VllmLoraAdapter<'a>>,
    /// The request's `cache_salt`, hashed into the first block.
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
        let encoded = |with_salt| {
            let mut out = Vec::new();
            extra.pickle(&mut out, with_salt);
            out
        };
        let root = Sha256::digest(&buffer).into();
        let vllm =
            VllmHashInputs { root, first_block_extra: encoded(true), later_block_extra: encoded(false) };
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
        let encoded = |with_salt| {
            let mut out = Vec::new();
            extra.cbor(&mut out, with_salt);
            out
        };
        let root = vllm_cbor_root(seed);
        let vllm =
            VllmHashInputs { root, first_block_extra: encoded(true), later_block_extra: encoded(false) };
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
        Self::new(chunk_tokens, HashAlgorithm::LmcacheBuiltin { root })
    }

    /// The root of LMCache's chains inside a vLLM that runs `sha256_cbor` with this seed.
    #[must_use]
    pub fn lmcache_root_of_vllm(seed: &str) -> u64 {
        crate::block::first_u64(&vllm_cbor_root(seed))
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

impl VllmExtraKeys<'_> {
    fn check(&self, seed: &str) -> Result<(), HashSchemeError> {
        let adapter = self.adapter.map_or(0, |adapter| adapter.name.len() + adapter.path.map_or(0, str::len));
        let bytes = seed.len() + adapter + self.cache_salt.map_or(0, str::len);
        if bytes > MAX_EXTRA_KEY_BYTES { Err(HashSchemeError::ExtraKeysTooLong(bytes)) } else { Ok(()) }
    }

    /// Items of the extra keys: plain strings, or tuples that start with a tag.
    fn items(&self, with_salt: bool) -> Vec<Vec<&str>> {
        let adapter = self.adapter.map(|VllmLoraAdapter { name, path }| match path {
            Some(path) => vec!["lora", name, path],
            None => vec![name],
        });
        let salt = self.cache_salt.filter(|_| with_salt).map(|salt| vec!["cache_salt", salt]);
        adapter.into_iter().chain(salt).collect()
    }

    fn pickle(&self, out: &mut Vec<u8>, with_salt: bool) {
        let items = self.items(with_salt);
        if items.is_empty() {
            return pickle::none(out);
        }
        for item in &items {
            item.iter().for_each(|text| pickle::text(out, text));
            if item.len() > 1 {
                pickle::end_tuple(out, item.len());
            }
        }
        pickle::end_tuple(out, items.len());
    }

    fn cbor(&self, out: &mut Vec<u8>, with_salt: bool) {
        let items = self.items(with_salt);
        if items.is_empty() {
            return out.push(cbor::NULL);
        }
        cbor::array(out, items.len());
        for item in &items {
            if item.len() > 1 {
                cbor::array(out, item.len());
            }
            item.iter().for_each(|text| cbor::text(out, text));
        }
    }
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

    #[test]
    fn extra_keys_are_pickled_as_python_does() {
        // pickle.dumps((("lora", "n", "/p"), ("cache_salt", "t1")), 5) without header and STOP, from CPython.
        let expected = b"\x8c\x04lora\x94\x8c\x01n\x94\x8c\x02/p\x94\x87\x94\x8c\x0acache_salt\x94\x8c\x02t1\x94\x86\x94\x86\x94";
        let adapter = Some(VllmLoraAdapter { name: "n", path: Some("/p") });
        let extra = VllmExtraKeys { adapter, cache_salt: Some("t1") };
        let mut out = Vec::new();
        extra.pickle(&mut out, true);
        assert_eq!(out, expected);
    }
}
