//! How the pages of one engine are named.

use std::borrow::Cow;

use moongate_block_hash::{HashScheme, SglangNamespace, VllmExtraKeys};
use moongate_discovery::{
    EngineBlockHashing, EngineFacts, EngineInstance, StoreKeyScheme, VllmHashAlgorithm,
};
use moongate_scheduler::index::BlockHashNamespace;
use serde::Deserialize;

use super::store_keys::StoreKeyNaming;

/// The rules by which an engine names pages. Engines with equal keyspaces name equal prompts alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockKeyspace {
    hashing: EngineBlockHashing,
    block_tokens: u32,
    namespace: BlockHashNamespace,
}

/// Members of a request that change its pages' names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct BlockExtraKeys<'a> {
    #[serde(borrow)]
    cache_salt: Option<Cow<'a, str>>,
    /// A text, or one per prompt of a batch.
    extra_key: Option<serde_json::Value>,
    /// SGLang's adapter of a request.
    lora_path: Option<serde_json::Value>,
}

impl<'a> BlockExtraKeys<'a> {
    /// Reads them from a body that is known to be a JSON object. Bodies rarely have any, so the text is searched first.
    pub(crate) fn read(body: &'a [u8]) -> Self {
        const NAMES: [&[u8]; 3] = [b"\"cache_salt\"", b"\"extra_key\"", b"\"lora_path\""];
        if NAMES.iter().all(|name| memchr::memmem::find(body, name).is_none()) {
            return Self::default();
        }
        // What cannot be read is the engine's to refuse.
        serde_json::from_slice(body).unwrap_or_default()
    }

    /// Whether the request carries nothing that changes its pages' names.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl BlockKeyspace {
    /// The keyspace of an engine; `None` if its names cannot be computed or it does not tell enough.
    pub(crate) fn from_instance(instance: &EngineInstance) -> Option<Self> {
        let facts = instance.facts.as_ref()?;
        let hashing = facts.hashing.clone()?;
        let page_tokens = facts.page_size?;
        let family = match hashing {
            EngineBlockHashing::Sglang { .. } => SGLANG,
            EngineBlockHashing::Vllm { .. } => VLLM,
            EngineBlockHashing::Opaque { .. } => return None,
        };
        // Equal tokens have equal hashes in every model, so the model is part of the name. The store's keys carry a name of
        // their own for it.
        let stored_as = match facts.store.as_ref().map(|store| &store.keys) {
            Some(StoreKeyScheme::Sglang { prefix, .. }) => prefix.as_deref(),
            Some(StoreKeyScheme::Vllm { model, .. }) => model.as_deref(),
            Some(StoreKeyScheme::Opaque { .. }) | None => None,
        };
        let model = stored_as.or(facts.models.first().map(String::as_str))?;
        Some(Self {
            hashing,
            block_tokens: page_tokens,
            namespace: BlockHashNamespace::new(&[family, model]),
        })
    }

    /// Tokens of a page.
    pub(crate) fn page_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// How these pages are named in the store that an engine uses.
    pub(crate) fn store_naming(&self, facts: &EngineFacts) -> Option<StoreKeyNaming> {
        StoreKeyNaming::from_store(facts.store.as_ref()?, self.namespace)
    }

    /// Keeps pages of different models apart.
    pub(crate) fn namespace(&self) -> BlockHashNamespace {
        self.namespace
    }

    /// How a request's pages are named; `None` if it carries something whose effect is not known.
    pub(crate) fn schemes(&self, extras: &BlockExtraKeys<'_>) -> Option<BlockSchemes> {
        if extras.lora_path.is_some() {
            return None;
        }
        match &self.hashing {
            EngineBlockHashing::Sglang { namespaced, bigrams } => self.sglang(*namespaced, *bigrams, extras),
            EngineBlockHashing::Vllm { algorithm, seed } => {
                let extra = VllmExtraKeys { adapter: None, cache_salt: extras.cache_salt.as_deref() };
                let make = match algorithm {
                    VllmHashAlgorithm::Sha256 => HashScheme::vllm_sha256,
                    VllmHashAlgorithm::Sha256Cbor => HashScheme::vllm_sha256_cbor,
                };
                make(self.block_tokens, seed, extra).ok().map(BlockSchemes::same_scheme)
            }
            EngineBlockHashing::Opaque { .. } => None,
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
        // With bigrams, nobody has seen how a namespace goes into events.
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

/// How the pages of one request are named.
#[derive(Debug, Clone)]
pub(crate) struct BlockSchemes {
    /// In the engine's events.
    pub(crate) events: HashScheme,
    /// In the store, where that is another name.
    pub(crate) store: Option<HashScheme>,
}

impl BlockSchemes {
    fn same_scheme(scheme: HashScheme) -> Self {
        Self { events: scheme, store: None }
    }
}

/// Name of SGLang's hashes in namespaces.
pub(crate) const SGLANG: &str = "sglang";
/// Name of vLLM's hashes in namespaces.
pub(crate) const VLLM: &str = "vllm";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extras_are_found_anywhere_and_rarely_looked_for() {
        assert!(BlockExtraKeys::read(br#"{"messages":[]}"#).is_empty());
        let extras = BlockExtraKeys::read(br#"{"a":{"cache_salt":"inner"},"cache_salt":"t\n1","x":1}"#);
        assert_eq!(extras.cache_salt.as_deref(), Some("t\n1"));
        assert_eq!(
            BlockExtraKeys::read(br#"{"cache_salt":7}"#),
            BlockExtraKeys::default(),
            "the engine refuses it"
        );
        assert!(!BlockExtraKeys::read(br#"{"lora_path":"x"}"#).is_empty());
    }
}
