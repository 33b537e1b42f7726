//! Why a command cannot do what it was asked to.

/// Why a command cannot do what it was asked to. The texts are for whoever asked.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// No cluster is configured.
    #[error("no cluster to talk to: {0}; give --kubeconfig or --context")]
    Config(String),
    /// The API server refuses, or does not answer.
    #[error("{0}")]
    Api(String),
    /// RoleBasedGroup is not installed.
    #[error("this cluster does not serve RoleBasedGroups: install their definitions (operator/crds) first")]
    NoDefinitions,
    /// There is no such group.
    #[error("namespace {namespace} has no RoleBasedGroup `{name}`{}", alternatives(.there))]
    NoGroup {
        /// Its name.
        name: String,
        /// Where it was looked for.
        namespace: String,
        /// Groups that are there.
        there: Vec<String>,
    },
    /// There is no such role.
    #[error("the group has no role `{role}`{}", alternatives(.there))]
    NoRole {
        /// Its name.
        role: String,
        /// Roles that are there.
        there: Vec<String>,
    },
    /// There is no such container.
    #[error("role `{role}` has no container `{container}`{}", alternatives(.there))]
    NoContainer {
        /// The role.
        role: String,
        /// The container's name.
        container: String,
        /// Containers that are there.
        there: Vec<String>,
    },
    /// Which container is meant is not said.
    #[error(
        "role `{role}` has several containers: say {role}/CONTAINER={image}{}",
        alternatives(.there)
    )]
    WhichContainer {
        /// The role.
        role: String,
        /// The image.
        image: String,
        /// Its containers.
        there: Vec<String>,
    },
    /// An image without a role fits nowhere.
    #[error(
        "no container runs another tag of {image}: say ROLE=IMAGE or ROLE/CONTAINER=IMAGE{}",
        alternatives(.there)
    )]
    NoSuchRepository {
        /// The image.
        image: String,
        /// Images that containers run.
        there: Vec<String>,
    },
    /// There is no such revision.
    #[error("the group has no revision {revision}{}", alternatives(.there))]
    NoRevision {
        /// Its number.
        revision: i64,
        /// Numbers that are there.
        there: Vec<String>,
    },
    /// There is nothing to go back to.
    #[error("the group has no earlier revision that differs from what it is now")]
    NothingEarlier,
    /// A set writes the group.
    #[error(
        "the group belongs to the RoleBasedGroupSet `{0}`, which would take the change back: change the set's \
         groupTemplate instead"
    )]
    OfSet(String),
    /// A file cannot be read.
    #[error("{file}: {problem}")]
    File {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// An object is not what it should be.
    #[error("{0}")]
    Unreadable(String),
    /// The webhook would say the same.
    #[error("the group would be refused: {0}")]
    Refused(String),
    /// Time is up.
    #[error("not in time: {0}")]
    TimedOut(String),
}

/// What there is instead.
fn alternatives(there: &[String]) -> String {
    match there {
        [] => "; there is none".to_owned(),
        there => format!("; there are: {}", there.join(", ")),
    }
}

impl From<kube::Error> for KubectlError {
    fn from(error: kube::Error) -> Self {
        Self::Api(match error {
            kube::Error::Api(status) => status.message.clone(),
            other => format!("the API server cannot be asked: {}", last_cause(&other)),
        })
    }
}

/// The innermost cause, which says most.
fn last_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
