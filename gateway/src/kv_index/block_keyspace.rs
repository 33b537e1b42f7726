//! How the blocks of one engine are hashed and named.

use std::borrow::Cow;

use moongate_block_hash::{HashScheme, SglangNamespace, VllmExtraKeys, VllmLoraAdapter};
use moongate_discovery::{
    EngineBlockHashing, EngineFacts, EngineKind, LoraAdapterFacts, StoreKeyScheme, VllmHashAlgorithm,
};
use moongate_scheduler::index::BlockHashNamespace;
use serde::Deserialize;

use super::store_keys::StoreKeyNaming;

/// The rules by which an engine hashes blocks. Engines with equal keyspaces have equal hashes for equal prompts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct BlockKeyspace {
    hashing: EngineBlockHashing,
    block_tokens: u32,
    namespace: BlockHashNamespace,
    /// The LoRA adapter that computes the blocks; `None` is the base model, unless a request names one.
    adapter: Option<LoraAdapterFacts>,
    /// SGLang's adapters, which requests may name besides their model.
    adapters: Vec<LoraAdapterFacts>,
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
    /// Reads them from a body that is a valid JSON object. Bodies rarely have any: only one that `may_change_hashes` is parsed.
    pub(crate) fn of_body(body: &'a [u8], may_change_hashes: bool) -> Self {
        if may_change_hashes { Self::read(body) } else { Self::default() }
    }

    /// Parses a body that is a valid JSON object.
    pub(crate) fn read(body: &'a [u8]) -> Self {
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
        let adapters = if facts.engine == EngineKind::Sglang { facts.adapters.clone() } else { Vec::new() };
        Some(Self {
            hashing,
            block_tokens: page_tokens,
            namespace: BlockHashNamespace::new(&[family, model]),
            adapter: None,
            adapters,
        })
    }

    /// The keyspace of requests for one of the engine's models, if that is an adapter with hashes of its own. SGLang's are named
    /// `base:adapter`; it serves the name alone with the base model.
    pub(crate) fn for_adapter(&self, model: &str, facts: &EngineFacts) -> Option<Self> {
        let name = match facts.engine {
            EngineKind::Vllm => model,
            EngineKind::Sglang => model.strip_prefix(facts.models.first()?.as_str())?.strip_prefix(':')?,
        };
        let adapter = facts.adapters.iter().find(|adapter| adapter.name == name)?;
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

    /// Whether some blocks of plain requests' tokens have other hashes in events, without a mark.
    pub(crate) fn has_unmarked_namespaces(&self) -> bool {
        matches!(self.hashing, EngineBlockHashing::Sglang { namespaced_events: true, .. })
    }

    /// Separates blocks of different models.
    pub(crate) fn namespace(&self) -> BlockHashNamespace {
        self.namespace
    }

    /// Hash schemes of a request; `None` if it has a member whose effect is unknown.
    pub(crate) fn schemes(&self, extras: &BlockExtraKeys<'_>) -> Option<BlockSchemes> {
        if extras.is_unknown {
            return None;
        }
        match &self.hashing {
            EngineBlockHashing::Sglang { namespaced, bigrams, namespaced_events } => {
                let adapter = self.sglang_adapter(extras).ok()?;
                if *bigrams || *namespaced != Some(true) {
                    self.sglang_without_namespaces(*namespaced, *bigrams, adapter, extras)
                } else {
                    self.sglang(*namespaced_events, adapter, extras)
                }
            }
            EngineBlockHashing::Vllm { .. } if extras.lora_path.is_some() => None,
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

    /// The adapter of an SGLang request: its model's before the one that it names.
    fn sglang_adapter(
        &self,
        extras: &BlockExtraKeys<'_>,
    ) -> Result<Option<&LoraAdapterFacts>, UnknownAdapter> {
        let named = match &extras.lora_path {
            _ if self.adapter.is_some() => return Ok(self.adapter.as_ref()),
            None => return Ok(None),
            // One per prompt of a batch.
            Some(value) => value.as_str().ok_or(UnknownAdapter)?,
        };
        self.adapters.iter().find(|adapter| adapter.name == named).map(Some).ok_or(UnknownAdapter)
    }

    /// Requests to engines that ignore namespaces, and plain requests to those of which it is unknown, or that hash pairs of tokens:
    /// how a namespace affects events with pairs is not verified.
    fn sglang_without_namespaces(
        &self,
        namespaced: Option<bool>,
        bigrams: bool,
        adapter: Option<&LoraAdapterFacts>,
        extras: &BlockExtraKeys<'_>,
    ) -> Option<BlockSchemes> {
        if adapter.is_some() || !(extras.is_empty() || namespaced == Some(false)) {
            return None;
        }
        let make = if bigrams { HashScheme::sglang_bigrams } else { HashScheme::sglang };
        make(self.block_tokens, SglangNamespace::default()).ok().map(BlockSchemes::same_scheme)
    }

    fn sglang(
        &self,
        namespaced_events: bool,
        adapter: Option<&LoraAdapterFacts>,
        extras: &BlockExtraKeys<'_>,
    ) -> Option<BlockSchemes> {
        let requested = match &extras.extra_key {
            None => None,
            Some(serde_json::Value::String(key)) => Some(key.as_str()).filter(|key| !key.is_empty()),
            Some(_) => return None,
        };
        let cache_salt = extras.cache_salt.as_deref().filter(|salt| !salt.is_empty());
        let extra_key = match adapter {
            // SGLang appends the adapter's identifier.
            Some(adapter) => Some(Cow::Owned(format!("{}{}", requested.unwrap_or(""), adapter.id.as_ref()?))),
            None => requested.map(Cow::Borrowed),
        };
        let (block_tokens, extra_key) = (self.block_tokens, extra_key.as_deref());
        let stored = HashScheme::sglang(block_tokens, SglangNamespace { extra_key, cache_salt }).ok()?;
        let events = match (extra_key, cache_salt) {
            (None, None) => return Some(BlockSchemes::same_scheme(stored)),
            _ if namespaced_events => HashScheme::sglang_namespaced_events(
                block_tokens,
                cache_salt,
                SglangNamespace { extra_key, cache_salt },
            ),
            (Some(_), _) if adapter.is_some() => HashScheme::sglang_namespaced_events(
                block_tokens,
                cache_salt,
                SglangNamespace { extra_key, cache_salt: None },
            ),
            (None, Some(_)) => HashScheme::sglang_events(block_tokens, cache_salt),
            // In events, such blocks look like those of other requests. No event has the store's hashes, so that only the store counts.
            (Some(_), _) => return Some(BlockSchemes::same_scheme(stored)),
        };
        Some(BlockSchemes { events: events.ok()?, store: Some(stored) })
    }
}

/// A request names an adapter that the engine does not report, or several.
#[derive(Debug)]
struct UnknownAdapter;

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
    use moongate_block_hash::BlockHashChain;

    use super::*;

    /// Hash of a block of two tokens in events.
    fn event_hash(keyspace: &BlockKeyspace, request: &str) -> Option<u64> {
        let schemes = keyspace.schemes(&BlockExtraKeys::read(request.as_bytes()))?;
        let mut blocks = Vec::new();
        BlockHashChain::new(schemes.events).extend(&[1, 2], &mut blocks);
        Some(blocks[0].event_hash)
    }

    fn sglang(namespaced: Option<bool>, namespaced_events: bool) -> (BlockKeyspace, EngineFacts) {
        let adapter = |name: &str, id: Option<&str>| LoraAdapterFacts {
            name: name.to_owned(),
            path: Some(format!("/{name}")),
            id: id.map(str::to_owned),
        };
        let facts = EngineFacts {
            models: vec!["m".to_owned(), "m:poet".to_owned()],
            page_size: Some(2),
            hashing: Some(EngineBlockHashing::Sglang { namespaced, bigrams: false, namespaced_events }),
            adapters: vec![adapter("poet", Some("c441")), adapter("late", None)],
            ..EngineFacts::unreported(EngineKind::Sglang)
        };
        (BlockKeyspace::from_facts(&facts).unwrap(), facts)
    }

    #[test]
    fn sglang_namespaces_never_have_hashes_of_plain_prompts() {
        let requests = [
            r#"{"extra_key":"k"}"#,
            r#"{"extra_key":"l"}"#,
            r#"{"cache_salt":"k"}"#,
            r#"{"extra_key":"k","cache_salt":"k"}"#,
            r#"{"lora_path":"poet"}"#,
            r#"{"lora_path":"poet","extra_key":"k"}"#,
            r#"{"lora_path":"poet","cache_salt":"k"}"#,
        ];
        for namespaced_events in [false, true] {
            let (keyspace, _) = sglang(Some(true), namespaced_events);
            let plain = event_hash(&keyspace, "{}").unwrap();
            let mut hashes: Vec<u64> =
                requests.iter().map(|request| event_hash(&keyspace, request).unwrap()).collect();
            hashes.push(plain);
            hashes.sort_unstable();
            hashes.dedup();
            assert_eq!(hashes.len(), requests.len() + 1, "{namespaced_events}");
            for empty in [r#"{"extra_key":"","cache_salt":""}"#, r#"{"lora_path":null,"extra_key":null}"#] {
                assert_eq!(event_hash(&keyspace, empty), Some(plain), "{empty}");
            }
            for unknown in [
                r#"{"lora_path":"late"}"#,
                r#"{"lora_path":"x"}"#,
                r#"{"lora_path":["poet"]}"#,
                r#"{"extra_key":["k"]}"#,
            ] {
                assert_eq!(event_hash(&keyspace, unknown), None, "{unknown}");
            }
        }
    }

    #[test]
    fn sglang_selects_an_adapter_by_model_or_member() {
        let (base, facts) = sglang(Some(true), false);
        let poet = base.for_adapter("m:poet", &facts).unwrap();
        assert_eq!(event_hash(&poet, "{}"), event_hash(&base, r#"{"lora_path":"poet"}"#));
        assert_eq!(
            event_hash(&poet, r#"{"lora_path":"late"}"#),
            event_hash(&poet, "{}"),
            "the model comes first"
        );
        for name in ["m", "poet", "m:other", "n:poet"] {
            assert_eq!(base.for_adapter(name, &facts), None, "{name}");
        }
        assert_eq!(event_hash(&base.for_adapter("m:late", &facts).unwrap(), "{}"), None, "loaded at runtime");
    }

    #[test]
    fn old_sglang_without_namespaces_predicts_no_adapters() {
        let (old, _) = sglang(Some(false), false);
        assert_eq!(event_hash(&old, r#"{"extra_key":"k"}"#), event_hash(&old, "{}"));
        assert_eq!(event_hash(&old, r#"{"lora_path":"poet"}"#), None);
        let (unknown, _) = sglang(None, false);
        assert_eq!(event_hash(&unknown, r#"{"extra_key":"k"}"#), None);
        assert!(event_hash(&unknown, "{}").is_some());
    }

    #[test]
    fn adapters_have_hashes_of_their_own() {
        let adapter =
            |name: &str| LoraAdapterFacts { name: name.to_owned(), path: Some(format!("/{name}")), id: None };
        let facts = EngineFacts {
            adapters: vec![adapter("poet"), adapter("coder")],
            ..EngineFacts::unreported(EngineKind::Vllm)
        };
        let base = BlockKeyspace {
            hashing: EngineBlockHashing::Vllm { algorithm: VllmHashAlgorithm::Sha256Cbor, seed: "0".into() },
            block_tokens: 2,
            namespace: BlockHashNamespace::new(&["vllm", "m"]),
            adapter: None,
            adapters: Vec::new(),
        };
        let hash = |keyspace: &BlockKeyspace| event_hash(keyspace, "{}").unwrap();
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
