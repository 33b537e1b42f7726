//! What a person may set. What can be learned from the engines is not here.

use crate::service::ServiceModel;

/// Settings of a scheduler and its policy.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Settings {
    /// How long engines compute, until first tokens have shown it.
    pub service_prior: ServiceModel,
}
