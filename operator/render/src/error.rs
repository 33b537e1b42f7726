//! Errors in specs that cannot be rendered.

use rbg_api::merge::MergeError;

/// Error in a spec; its text is shown to the author of the spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// The object lacks a name or namespace.
    #[error("the object has no `metadata.{0}`")]
    NoMetadata(&'static str),
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
    #[error("annotation `{key}` of component `{component}`: {cause}")]
    Annotation { key: &'static str, component: String, cause: String },
    /// All ports of the range are taken.
    #[error("no port is free between {first} and {after}; increase the operator's --port-range")]
    NoPort {
        /// First port of the range.
        first: u16,
        /// End of the range, exclusive.
        after: u16,
    },
    /// A topology annotation is invalid.
    #[error("annotation `{key}`: {cause}")]
    Topology { key: &'static str, cause: String },
    /// The stored coordination of v1alpha1 is not JSON of the expected form.
    #[error("annotation `conversion.workloads.x-k8s.io/v1alpha1-coordination`: {0}")]
    Coordination(String),
    /// The discovery file cannot be encoded.
    #[error("cannot encode the discovery file: {0}")]
    DiscoveryFile(String),
}
