//! How engines hand over KV cache: the connectors that a source can declare, and what a probe finds.
//!
//! A new connector is declared here, and its legs are driven by a file in `gateway/src/connector/`.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::parse_names::UnknownNameError;

/// How a vLLM pair transfers KV cache; determines the order of the legs and the parameters added to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvConnector {
    /// NixlConnector: prefill first, its `kv_transfer_params` forwarded verbatim to decode.
    Nixl,
    /// MooncakeConnector: both legs at once, tied by a transfer id and the bootstrap server.
    Mooncake,
    /// MooncakeStoreConnector or another shared store: prefill with one token, then decode; no parameters.
    Store,
}

impl KvConnector {
    const ALL: [Self; 3] = [Self::Nixl, Self::Mooncake, Self::Store];
    /// Names in flags, files and annotations, in the order of `ALL`.
    pub const CHOICES: &str = "nixl|mooncake|store";
}

impl FromStr for KvConnector {
    type Err = UnknownNameError;

    fn from_str(text: &str) -> Result<Self, UnknownNameError> {
        let mut named = Self::CHOICES.split('|').zip(Self::ALL);
        let found = named.find(|(name, _)| *name == text).map(|(_, connector)| connector);
        found.ok_or(UnknownNameError { what: "connectors", choices: Self::CHOICES })
    }
}

/// How one engine transfers KV cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvTransferMethod {
    /// SGLang. `bootstrap` is set on prefills only.
    SglangBootstrap {
        /// Address of the prefill's bootstrap server for decode engines.
        bootstrap: Option<BootstrapAddress>,
    },
    /// vLLM NixlConnector.
    VllmNixl,
    /// vLLM MooncakeConnector.
    VllmMooncake {
        /// The prefill's bootstrap server; `None` on decodes.
        bootstrap: Option<BootstrapAddress>,
        /// `engine_id` by data-parallel rank, from the bootstrap server's `/query`; new after every restart of the prefill.
        engine_ids: BTreeMap<u32, String>,
    },
    /// vLLM with a shared store only.
    VllmStore,
}

impl From<KvConnector> for KvTransferMethod {
    /// The method of an engine with this connector that has no address of its own.
    fn from(connector: KvConnector) -> Self {
        match connector {
            KvConnector::Nixl => KvTransferMethod::VllmNixl,
            KvConnector::Mooncake => {
                KvTransferMethod::VllmMooncake { bootstrap: None, engine_ids: BTreeMap::new() }
            }
            KvConnector::Store => KvTransferMethod::VllmStore,
        }
    }
}

impl KvTransferMethod {
    /// Values of [`name`](Self::name).
    pub const NAMES: [&str; 4] = ["sglang", "nixl", "mooncake", "store"];

    /// Short name, for status reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            KvTransferMethod::SglangBootstrap { .. } => "sglang",
            KvTransferMethod::VllmNixl => "nixl",
            KvTransferMethod::VllmMooncake { .. } => "mooncake",
            KvTransferMethod::VllmStore => "store",
        }
    }

    /// What an operator wants to know of it; `None` for decodes without an address of their own.
    #[must_use]
    pub fn description(&self) -> Option<String> {
        match self {
            KvTransferMethod::SglangBootstrap { bootstrap } => {
                bootstrap.as_ref().map(|address| format!("bootstrap {}:{}", address.host, address.port))
            }
            KvTransferMethod::VllmNixl => Some("NIXL".to_owned()),
            KvTransferMethod::VllmMooncake { .. } => Some("Mooncake".to_owned()),
            KvTransferMethod::VllmStore => Some("shared store".to_owned()),
        }
    }

    /// The method of a decode that takes over from prefills with this one; `None` if decodes always report their own.
    pub(crate) fn of_decodes(&self) -> Option<Self> {
        match self {
            KvTransferMethod::SglangBootstrap { .. } => None,
            KvTransferMethod::VllmMooncake { .. } => Some(KvConnector::Mooncake.into()),
            KvTransferMethod::VllmNixl | KvTransferMethod::VllmStore => Some(self.clone()),
        }
    }
}

/// Address of a prefill's bootstrap server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BootstrapAddress {
    /// Host name or IP address, without brackets.
    pub host: String,
    pub port: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_connector_is_parsed_by_its_name() {
        for (name, connector) in KvConnector::CHOICES.split('|').zip(KvConnector::ALL) {
            assert_eq!(name.parse(), Ok(connector));
            assert_eq!(KvTransferMethod::from(connector).name(), name);
        }
        assert_eq!(KvConnector::CHOICES.split('|').count(), KvConnector::ALL.len());
        let unknown = "lmcache".parse::<KvConnector>().unwrap_err();
        assert_eq!(unknown.to_string(), "connectors are nixl, mooncake and store");
    }
}
