//! Errors of the kubectl commands.

/// Error of a kubectl command; its text is shown to the user.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    #[error("no cluster configured: {0}; set --kubeconfig or --context")]
    Config(String),
    /// The API server rejected a request, or did not respond.
    #[error("{0}")]
    Api(String),
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
    #[error("{file}: {problem}")]
    File {
        file: String,
        /// Error message without the path.
        problem: String,
    },
    /// An object does not have the expected form.
    #[error("{0}")]
    Unreadable(String),
    /// The validating webhook would reject the group.
    #[error("the group would be rejected: {0}")]
    Refused(String),
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

impl From<kube::Error> for KubectlError {
    fn from(error: kube::Error) -> Self {
        Self::Api(match error {
            kube::Error::Api(status) => status.message.clone(),
            other => format!("request to the API server failed: {}", last_cause(&other)),
        })
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
