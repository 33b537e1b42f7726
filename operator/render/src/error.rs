//! Errors in specs that cannot be rendered.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use rbg_api::merge::MergeError;
use rbg_api::{TopologyLevel, keys};

use crate::size_limit_error::SizeLimitError;

/// Error in a spec; its text is shown to the author of the spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// The object lacks a name or namespace.
    #[error("the object has no `metadata.{0}`")]
    NoMetadata(&'static str),
    /// The object requests too many objects.
    #[error(transparent)]
    Limit(#[from] SizeLimitError),
    /// The queue's name is unusable as a label.
    #[error(
        "annotation `{key}`: `{0}` is not the name of a queue: letters a-z, digits, `-` and `.`, at most 63 in all",
        key = keys::QUEUE
    )]
    Queue(String),
    /// The role has no pattern.
    #[error(
        "role `{0}` has none of standalonePattern, leaderWorkerPattern and customComponentsPattern; one is needed"
    )]
    NoPattern(String),
    /// The role has no pod template.
    #[error("role `{0}` has neither `template` nor `templateRef`")]
    NoTemplate(String),
    /// The role template does not exist.
    #[error("role `{role}` refers to the role template `{template}`, which spec.roleTemplates does not have")]
    UnknownTemplate {
        role: String,
        /// Name of the missing role template.
        template: String,
    },
    /// The patch cannot be merged.
    #[error("{patch} of role `{role}`: {cause}")]
    Patch {
        role: String,
        /// The patch's field, for example `templateRef.patch`.
        patch: &'static str,
        cause: MergeError,
    },
    /// The workload kind is not supported.
    #[error(
        "role `{role}` requests the workload `{kind}`; supported are workloads.x-k8s.io/v1alpha2/RoleInstanceSet, \
         apps/v1/StatefulSet, apps/v1/Deployment and leaderworkerset.x-k8s.io/v1/LeaderWorkerSet"
    )]
    UnknownWorkload {
        role: String,
        /// The requested kind, with its API version.
        kind: String,
    },
    /// The workload kind does not support the pattern.
    #[error("role `{role}`: {kind} cannot run {pattern}; use a RoleInstanceSet")]
    PatternOfWorkload {
        role: String,
        kind: &'static str,
        /// The pattern's field, for example `customComponentsPattern`.
        pattern: &'static str,
    },
    /// The update could never start.
    #[error(
        "role `{0}`: maxUnavailable and maxSurge are both 0, so that no update can start; raise one of them"
    )]
    NoProgress(String),
    /// The runtime profile does not exist.
    #[error("role `{role}` names the ClusterEngineRuntimeProfile `{profile}`, which does not exist")]
    UnknownProfile { role: String, profile: String },
    /// The annotation is not JSON of the expected form.
    #[error("annotation `{key}` of component `{component}`: {source}")]
    Annotation { key: &'static str, component: String, source: ComponentAnnotationError },
    /// All ports of the range are taken.
    #[error("no port is free between {first} and {after}; increase the operator's --port-range")]
    NoPort {
        /// First port of the range.
        first: u16,
        /// End of the range, exclusive.
        after: u16,
    },
    /// A topology annotation is invalid.
    #[error("annotation `{key}`: {source}")]
    Topology { key: &'static str, source: TopologyAnnotationError },
    /// The stored coordination of v1alpha1 is not JSON of the expected form.
    #[error("annotation `conversion.workloads.x-k8s.io/v1alpha1-coordination`: {0}")]
    Coordination(#[source] SharedError<serde_json::Error>),
    /// The discovery file cannot be encoded.
    #[error("cannot encode the discovery file: {0}")]
    DiscoveryFile(#[source] SharedError<serde_saphyr::ser::Error>),
}

/// Why the annotation of a component is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ComponentAnnotationError {
    #[error(transparent)]
    NotJson(#[from] SharedError<serde_json::Error>),
    /// The reference to a port has another form.
    #[error("`{0}` is not <role>.<component>.<port>")]
    PortReference(String),
}

/// Why a topology annotation is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyAnnotationError {
    /// The annotation that the operator writes is not JSON of the expected form.
    #[error(transparent)]
    NotJson(#[from] SharedError<serde_json::Error>),
    #[error("it has no effect with {}: none", keys::TOPOLOGY_LADDER)]
    NoLevels,
    #[error(
        "`{0}` is not a level; use auto, none, or a list of {levels}, each optionally with `=LABEL`",
        levels = TopologyLevel::ALL.map(TopologyLevel::name).join(", ")
    )]
    UnknownLevel(String),
    #[error("{0} has no default label; use `{0}=LABEL` with a label of your nodes")]
    NoDefaultLabel(String),
    #[error("`{0}` is not a label key")]
    InvalidLabelKey(String),
    #[error("`{0}` repeats a level or a label")]
    Repeated(String),
    #[error("`{0}` is not a pair; use ROLE:ROLE")]
    NotAPair(String),
    #[error("`{0}` is not a role of this group")]
    UnknownRole(String),
    #[error("`{level}` is not a level of the group; use {} or none", .levels.join(", "))]
    NotOfGroup {
        level: String,
        /// Names of the group's levels.
        levels: Vec<&'static str>,
    },
}

/// An error of a parser or a serializer, shared so that it can be cloned. Two are equal if their texts are: validation ignores the errors
/// that the stored object already has.
#[derive(Debug)]
pub struct SharedError<E>(Arc<E>);

impl<E> Clone for SharedError<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<E> From<E> for SharedError<E> {
    fn from(error: E) -> Self {
        Self(Arc::new(error))
    }
}

impl<E: fmt::Display> PartialEq for SharedError<E> {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_string() == other.0.to_string()
    }
}

impl<E: fmt::Display> Eq for SharedError<E> {}

impl<E: fmt::Display> fmt::Display for SharedError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<E: Error> Error for SharedError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
