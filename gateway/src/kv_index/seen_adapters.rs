//! LoRA adapters in the events of one engine.

use std::collections::BTreeSet;

use moongate_discovery::EngineFacts;
use parking_lot::Mutex;

/// More adapters than are reported.
const MAX_ADAPTERS: usize = 64;
/// Longest reported name in bytes.
const MAX_NAME: usize = 256;

/// Names of the adapters whose blocks an engine has reported, up to a limit.
#[derive(Debug, Default)]
pub(crate) struct SeenAdapters(Mutex<BTreeSet<String>>);

impl SeenAdapters {
    /// The engine has stored blocks of an adapter.
    pub(crate) fn learn(&self, name: &str) {
        let mut names = self.0.lock();
        if names.len() < MAX_ADAPTERS && name.len() <= MAX_NAME && !names.contains(name) {
            names.insert(name.to_owned());
        }
    }

    /// Those that the engine does not list: the path that is part of their hashes is not known.
    pub(crate) fn unlisted(&self, facts: &EngineFacts) -> Vec<String> {
        let is_listed = |name: &str| facts.adapters.iter().any(|adapter| adapter.name == name);
        self.0.lock().iter().filter(|name| !is_listed(name)).cloned().collect()
    }

    /// Removes all, when the engine has restarted.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use moongate_discovery::{EngineKind, LoraAdapterFacts};

    use super::*;

    #[test]
    fn unlisted_adapters_are_bounded() {
        let seen = SeenAdapters::default();
        let adapters = vec![LoraAdapterFacts { name: "listed".into(), path: None, id: None }];
        let facts = EngineFacts { adapters, ..EngineFacts::unreported(EngineKind::Vllm) };
        ["listed", "other", "other", &"x".repeat(MAX_NAME + 1)].into_iter().for_each(|name| seen.learn(name));
        assert_eq!(seen.unlisted(&facts), ["other"]);
        (0..2 * MAX_ADAPTERS).for_each(|number| seen.learn(&number.to_string()));
        assert_eq!(seen.unlisted(&facts).len(), MAX_ADAPTERS - 1);
        seen.clear();
        assert!(seen.unlisted(&facts).is_empty());
    }
}
