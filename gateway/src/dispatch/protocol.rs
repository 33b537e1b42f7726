//! How a chosen route is driven: read from what the prefill engine said of itself, never guessed per request.

use moongate_discovery::{Bootstrap, Engine, EngineFacts, KvTransfer};

/// The hand-over protocol of a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Protocol<'a> {
    /// SGLang: both legs at once, tied by the bootstrap triple.
    Sglang(&'a Bootstrap),
    /// vLLM NixlConnector: prefill first, its parameters go to decode.
    Nixl,
    /// vLLM MooncakeConnector: both legs at once, tied by a transfer id.
    Mooncake { bootstrap: &'a Bootstrap, engine_id: &'a str },
    /// vLLM with a shared store: prefill first, decode finds the pages in the store.
    Store,
}

impl<'a> Protocol<'a> {
    /// The protocol of a prefill, or what is missing to drive it.
    pub(crate) fn of(prefill: &'a EngineFacts, rank: u32) -> Result<Self, &'static str> {
        match &prefill.transfer {
            Some(KvTransfer::SglangBootstrap { bootstrap: Some(bootstrap) }) => {
                Ok(Protocol::Sglang(bootstrap))
            }
            Some(KvTransfer::SglangBootstrap { bootstrap: None }) => Err("has no bootstrap address"),
            Some(KvTransfer::VllmNixl) => Ok(Protocol::Nixl),
            Some(KvTransfer::VllmMooncake { bootstrap: Some(bootstrap), engine_ids }) => {
                let engine_id = engine_ids.get(&rank).or_else(|| engine_ids.values().next());
                let engine_id = engine_id.ok_or("has no engine id at its bootstrap server")?;
                Ok(Protocol::Mooncake { bootstrap, engine_id })
            }
            Some(KvTransfer::VllmMooncake { bootstrap: None, .. }) => Err("has no bootstrap address"),
            Some(KvTransfer::VllmStore) => Ok(Protocol::Store),
            None if prefill.engine == Engine::Vllm => Err("has no known KV connector"),
            None => Err("has no bootstrap address"),
        }
    }
}
