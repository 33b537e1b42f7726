//! Status of a RoleInstanceSet.

use rbg_api::v1alpha2::{RoleInstanceSet, RoleInstanceSetStatus};

/// Observed state of a RoleInstanceSet.
#[derive(Debug, Clone, Default)]
pub struct ObservedInstanceSet {
    pub replicas: i32,
    pub ready: i32,
    /// Number of instances that have been ready for `minReadySeconds`.
    pub available: i32,
    /// Number of instances at the spec's revision.
    pub updated: i32,
    /// Number of ready instances at the spec's revision.
    pub updated_ready: i32,
    /// Number of instances to update to the spec's revision.
    pub expected_updated: i32,
    /// Name of the spec's revision.
    pub update_revision: String,
    /// Whether all instances are ready at the spec's revision, and none is held back.
    pub complete: bool,
}

/// Computes the status of a RoleInstanceSet.
#[must_use]
pub fn set(set: &RoleInstanceSet, observed: &ObservedInstanceSet) -> RoleInstanceSetStatus {
    let mut status = set.status.clone().unwrap_or_default();
    status.observed_generation = set.metadata.generation;
    status.replicas = observed.replicas;
    status.ready_replicas = observed.ready;
    status.available_replicas = observed.available;
    status.updated_replicas = observed.updated;
    status.updated_ready_replicas = observed.updated_ready;
    status.expected_updated_replicas = Some(observed.expected_updated);
    if observed.complete || status.current_revision.as_ref().is_none_or(String::is_empty) {
        status.current_revision = Some(observed.update_revision.clone());
    }
    let is_current = status.current_revision.as_deref() == Some(observed.update_revision.as_str());
    status.current_replicas =
        if is_current { observed.updated } else { observed.replicas - observed.updated };
    status.update_revision = Some(observed.update_revision.clone());
    let labels = set.spec.selector.as_ref().and_then(|selector| selector.match_labels.as_ref());
    let pairs: Vec<String> =
        labels.into_iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
    status.label_selector = Some(pairs.join(","));
    status
}
