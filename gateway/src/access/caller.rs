//! Whoever was recognised by a key or token.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Deserialize;

/// What a key is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Scope {
    /// The public listener: whatever engines are asked, and the list of models.
    Inference,
    /// `/metrics` at the admin listener.
    Metrics,
    /// All of the admin listener.
    Admin,
}

impl Scope {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Scope::Inference => "inference",
            Scope::Metrics => "metrics",
            Scope::Admin => "admin",
        }
    }
}

/// A client whose key or token is good. In the extensions of its request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) tenant: Arc<str>,
    pub(crate) scopes: Arc<BTreeSet<Scope>>,
}

impl Caller {
    /// Whether it may do what needs `scope`. Who administers may read metrics too.
    pub(crate) fn may(&self, scope: Scope) -> bool {
        self.scopes.contains(&scope) || (scope == Scope::Metrics && self.scopes.contains(&Scope::Admin))
    }
}
