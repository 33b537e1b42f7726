//! Commands of `kubectl moongate`: show groups, preview changes, apply them and roll them back.
//!
//! The texts of commands are produced here, so that they can be tested without a terminal; flags are parsed by the caller.
//! Only
//! [`ClusterClient::edit`] writes, and only the spec of a group.

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
pub use doctor::{DoctorFinding, DoctorGroup, DoctorReadError, DoctorSnapshot, findings_text};
pub use edit::{restart_pods, set_paused};
pub use error::{KubectlError, ManifestFileError, OutputError};
pub use history::{GroupRevision, RevisionHistory, restore_revision};
pub use images::{ImageAssignment, ImageAssignmentError, set_images};
pub use output_format::{OutputFormat, age, table};
pub use plan::{PlanReport, apply_file, plan, read_files};
pub use rbg_api::keys::GROUPSET_NAME;
pub use report::{EventReport, GroupReport, InstanceReport, PodReport, RoleReport};
pub use wait::{RolloutProgress, wait};

/// Checks whether the cluster has what groups need, with a fix for each problem.
pub async fn diagnose(cluster: &ClusterClient) -> Vec<DoctorFinding> {
    DoctorSnapshot::read(cluster).await.findings(k8s_openapi::jiff::Timestamp::now())
}

/// Present time in RFC 3339 without a fraction, as Kubernetes formats annotations.
#[must_use]
pub fn now() -> String {
    let now = k8s_openapi::jiff::Timestamp::now();
    k8s_openapi::jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}
