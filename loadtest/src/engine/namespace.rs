//! Separation of cache entries with equal tokens.

use moongate_block_hash::{DEFAULT_VLLM_SEED, HashScheme, HashSchemeError, SglangNamespace, VllmExtraKeys};
use serde_json::{Map, Value};

use super::SimProtocol;
use super::tokens::hash_bytes;

/// A request's `cache_salt` and, with SGLang, its `extra_key`, which vLLM ignores.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PromptNamespace {
    cache_salt: Option<String>,
    extra_key: Option<String>,
}

impl PromptNamespace {
    /// Namespace of the `prompt`-th prompt of a request: members are one text for all prompts, or a list. An empty text
    /// counts as absent.
    pub(crate) fn of(body: &Map<String, Value>, protocol: SimProtocol, prompt: usize) -> Self {
        let text = |name: &str| {
            let value = match body.get(name)? {
                Value::Array(list) => list.get(prompt)?,
                one => one,
            };
            value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
        };
        let extra_key = if protocol == SimProtocol::Sglang { text("extra_key") } else { None };
        Self { cache_salt: text("cache_salt"), extra_key }
    }

    pub(crate) fn cache_salt(&self) -> Option<&str> {
        self.cache_salt.as_deref()
    }

    /// A number that differs between namespaces.
    pub(crate) fn hash(&self) -> u64 {
        if *self == Self::default() {
            return 0;
        }
        let part = |text: &Option<String>| text.as_deref().map_or(0, |text| hash_bytes(text.as_bytes()) | 1);
        super::tokens::mix(part(&self.cache_salt), part(&self.extra_key))
    }

    /// How the engine hashes pages of this namespace in its events. SGLang leaves `extra_key` out.
    pub(crate) fn event_hash_scheme(
        &self,
        protocol: SimProtocol,
        page_tokens: u32,
    ) -> Result<HashScheme, HashSchemeError> {
        let cache_salt = self.cache_salt();
        match protocol {
            SimProtocol::Sglang => HashScheme::sglang_events(page_tokens, cache_salt),
            SimProtocol::Vllm => HashScheme::vllm_sha256_cbor(
                page_tokens,
                DEFAULT_VLLM_SEED,
                VllmExtraKeys { adapter: None, cache_salt },
            ),
        }
    }

    /// How the engine hashes pages of this namespace in the store.
    pub(crate) fn store_hash_scheme(
        &self,
        protocol: SimProtocol,
        page_tokens: u32,
    ) -> Result<HashScheme, HashSchemeError> {
        match protocol {
            SimProtocol::Sglang => {
                let (extra_key, cache_salt) = (self.extra_key.as_deref(), self.cache_salt());
                HashScheme::sglang(page_tokens, SglangNamespace { extra_key, cache_salt })
            }
            SimProtocol::Vllm => self.event_hash_scheme(protocol, page_tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(body: Value, protocol: SimProtocol, prompt: usize) -> PromptNamespace {
        PromptNamespace::of(body.as_object().unwrap(), protocol, prompt)
    }

    #[test]
    fn namespaces_are_separated() {
        let bodies = [
            json!({}),
            json!({"cache_salt": "a"}),
            json!({"extra_key": "a"}),
            json!({"cache_salt": "a", "extra_key": "a"}),
            json!({"cache_salt": "b"}),
        ];
        let numbers: std::collections::BTreeSet<u64> =
            bodies.iter().map(|body| of(body.clone(), SimProtocol::Sglang, 0).hash()).collect();
        assert_eq!(numbers.len(), bodies.len());
        assert_eq!(of(json!({"cache_salt": ""}), SimProtocol::Sglang, 0).hash(), 0);
    }

    #[test]
    fn each_prompt_of_a_batch_has_its_own() {
        let body = json!({"extra_key": ["a", "b"], "cache_salt": "c"});
        assert_ne!(of(body.clone(), SimProtocol::Sglang, 0), of(body.clone(), SimProtocol::Sglang, 1));
        assert_eq!(
            of(body.clone(), SimProtocol::Sglang, 1),
            of(json!({"extra_key": "b", "cache_salt": "c"}), SimProtocol::Sglang, 0)
        );
        assert_eq!(of(body, SimProtocol::Vllm, 0), of(json!({"cache_salt": "c"}), SimProtocol::Vllm, 0));
    }
}
