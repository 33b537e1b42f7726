//! Parses the names of roles, engines and schemes in flags, labels and annotations.

use std::str::FromStr;

use crate::endpoint::HttpScheme;
use crate::topology::{EngineKind, EngineRole};

/// A name that is not one of the known values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} are {}", enumerate(.choices, "and"))]
pub struct UnknownNameError {
    pub(crate) what: &'static str,
    /// The known values, with `|` between them.
    pub(crate) choices: &'static str,
}

/// `a|b|c` as `a, b and c`.
pub(crate) fn enumerate(choices: &str, conjunction: &str) -> String {
    match choices.rsplit_once('|') {
        Some((others, last)) => format!("{} {conjunction} {last}", others.replace('|', ", ")),
        None => choices.to_owned(),
    }
}

impl FromStr for EngineRole {
    type Err = UnknownNameError;

    fn from_str(text: &str) -> Result<Self, UnknownNameError> {
        match text {
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            "plain" => Ok(Self::Plain),
            _ => Err(UnknownNameError { what: "roles", choices: "prefill|decode|plain" }),
        }
    }
}

impl FromStr for EngineKind {
    type Err = UnknownNameError;

    fn from_str(text: &str) -> Result<Self, UnknownNameError> {
        match text {
            "sglang" => Ok(Self::Sglang),
            "vllm" => Ok(Self::Vllm),
            _ => Err(UnknownNameError { what: "engines", choices: "sglang|vllm" }),
        }
    }
}

impl FromStr for HttpScheme {
    type Err = UnknownNameError;

    fn from_str(text: &str) -> Result<Self, UnknownNameError> {
        match text {
            "http" => Ok(Self::Http),
            "https" => Ok(Self::Https),
            _ => Err(UnknownNameError { what: "schemes", choices: "http|https" }),
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
