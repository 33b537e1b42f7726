//! Authenticated callers and their scopes.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Deserialize;

/// What an API key permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AccessScope {
    /// The public listener: inference paths and the list of models.
    Inference,
    /// `/metrics` of the admin listener.
    Metrics,
    /// All paths of the admin listener.
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

/// An authenticated client, stored in the extensions of its request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AuthenticatedCaller {
    pub(crate) tenant: Arc<str>,
    pub(crate) scopes: Arc<BTreeSet<AccessScope>>,
}

impl AuthenticatedCaller {
    /// Whether the caller has `scope`. `Admin` includes `Metrics`.
    pub(crate) fn has_scope(&self, scope: AccessScope) -> bool {
        self.scopes.contains(&scope)
            || (scope == AccessScope::Metrics && self.scopes.contains(&AccessScope::Admin))
    }
}
