//! How the blocks of one engine are hashed and named.

use std::borrow::Cow;

use moongate_block_hash::{HashScheme, SglangNamespace, VllmExtraKeys, VllmLoraAdapter};
use moongate_discovery::{
    EngineBlockHashing, EngineFacts, LoraAdapterFacts, StoreKeyScheme, VllmHashAlgorithm,
};
use moongate_scheduler::index::BlockHashNamespace;
use serde::Deserialize;

use super::store_keys::StoreKeyNaming;

/// The rules by which an engine hashes blocks. Engines with equal keyspaces have equal hashes for equal prompts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockKeyspace {
    hashing: EngineBlockHashing,
    block_tokens: u32,
    namespace: BlockHashNamespace,
    /// The LoRA adapter that computes the blocks; `None` is the base model.
    adapter: Option<LoraAdapterFacts>,
}

/// Members of a request that change its block hashes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct BlockExtraKeys<'a> {
    #[serde(borrow)]
    cache_salt: Option<Cow<'a, str>>,
    /// A string, or one per prompt of a batch.
    extra_key: Option<serde_json::Value>,
    /// SGLang's LoRA adapter of a request.
    lora_path: Option<serde_json::Value>,
    /// Whether one of them has another type. SGLang accepts one salt per prompt of a batch.
    #[serde(skip)]
    is_unknown: bool,
}

impl<'a> BlockExtraKeys<'a> {
    /// Reads them from a body that is a valid JSON object. Bodies rarely have any, so the raw bytes are searched first.
    pub(crate) fn read(body: &'a [u8]) -> Self {
        const NAMES: [&[u8]; 3] = [b"\"cache_salt\"", b"\"extra_key\"", b"\"lora_path\""];
        if NAMES.iter().all(|name| memchr::memmem::find(body, name).is_none()) {
            return Self::default();
        }
        serde_json::from_slice(body).unwrap_or(Self { is_unknown: true, ..Self::default() })
    }

    /// Those of a request with this salt.
    pub(crate) fn of_salt(salt: Option<&'a str>) -> Self {
        Self { cache_salt: salt.map(Cow::Borrowed), ..Self::default() }
    }

    /// Whether the request has no member that changes its block hashes.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl BlockKeyspace {
    /// The keyspace of an engine; `None` if it does not report enough.
    pub(crate) fn from_facts(facts: &EngineFacts) -> Option<Self> {
        let hashing = facts.hashing.clone()?;
        let page_tokens = facts.page_size?;
        let family = match hashing {
            EngineBlockHashing::Sglang { .. } => SGLANG,
            EngineBlockHashing::Vllm { .. } => VLLM,
            EngineBlockHashing::Opaque { .. } => REHASHED,
        };
        // Equal tokens have equal hashes in every model, so the namespace includes the model. The store's keys may use another name
        // for it.
        let store_model = match facts.store.as_ref().map(|store| &store.keys) {
            Some(StoreKeyScheme::Sglang { prefix, .. }) => prefix.as_deref(),
            Some(StoreKeyScheme::Vllm { model, .. }) => model.as_deref(),
            Some(StoreKeyScheme::Opaque { .. }) | None => None,
        };
        let model = store_model.or(facts.models.first().map(String::as_str))?;
        Some(Self {
            hashing,
            block_tokens: page_tokens,
            namespace: BlockHashNamespace::new(&[family, model]),
            adapter: None,
        })
    }

    /// The keyspace of requests for one of the engine's models, if that is an adapter with hashes of its own.
    pub(crate) fn for_adapter(&self, model: &str, facts: &EngineFacts) -> Option<Self> {
        let adapter = facts.adapters.iter().find(|adapter| adapter.name == model)?;
        Some(Self { adapter: Some(adapter.clone()), ..self.clone() })
    }

    /// Tokens per block.
    pub(crate) fn page_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Seed of vLLM's hashes.
    pub(crate) fn seed(&self) -> Option<&str> {
        match &self.hashing {
            EngineBlockHashing::Vllm { seed, .. } => Some(seed),
            EngineBlockHashing::Sglang { .. } | EngineBlockHashing::Opaque { .. } => None,
        }
    }

