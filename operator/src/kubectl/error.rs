//! Errors of the kubectl commands.

use std::io;

use rbg_api::conversion::ConversionError;

use crate::KubeClientError;
use crate::validation::ValidationError;

/// Error of a kubectl command; its text is shown to the user.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    #[error("no cluster configured: {0}; set --kubeconfig or --context")]
    Config(#[from] KubeClientError),
    // Not a source: the text has the part that concerns the user.
    /// The API server rejected a request, or did not respond.
    #[error("{}", api_text(.0))]
    Api(kube::Error),
    /// The CRDs are not installed.
    #[error("this cluster does not serve RoleBasedGroups: install the CRDs (operator/crds) first")]
    NoDefinitions,
    /// The group does not exist.
    #[error("namespace {namespace} has no RoleBasedGroup `{name}`{}", alternatives(.existing))]
    NoGroup {
        name: String,
        /// The namespace that was searched.
        namespace: String,
        existing: Vec<String>,
    },
    /// The role does not exist.
    #[error("the group has no role `{role}`{}", alternatives(.existing))]
    NoRole { role: String, existing: Vec<String> },
    /// The container does not exist.
    #[error("role `{role}` has no container `{container}`{}", alternatives(.existing))]
    NoContainer { role: String, container: String, existing: Vec<String> },
    /// The role has several containers, and none is given.
    #[error(
        "role `{role}` has several containers: use {role}/CONTAINER={image}{}",
        alternatives(.existing)
    )]
    WhichContainer { role: String, image: String, existing: Vec<String> },
    /// No container runs another tag of the image.
    #[error(
        "no container runs another tag of {image}: use ROLE=IMAGE or ROLE/CONTAINER=IMAGE{}",
        alternatives(.existing)
    )]
    NoSuchRepository {
        image: String,
        /// Images of the group's containers.
        existing: Vec<String>,
    },
    /// The revision does not exist.
    #[error("the group has no revision {revision}{}", alternatives(.existing))]
    NoRevision {
        revision: i64,
        /// Revision numbers of the group.
        existing: Vec<String>,
    },
    /// There is no earlier revision to restore.
    #[error("the group has no earlier revision that differs from its present spec")]
    NothingEarlier,
    /// A RoleBasedGroupSet controls the group.
    #[error(
        "the group belongs to the RoleBasedGroupSet `{0}`, which would revert the change: change the set's \
         groupTemplate instead"
    )]
    OfSet(String),
    /// A file cannot be read.
    #[error("{file}: {source}")]
    File { file: String, source: ManifestFileError },
    /// A group cannot be converted to the other version of the API.
    #[error(transparent)]
    Conversion(#[from] ConversionError),
    /// A group does not have the expected form.
    #[error("the group cannot be read: {0}")]
    InvalidGroup(#[source] serde_json::Error),
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The validating webhook would reject the group.
    #[error("the group would be rejected: {}", joined(.0))]
    Refused(Vec<ValidationError>),
    #[error("timed out: {0}")]
    TimedOut(String),
}

/// Text that lists what exists instead.
fn alternatives(existing: &[String]) -> String {
    match existing {
        [] => "; none exist".to_owned(),
        existing => format!("; existing: {}", existing.join(", ")),
    }
}

/// Why a file with groups and policies cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestFileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Yaml(#[from] Box<serde_saphyr::Error>),
    #[error(transparent)]
    Conversion(#[from] ConversionError),
}

/// A value cannot be printed in the requested format.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Yaml(#[from] serde_saphyr::ser::Error),
}

impl From<kube::Error> for KubectlError {
    fn from(error: kube::Error) -> Self {
        Self::Api(error)
    }
}

fn joined(errors: &[ValidationError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn api_text(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => format!("request to the API server failed: {}", last_cause(other)),
    }
}

/// The innermost cause, which is the most specific.
fn last_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
