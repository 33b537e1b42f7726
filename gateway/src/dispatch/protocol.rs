//! How a chosen route is driven: read from what the prefill engine said of itself, never guessed per request.

use moongate_discovery::{BootstrapAddress, EngineFacts, EngineKind, KvTransferMethod};

/// The hand-over protocol of a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HandoverProtocol<'a> {
    /// SGLang: both legs at once, tied by the bootstrap triple.
    Sglang(&'a BootstrapAddress),
    /// vLLM NixlConnector: prefill first, its parameters go to decode.
    Nixl,
    /// vLLM MooncakeConnector: both legs at once, tied by a transfer id.
    Mooncake { bootstrap: &'a BootstrapAddress, engine_id: &'a str },
    /// vLLM with a shared store: prefill first, decode finds the pages in the store.
    Store,
}

impl<'a> HandoverProtocol<'a> {
    /// The protocol of a prefill, or what is missing to drive it.
    pub(crate) fn from_facts(prefill: &'a EngineFacts, rank: u32) -> Result<Self, &'static str> {
        match &prefill.transfer {
            Some(KvTransferMethod::SglangBootstrap { bootstrap: Some(bootstrap) }) => {
                Ok(HandoverProtocol::Sglang(bootstrap))
            }
            Some(KvTransferMethod::SglangBootstrap { bootstrap: None }) => Err("has no bootstrap address"),
            Some(KvTransferMethod::VllmNixl) => Ok(HandoverProtocol::Nixl),
            Some(KvTransferMethod::VllmMooncake { bootstrap: Some(bootstrap), engine_ids }) => {
                let engine_id = engine_ids.get(&rank).or_else(|| engine_ids.values().next());
                let engine_id = engine_id.ok_or("has no engine id at its bootstrap server")?;
                Ok(HandoverProtocol::Mooncake { bootstrap, engine_id })
            }
            Some(KvTransferMethod::VllmMooncake { bootstrap: None, .. }) => Err("has no bootstrap address"),
            Some(KvTransferMethod::VllmStore) => Ok(HandoverProtocol::Store),
            None if prefill.engine == EngineKind::Vllm => Err("has no known KV connector"),
            None => Err("has no bootstrap address"),
        }
    }
}