    /// Whether the blocks are those of a LoRA adapter.
    pub(crate) fn is_adapter(&self) -> bool {
        self.adapter.is_some()
    }

    /// How these blocks are named in the engine's store.
    pub(crate) fn store_naming(&self, facts: &EngineFacts) -> Option<StoreKeyNaming> {
        if self.unsupported_rule().is_some() {
            return None;
        }
        StoreKeyNaming::from_store(facts.store.as_ref()?, self.namespace)
    }

    /// Separates blocks of different models.
    pub(crate) fn namespace(&self) -> BlockHashNamespace {
        self.namespace
    }

    /// Hash schemes of a request; `None` if it has a member whose effect is unknown.
    pub(crate) fn schemes(&self, extras: &BlockExtraKeys<'_>) -> Option<BlockSchemes> {
        if extras.lora_path.is_some() || extras.is_unknown {
            return None;
        }
        match &self.hashing {
            EngineBlockHashing::Sglang { namespaced, bigrams } => self.sglang(*namespaced, *bigrams, extras),
            EngineBlockHashing::Vllm { algorithm, seed } => {
                let adapter = self.adapter.as_ref();
                let adapter = adapter
                    .map(|adapter| VllmLoraAdapter { name: &adapter.name, path: adapter.path.as_deref() });
                let extra = VllmExtraKeys { adapter, cache_salt: extras.cache_salt.as_deref() };
                let make = match algorithm {
                    VllmHashAlgorithm::Sha256 => HashScheme::vllm_sha256,
                    VllmHashAlgorithm::Sha256Cbor => HashScheme::vllm_sha256_cbor,
                };
                make(self.block_tokens, seed, extra).ok().map(BlockSchemes::same_scheme)
            }
            // Blocks are hashed again from the tokens and the salt in events.
            EngineBlockHashing::Opaque { .. } => {
                if extras.extra_key.is_some() || self.adapter.is_some() {
                    return None;
                }
                let scheme = HashScheme::sglang_events(self.block_tokens, extras.cache_salt.as_deref());
                scheme.ok().map(BlockSchemes::same_scheme)
            }
        }
    }

    /// The name of a rule that predictions cannot compute.
    pub(crate) fn unsupported_rule(&self) -> Option<&str> {
        match &self.hashing {
            EngineBlockHashing::Opaque { name } => Some(name),
            EngineBlockHashing::Sglang { .. } | EngineBlockHashing::Vllm { .. } => None,
        }
    }

    /// Other rules that engines of this kind are known to use, with names for operators.
    pub(crate) fn other_rules(&self) -> Vec<(String, HashScheme)> {
        let named = |name: String, scheme: Result<HashScheme, _>| scheme.ok().map(|scheme| (name, scheme));
        match &self.hashing {
            EngineBlockHashing::Vllm { seed, .. } => {
                let seeds = [seed.as_str(), moongate_block_hash::DEFAULT_VLLM_SEED, "0", "1", "42"];
                let rules = seeds.into_iter().flat_map(|seed| {
                    let extra = VllmExtraKeys::default();
                    let pickle = HashScheme::vllm_sha256(self.block_tokens, seed, extra);
                    let cbor = HashScheme::vllm_sha256_cbor(self.block_tokens, seed, extra);
                    [
                        named(format!("sha256 with hash seed {seed:?}"), pickle),
                        named(format!("sha256_cbor with hash seed {seed:?}"), cbor),
                    ]
                });
                rules.flatten().collect()
            }
            EngineBlockHashing::Sglang { bigrams, .. } => {
                let namespace = SglangNamespace::default();
                let (name, scheme) = if *bigrams {
                    ("single tokens, without speculation", HashScheme::sglang(self.block_tokens, namespace))
                } else {
                    (
                        "pairs of tokens, for speculation",
                        HashScheme::sglang_bigrams(self.block_tokens, namespace),
                    )
                };
                named(name.to_owned(), scheme).into_iter().collect()
            }
            EngineBlockHashing::Opaque { .. } => Vec::new(),
        }
    }

