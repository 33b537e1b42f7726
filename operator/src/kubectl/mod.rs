//! What people do with groups: look at them, ask what a change would do, make it, take it back. Behind `kubectl moongate`.
//!
//! Texts of commands are made here, so that they are tested without a terminal; flags are the caller's. Only [`ClusterClient::edit`]
//! writes, and only a group's spec.

mod cluster;
mod differences;
mod doctor;
#[cfg(test)]
mod doctor_tests;
mod edit;
mod error;
mod history;
mod images;
mod output_format;
mod plan;
mod report;
mod wait;

pub use cluster::{ClusterClient, GroupSnapshot, KubeContextOptions, NamespaceSnapshot};
pub use differences::FieldDifference;
pub use doctor::{DoctorFinding, DoctorSnapshot, findings_text};
pub use edit::{restart_pods, set_paused};
pub use error::KubectlError;
pub use history::{GroupRevision, RevisionHistory, restore_revision};
pub use images::{ImageAssignment, set_images};
pub use output_format::{OutputFormat, age, table};
pub use plan::{PlanReport, apply_file, plan, read_files};
pub use rbg_api::keys::GROUPSET_NAME;
pub use report::{EventReport, GroupReport, InstanceReport, PodReport, RoleReport};
pub use wait::{RolloutProgress, wait};

/// Whether the cluster has what groups need, and how to mend what is wrong.
pub async fn diagnose(cluster: &ClusterClient) -> Vec<DoctorFinding> {
    DoctorSnapshot::read(cluster).await.findings(k8s_openapi::jiff::Timestamp::now())
}

/// The time, RFC 3339, as annotations of Kubernetes have it.
#[must_use]
pub fn now() -> String {
    let now = k8s_openapi::jiff::Timestamp::now();
    k8s_openapi::jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}
