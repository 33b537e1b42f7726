//! What people write in flags, labels and annotations for roles, engines, connectors and schemes.

use std::str::FromStr;

use crate::endpoint::Scheme;
use crate::topology::{Engine, KvConnector, Role};

/// A name that stands for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} are {known}")]
pub struct UnknownName {
    what: &'static str,
    known: &'static str,
}

impl FromStr for Role {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        match text {
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            "plain" => Ok(Self::Plain),
            _ => Err(UnknownName { what: "roles", known: "prefill, decode and plain" }),
        }
    }
}

impl FromStr for Engine {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        match text {
            "sglang" => Ok(Self::Sglang),
            "vllm" => Ok(Self::Vllm),
            _ => Err(UnknownName { what: "engines", known: "sglang and vllm" }),
        }
    }
}

impl FromStr for KvConnector {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        match text {
            "nixl" => Ok(Self::Nixl),
            "mooncake" => Ok(Self::Mooncake),
            "store" => Ok(Self::Store),
            _ => Err(UnknownName { what: "connectors", known: "nixl, mooncake and store" }),
        }
    }
}

impl FromStr for Scheme {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        match text {
            "http" => Ok(Self::Http),
            "https" => Ok(Self::Https),
            _ => Err(UnknownName { what: "schemes", known: "http and https" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_understood() {
        for role in [Role::Prefill, Role::Decode, Role::Plain] {
            assert_eq!(role.to_string().parse(), Ok(role));
        }
        for scheme in [Scheme::Http, Scheme::Https] {
            assert_eq!(scheme.as_str().parse(), Ok(scheme));
        }
        let unknown = "tensorrt".parse::<Engine>().unwrap_err();
        assert_eq!(unknown.to_string(), "engines are sglang and vllm");
    }
}