    fn sglang(
        &self,
        namespaced: Option<bool>,
        bigrams: bool,
        extras: &BlockExtraKeys<'_>,
    ) -> Option<BlockSchemes> {
        if extras.is_empty() || namespaced == Some(false) {
            let make = if bigrams { HashScheme::sglang_bigrams } else { HashScheme::sglang };
            return make(self.block_tokens, SglangNamespace::default()).ok().map(BlockSchemes::same_scheme);
        }
        // How a namespace affects events with bigrams is not verified.
        if bigrams || namespaced.is_none() {
            return None;
        }
        let extra_key = match &extras.extra_key {
            None => None,
            Some(serde_json::Value::String(key)) => Some(key.as_str()),
            Some(_) => return None,
        };
        let cache_salt = extras.cache_salt.as_deref();
        let stored = HashScheme::sglang(self.block_tokens, SglangNamespace { extra_key, cache_salt }).ok()?;
        Some(BlockSchemes {
            events: HashScheme::sglang_events(self.block_tokens, cache_salt).ok()?,
            store: Some(stored),
        })
    }
}

/// Hash schemes of one request's blocks.
#[derive(Debug, Clone)]
pub(crate) struct BlockSchemes {
    /// Hashes in the engine's events.
    pub(crate) events: HashScheme,
    /// Hashes in the store, if they differ.
    pub(crate) store: Option<HashScheme>,
}

impl BlockSchemes {
    fn same_scheme(scheme: HashScheme) -> Self {
        Self { events: scheme, store: None }
    }
}

/// Namespace prefix of SGLang's hashes.
const SGLANG: &str = "sglang";
/// Namespace prefix of hashes that are computed from the tokens of events.
const REHASHED: &str = "rehashed";
/// Namespace prefix of vLLM's hashes.
const VLLM: &str = "vllm";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_have_hashes_of_their_own() {
        let adapter = |name: &str| LoraAdapterFacts { name: name.to_owned(), path: Some(format!("/{name}")) };
        let facts = EngineFacts {
            adapters: vec![adapter("poet"), adapter("coder")],
            ..EngineFacts::unreported(moongate_discovery::EngineKind::Vllm)
        };
        let base = BlockKeyspace {
            hashing: EngineBlockHashing::Vllm { algorithm: VllmHashAlgorithm::Sha256Cbor, seed: "0".into() },
            block_tokens: 2,
            namespace: BlockHashNamespace::new(&["vllm", "m"]),
            adapter: None,
        };
        let hash = |keyspace: &BlockKeyspace| {
            let scheme = keyspace.schemes(&BlockExtraKeys::default()).unwrap().events;
            let mut blocks = Vec::new();
            moongate_block_hash::BlockHashChain::new(scheme).extend(&[1, 2], &mut blocks);
            blocks[0].event_hash
        };
        let [poet, coder] = ["poet", "coder"].map(|name| base.for_adapter(name, &facts).unwrap());
        assert!(hash(&base) != hash(&poet) && hash(&poet) != hash(&coder) && poet != coder);
        assert_eq!(base.for_adapter("m", &facts), None);
    }

    #[test]
    fn extra_keys_are_read_from_the_top_level() {
        assert!(BlockExtraKeys::read(br#"{"messages":[]}"#).is_empty());
        let extras = BlockExtraKeys::read(br#"{"a":{"cache_salt":"inner"},"cache_salt":"t\n1","x":1}"#);
        assert_eq!(extras.cache_salt.as_deref(), Some("t\n1"));
        assert!(BlockExtraKeys::read(br#"{"cache_salt":["a","b"]}"#).is_unknown, "one per prompt");
        assert!(!BlockExtraKeys::read(br#"{"lora_path":"x"}"#).is_empty());
    }
}
