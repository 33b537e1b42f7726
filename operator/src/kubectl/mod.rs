//! What people do with groups: look at them, ask what a change would do, make it, take it back. Behind `kubectl moongate`.
//!
//! Texts of commands are made here, so that they are tested without a terminal; flags are the caller's. Only [`Cluster::edit`]
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
mod plan;
mod report;
mod text;
mod wait;

pub use cluster::{Cluster, Everything, Family, Where};
pub use differences::Difference;
pub use doctor::{Finding, Seen, told};
pub use edit::{paused, restarted};
pub use error::KubectlError;
pub use history::{History, Revision, undone};
pub use images::{ImageWish, with_images};
pub use plan::{Planned, applied, plan, read_files};
pub use rbg_api::keys::GROUPSET_NAME;
pub use report::{GroupReport, InstanceReport, PodReport, RoleReport, Told};
pub use text::{Format, age, table};
pub use wait::{Progress, wait};

/// Whether the cluster has what groups need, and how to mend what is wrong.
pub async fn examine(cluster: &Cluster) -> Vec<Finding> {
    Seen::read(cluster).await.findings(k8s_openapi::jiff::Timestamp::now())
}

/// The time, RFC 3339, as annotations of Kubernetes have it.
#[must_use]
pub fn now() -> String {
    let now = k8s_openapi::jiff::Timestamp::now();
    k8s_openapi::jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}
