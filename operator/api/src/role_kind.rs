//! What a role does, by the words of its name.

/// What a role does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoleKind {
    /// Computes the KV cache of prompts for decodes.
    Prefill,
    /// Generates from KV cache that it receives.
    Decode,
    /// Serves requests alone.
    Plain,
    /// Keeps KV cache for all engines.
    Store,
}

/// Words that mark a role which serves no model requests, whatever else its name says.
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
/// Words that mark an engine which takes a request alone.
const PLAIN_WORDS: [&str; 3] = ["worker", "plain", "backend"];

impl RoleKind {
    /// What a role of that name does; `None` for routers, masters and everything unknown.
    #[must_use]
    pub fn from_role_name(role: &str) -> Option<Self> {
        let lower = role.to_ascii_lowercase();
        let has = |is: &dyn Fn(&str) -> bool| lower.split(['-', '_', '.']).any(is);
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
    fn names_of_the_known_examples() {
        for (name, duty) in [
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
            assert_eq!(RoleKind::from_role_name(name), duty, "{name}");
        }
    }
}
