//! Status of a RoleInstanceSet.

use rbg_api::v1alpha2::{RoleInstanceSet, RoleInstanceSetStatus};

/// What the plan has found out about a set.
#[derive(Debug, Clone, Default)]
pub struct ObservedInstanceSet {
    /// Instances that exist.
    pub replicas: i32,
    /// Ready ones.
    pub ready: i32,
    /// Ready for long enough.
    pub available: i32,
    /// Of the spec's revision.
    pub updated: i32,
    /// Of the spec's revision and ready.
    pub updated_ready: i32,
    /// Those that shall be of the spec's revision.
    pub expected_updated: i32,
    /// The spec's revision.
    pub update_revision: String,
    /// Whether all instances have it and are ready, and none is held back.
    pub complete: bool,
}

/// The status.
#[must_use]
pub fn set(set: &RoleInstanceSet, facts: &ObservedInstanceSet) -> RoleInstanceSetStatus {
    let mut status = set.status.clone().unwrap_or_default();
    status.observed_generation = set.metadata.generation;
    status.replicas = facts.replicas;
    status.ready_replicas = facts.ready;
    status.available_replicas = facts.available;
    status.updated_replicas = facts.updated;
    status.updated_ready_replicas = facts.updated_ready;
    status.expected_updated_replicas = Some(facts.expected_updated);
    if facts.complete || status.current_revision.as_ref().is_none_or(String::is_empty) {
        status.current_revision = Some(facts.update_revision.clone());
    }
    let is_current = status.current_revision.as_deref() == Some(facts.update_revision.as_str());
    status.current_replicas = if is_current { facts.updated } else { facts.replicas - facts.updated };
    status.update_revision = Some(facts.update_revision.clone());
    let labels = set.spec.selector.as_ref().and_then(|selector| selector.match_labels.as_ref());
    let pairs: Vec<String> =
        labels.into_iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
    status.label_selector = Some(pairs.join(","));
    status
}
