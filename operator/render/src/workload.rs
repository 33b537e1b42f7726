//! What runs a role's instances.

use rbg_api::keys;
use rbg_api::v1alpha2::RoleSpec;

use crate::RenderError;
use crate::manifest::StringMap;

/// What runs a role's instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkloadKind {
    /// Ours; what a role gets that asks for nothing.
    RoleInstanceSet,
    /// `apps/v1`.
    StatefulSet,
    /// `apps/v1`.
    Deployment,
    /// `leaderworkerset.x-k8s.io/v1`.
    LeaderWorkerSet,
}

impl WorkloadKind {
    /// What a role asks for by annotation. InstanceSet of v1alpha1 is what RoleInstanceSet is now.
    ///
    /// # Errors
    /// [`RenderError::UnknownWorkload`].
    pub fn from_role(role: &RoleSpec) -> Result<Self, RenderError> {
        let Some(asked) = role.annotations.get(keys::ROLE_WORKLOAD_TYPE).filter(|asked| !asked.is_empty())
        else {
            return Ok(Self::RoleInstanceSet);
        };
        let (api_version, kind) = asked.rsplit_once('/').unwrap_or(("", asked));
        match (api_version, kind) {
            ("workloads.x-k8s.io/v1alpha2", "RoleInstanceSet")
            | ("workloads.x-k8s.io/v1alpha1", "InstanceSet") => Ok(Self::RoleInstanceSet),
            ("apps/v1", "StatefulSet") => Ok(Self::StatefulSet),
            ("apps/v1", "Deployment") => Ok(Self::Deployment),
            ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") => Ok(Self::LeaderWorkerSet),
            _ => Err(RenderError::UnknownWorkload { role: role.name.clone(), kind: asked.clone() }),
        }
    }

    /// `group/version` of its objects.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Self::RoleInstanceSet => "workloads.x-k8s.io/v1alpha2",
            Self::StatefulSet | Self::Deployment => "apps/v1",
            Self::LeaderWorkerSet => "leaderworkerset.x-k8s.io/v1",
        }
    }

    /// Kind of its objects.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::RoleInstanceSet => "RoleInstanceSet",
            Self::StatefulSet => "StatefulSet",
            Self::Deployment => "Deployment",
            Self::LeaderWorkerSet => "LeaderWorkerSet",
        }
    }
}

/// What stays as it is of a workload that exists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreservedFields {
    /// Its selector, which cannot be changed. Only StatefulSets and Deployments.
    pub selector: Option<StringMap>,
    /// Whether its template has the labels and environment names of v1alpha1. Adding them would restart pods that do well
    /// without. Only StatefulSets, Deployments and LeaderWorkerSets: our own pods get them when they are made.
    pub legacy: Option<bool>,
    /// The annotation about nearness that it has, empty without one, if its role has not changed since. Its template was made
    /// with it, and another one would restart all pods. Only StatefulSets, Deployments and LeaderWorkerSets: our own pods are
    /// told when they are made.
    pub topology: Option<String>,
}
