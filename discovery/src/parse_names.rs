//! Parses the names of roles, engines, connectors and schemes in flags, labels and annotations.

use std::str::FromStr;

use crate::endpoint::HttpScheme;
use crate::topology::{EngineKind, EngineRole, KvConnector};

/// A name that is not one of the known values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} are {known}")]
pub struct UnknownNameError {
    what: &'static str,
    known: &'static str,
}

impl FromStr for EngineRole {
    type Err = UnknownNameError;

    fn from_str(text: &str) -> Result<Self, UnknownNameError> {
        match text {
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            "plain" => Ok(Self::Plain),
            _ => Err(UnknownNameError { what: "roles", known: "prefill, decode and plain" }),
        }
    }
}

impl FromStr for EngineKind {
    type Err = UnknownNameError;

    fn from_str(text: &str) -> Result<Self, UnknownNameError> {
        match text {
            "sglang" => Ok(Self::Sglang),
            "vllm" => Ok(Self::Vllm),
            _ => Err(UnknownNameError { what: "engines", known: "sglang and vllm" }),
        }
    }
}

impl FromStr for KvConnector {
    type Err = UnknownNameError;

    fn from_str(text: &str) -> Result<Self, UnknownNameError> {
        match text {
            "nixl" => Ok(Self::Nixl),
            "mooncake" => Ok(Self::Mooncake),
            "store" => Ok(Self::Store),
            _ => Err(UnknownNameError { what: "connectors", known: "nixl, mooncake and store" }),
        }
    }
}

impl FromStr for HttpScheme {
    type Err = UnknownNameError;

    fn from_str(text: &str) -> Result<Self, UnknownNameError> {
        match text {
            "http" => Ok(Self::Http),
            "https" => Ok(Self::Https),
            _ => Err(UnknownNameError { what: "schemes", known: "http and https" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_names_are_parsed() {
        for role in [EngineRole::Prefill, EngineRole::Decode, EngineRole::Plain] {
            assert_eq!(role.to_string().parse(), Ok(role));
        }
        for scheme in [HttpScheme::Http, HttpScheme::Https] {
            assert_eq!(scheme.as_str().parse(), Ok(scheme));
        }
        let unknown = "tensorrt".parse::<EngineKind>().unwrap_err();
        assert_eq!(unknown.to_string(), "engines are sglang and vllm");
    }
}
