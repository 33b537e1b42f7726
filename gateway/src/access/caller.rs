//! Whoever was recognised by a key or token.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Deserialize;

/// What a key is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AccessScope {
    /// The public listener: whatever engines are asked, and the list of models.
    Inference,
    /// `/metrics` at the admin listener.
    Metrics,
    /// All of the admin listener.
    Admin,
}

impl AccessScope {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            AccessScope::Inference => "inference",
            AccessScope::Metrics => "metrics",
            AccessScope::Admin => "admin",
        }
    }
}

/// A client whose key or token is good. In the extensions of its request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AuthenticatedCaller {
    pub(crate) tenant: Arc<str>,
    pub(crate) scopes: Arc<BTreeSet<AccessScope>>,
}

impl AuthenticatedCaller {
    /// Whether it may do what needs `scope`. Who administers may read metrics too.
    pub(crate) fn has_scope(&self, scope: AccessScope) -> bool {
        self.scopes.contains(&scope)
            || (scope == AccessScope::Metrics && self.scopes.contains(&AccessScope::Admin))
    }
}
