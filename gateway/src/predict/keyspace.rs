//! How the pages of one engine are named.

use std::borrow::Cow;

use moongate_discovery::{EngineFacts, Instance, KvHashing, StoreKeys, VllmHash};
use moongate_pages::{Scheme, SglangNamespace, VllmExtra};
use moongate_scheduler::index::Namespace;
use serde::Deserialize;

use super::stored::StoredAs;

/// The rules by which an engine names pages. Engines with equal keyspaces name equal prompts alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Keyspace {
    hashing: KvHashing,
    page_tokens: u32,
    namespace: Namespace,
}

/// Members of a request that change its pages' names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Extras<'a> {
    #[serde(borrow)]
    cache_salt: Option<Cow<'a, str>>,
    /// A text, or one per prompt of a batch.
    extra_key: Option<serde_json::Value>,
    /// SGLang's adapter of a request.
    lora_path: Option<serde_json::Value>,
}

impl<'a> Extras<'a> {
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

impl Keyspace {
    /// The keyspace of an engine; `None` if its names cannot be computed or it does not tell enough.
    pub(crate) fn of(instance: &Instance) -> Option<Self> {
        let facts = instance.facts.as_ref()?;
        let hashing = facts.hashing.clone()?;
        let page_tokens = facts.page_size?;
        let family = match hashing {
            KvHashing::Sglang { .. } => SGLANG,
            KvHashing::Vllm { .. } => VLLM,
            KvHashing::Opaque { .. } => return None,
        };
        // Equal tokens have equal hashes in every model, so the model is part of the name. The store's keys carry a name of
        // their own for it.
        let stored_as = match facts.store.as_ref().map(|store| &store.keys) {
            Some(StoreKeys::Sglang { prefix, .. }) => prefix.as_deref(),
            Some(StoreKeys::Vllm { model, .. }) => model.as_deref(),
            Some(StoreKeys::Opaque { .. }) | None => None,
        };
        let model = stored_as.or(facts.models.first().map(String::as_str))?;
        Some(Self { hashing, page_tokens, namespace: Namespace::new(&[family, model]) })
    }

    /// Tokens of a page.
    pub(crate) fn page_tokens(&self) -> u32 {
        self.page_tokens
    }

    /// How these pages are named in the store that an engine uses.
    pub(crate) fn stored_as(&self, facts: &EngineFacts) -> Option<StoredAs> {
        StoredAs::of(facts.store.as_ref()?, self.namespace)
    }

    /// Keeps pages of different models apart.
    pub(crate) fn namespace(&self) -> Namespace {
        self.namespace
    }

    /// How a request's pages are named; `None` if it carries something whose effect is not known.
    pub(crate) fn names(&self, extras: &Extras<'_>) -> Option<Names> {
        if extras.lora_path.is_some() {
            return None;
        }
        match &self.hashing {
            KvHashing::Sglang { namespaced, bigrams } => self.sglang(*namespaced, *bigrams, extras),
            KvHashing::Vllm { algorithm, seed } => {
                let extra = VllmExtra { adapter: None, cache_salt: extras.cache_salt.as_deref() };
                let make = match algorithm {
                    VllmHash::Sha256 => Scheme::vllm_sha256,
                    VllmHash::Sha256Cbor => Scheme::vllm_sha256_cbor,
                };
                make(self.page_tokens, seed, extra).ok().map(Names::everywhere)
            }
            KvHashing::Opaque { .. } => None,
        }
    }

    fn sglang(&self, namespaced: Option<bool>, bigrams: bool, extras: &Extras<'_>) -> Option<Names> {
        if extras.is_empty() || namespaced == Some(false) {
            let make = if bigrams { Scheme::sglang_bigrams } else { Scheme::sglang };
            return make(self.page_tokens, SglangNamespace::default()).ok().map(Names::everywhere);
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
        let stored = Scheme::sglang(self.page_tokens, SglangNamespace { extra_key, cache_salt }).ok()?;
        Some(Names { own: Scheme::sglang_events(self.page_tokens, cache_salt).ok()?, stored: Some(stored) })
    }
}

/// How the pages of one request are named.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    /// In the engine's events.
    pub(crate) own: Scheme,
    /// In the store, where that is another name.
    pub(crate) stored: Option<Scheme>,
}

impl Names {
    fn everywhere(scheme: Scheme) -> Self {
        Self { own: scheme, stored: None }
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
        assert!(Extras::read(br#"{"messages":[]}"#).is_empty());
        let extras = Extras::read(br#"{"a":{"cache_salt":"inner"},"cache_salt":"t\n1","x":1}"#);
        assert_eq!(extras.cache_salt.as_deref(), Some("t\n1"));
        assert_eq!(Extras::read(br#"{"cache_salt":7}"#), Extras::default(), "the engine refuses it");
        assert!(!Extras::read(br#"{"lora_path":"x"}"#).is_empty());
    }
}
