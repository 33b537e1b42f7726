//! Kinds of roles, derived from the words of their names.

/// Kind of a role in an inference service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoleKind {
    /// Computes the KV cache of prompts for decodes.
    Prefill,
    /// Generates from KV cache that it receives.
    Decode,
    /// Serves requests alone, as an engine without disaggregation.
    Plain,
    /// Stores KV cache for all engines.
    Store,
}

/// Words of roles that serve no model requests, regardless of the other words.
const NON_ENGINE_WORDS: [&str; 11] = [
    "router",
    "gateway",
    "scheduler",
    "proxy",
    "frontend",
    "processor",
    "master",
    "metadata",
    "etcd",
    "nats",
    "monitor",
];
/// Words of engines that serve requests alone.
const PLAIN_WORDS: [&str; 3] = ["worker", "plain", "backend"];

impl RoleKind {
    /// The kind of a role of that name; `None` for routers, masters and unknown names.
    #[must_use]
    pub fn from_role_name(role: &str) -> Option<Self> {
        let lower = role.to_ascii_lowercase();
        let has = |predicate: &dyn Fn(&str) -> bool| lower.split(['-', '_', '.']).any(predicate);
        if has(&|word| NON_ENGINE_WORDS.contains(&word)) {
            return None;
        }
        if has(&|word| word == "store") {
            return Some(Self::Store);
        }
        if lower.starts_with("mooncake") {
            return None;
        }
        if lower.contains("prefill") {
            return Some(Self::Prefill);
        }
        if lower.contains("decode") {
            return Some(Self::Decode);
        }
        has(&|word| PLAIN_WORDS.contains(&word.trim_end_matches('s'))).then_some(Self::Plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_known_role_names() {
        for (name, kind) in [
            ("prefill", Some(RoleKind::Prefill)),
            ("decode", Some(RoleKind::Decode)),
            ("qwen-Prefill-0", Some(RoleKind::Prefill)),
            ("worker", Some(RoleKind::Plain)),
            ("workers", Some(RoleKind::Plain)),
            ("sglang-backend", Some(RoleKind::Plain)),
            ("mooncake-store", Some(RoleKind::Store)),
            ("store", Some(RoleKind::Store)),
            ("prefill-store", Some(RoleKind::Store)),
            ("store-master", None),
            ("router", None),
            ("prefill-router", None),
            ("mooncake-master", None),
            ("mooncake-worker", None),
            ("nginx", None),
        ] {
            assert_eq!(RoleKind::from_role_name(name), kind, "{name}");
        }
    }
}
