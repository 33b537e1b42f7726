//! Hand-over protocol of a route, derived from the facts that the prefill engine reports, never guessed per request.

use moongate_discovery::{BootstrapAddress, EngineFacts, EngineKind, KvTransferMethod};

/// The hand-over protocol of a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HandoverProtocol<'a> {
    /// SGLang: both legs at once, linked by the bootstrap triple.
    Sglang(&'a BootstrapAddress),
    /// vLLM NixlConnector: prefill first, then decode with the prefill's parameters.
    Nixl,
    /// vLLM MooncakeConnector: both legs at once, linked by a transfer id.
    Mooncake { bootstrap: &'a BootstrapAddress, engine_id: &'a str },
    /// vLLM with a shared store: prefill first, then decode finds the blocks in the store.
    Store,
}

impl<'a> HandoverProtocol<'a> {
    /// The protocol of a prefill engine, or the missing fact.
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
            None if prefill.engine == EngineKind::Vllm => Err("has an unknown KV connector"),
            None => Err("has no bootstrap address"),
        }
    }
}
