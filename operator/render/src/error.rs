//! Why a spec yields no objects.

use rbg_api::merge::MergeError;

/// Why a spec yields no objects. The texts are shown to whoever wrote the spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// An object without a name or namespace.
    #[error("the object has no `metadata.{0}`")]
    NoMetadata(&'static str),
    /// A role of no pattern.
    #[error(
        "role `{0}` has none of standalonePattern, leaderWorkerPattern and customComponentsPattern; one is needed"
    )]
    NoPattern(String),
    /// A role without a pod.
    #[error("role `{0}` has neither `template` nor `templateRef`")]
    NoTemplate(String),
    /// A reference to nothing.
    #[error("role `{role}` refers to the role template `{template}`, which spec.roleTemplates does not have")]
    UnknownTemplate {
        /// The role.
        role: String,
        /// What it refers to.
        template: String,
    },
    /// A patch that cannot be merged.
    #[error("{patch} of role `{role}`: {cause}")]
    Patch {
        /// The role.
        role: String,
        /// Which patch.
        patch: &'static str,
        /// What is wrong.
        cause: MergeError,
    },
    /// A kind that nothing runs.
    #[error(
        "role `{role}` asks for the workload `{kind}`; known are workloads.x-k8s.io/v1alpha2/RoleInstanceSet, \
         apps/v1/StatefulSet, apps/v1/Deployment and leaderworkerset.x-k8s.io/v1/LeaderWorkerSet"
    )]
    UnknownWorkload {
        /// The role.
        role: String,
        /// What it asks for.
        kind: String,
    },
    /// A pattern that the kind cannot run.
    #[error("role `{role}`: {kind} cannot run {pattern}; use a RoleInstanceSet")]
    PatternOfWorkload {
        /// The role.
        role: String,
        /// The kind.
        kind: &'static str,
        /// The pattern.
        pattern: &'static str,
    },
    /// Updates that could never begin.
    #[error(
        "role `{0}`: maxUnavailable and maxSurge are both 0, so that no update could begin; raise one of them"
    )]
    NoProgress(String),
    /// A profile that is not there.
    #[error("role `{role}` names the ClusterEngineRuntimeProfile `{profile}`, which does not exist")]
    UnknownProfile {
        /// The role.
        role: String,
        /// The profile.
        profile: String,
    },
    /// An annotation that is no JSON of the expected shape.
    #[error("annotation `{key}` of component `{component}`: {cause}")]
    Annotation {
        /// The annotation.
        key: &'static str,
        /// The component.
        component: String,
        /// What is wrong.
        cause: String,
    },
    /// As many ports are wanted as there are.
    #[error("no port is free between {first} and {after}; give the operator a wider --port-range")]
    NoPort {
        /// The first port that may be chosen.
        first: u16,
        /// The port after the last one.
        after: u16,
    },
    /// An annotation about nearness that cannot be followed.
    #[error("annotation `{key}`: {cause}")]
    Topology {
        /// The annotation.
        key: &'static str,
        /// What is wrong.
        cause: String,
    },
    /// v1alpha1's coordination, as stored, is no JSON of the expected shape.
    #[error("annotation `conversion.workloads.x-k8s.io/v1alpha1-coordination`: {0}")]
    Coordination(String),
    /// The discovery file cannot be written.
    #[error("the discovery file cannot be written: {0}")]
    DiscoveryFile(String),
}
