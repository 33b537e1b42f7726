//! What a role does, by the words of its name.

/// What a role does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duty {
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
const NO_ENGINE: [&str; 11] = [
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
const PLAIN: [&str; 3] = ["worker", "plain", "backend"];

impl Duty {
    /// What a role of that name does; `None` for routers, masters and everything unknown.
    #[must_use]
    pub fn of(role: &str) -> Option<Self> {
        let lower = role.to_ascii_lowercase();
        let has = |is: &dyn Fn(&str) -> bool| lower.split(['-', '_', '.']).any(is);
        if has(&|word| NO_ENGINE.contains(&word)) {
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
        has(&|word| PLAIN.contains(&word.trim_end_matches('s'))).then_some(Self::Plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_known_examples() {
        for (name, duty) in [
            ("prefill", Some(Duty::Prefill)),
            ("decode", Some(Duty::Decode)),
            ("qwen-Prefill-0", Some(Duty::Prefill)),
            ("worker", Some(Duty::Plain)),
            ("workers", Some(Duty::Plain)),
            ("sglang-backend", Some(Duty::Plain)),
            ("mooncake-store", Some(Duty::Store)),
            ("store", Some(Duty::Store)),
            ("prefill-store", Some(Duty::Store)),
            ("store-master", None),
            ("router", None),
            ("prefill-router", None),
            ("mooncake-master", None),
            ("mooncake-worker", None),
            ("nginx", None),
        ] {
            assert_eq!(Duty::of(name), duty, "{name}");
        }
    }
}
