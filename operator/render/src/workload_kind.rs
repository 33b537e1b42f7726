//! Kinds of workloads that run a role's instances.

use rbg_api::keys;
use rbg_api::v1alpha2::RoleSpec;

use crate::error::RenderError;
use crate::manifest::StringMap;

/// Kind of workload that runs a role's instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkloadKind {
    /// `workloads.x-k8s.io/v1alpha2`, the default of roles.
    RoleInstanceSet,
    /// `apps/v1` StatefulSet, of single pods.
    StatefulSet,
    /// `apps/v1` Deployment, of single pods.
    Deployment,
    /// `leaderworkerset.x-k8s.io/v1`, if the cluster serves it.
    LeaderWorkerSet,
}

impl WorkloadKind {
    /// The kind that a role requests by annotation. InstanceSet of v1alpha1 is RoleInstanceSet now.
    ///
    /// # Errors
    /// [`RenderError::UnknownWorkload`].
    pub fn from_role(role: &RoleSpec) -> Result<Self, RenderError> {
        let Some(requested) =
            role.annotations.get(keys::ROLE_WORKLOAD_TYPE).filter(|requested| !requested.is_empty())
        else {
            return Ok(Self::RoleInstanceSet);
        };
        let (api_version, kind) = requested.rsplit_once('/').unwrap_or(("", requested));
        match (api_version, kind) {
            ("workloads.x-k8s.io/v1alpha2", "RoleInstanceSet")
            | ("workloads.x-k8s.io/v1alpha1", "InstanceSet") => Ok(Self::RoleInstanceSet),
            ("apps/v1", "StatefulSet") => Ok(Self::StatefulSet),
            ("apps/v1", "Deployment") => Ok(Self::Deployment),
            ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") => Ok(Self::LeaderWorkerSet),
            _ => Err(RenderError::UnknownWorkload { role: role.name.clone(), kind: requested.clone() }),
        }
    }

    /// API version of its objects.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Self::RoleInstanceSet => "workloads.x-k8s.io/v1alpha2",
            Self::StatefulSet | Self::Deployment => "apps/v1",
            Self::LeaderWorkerSet => "leaderworkerset.x-k8s.io/v1",
        }
    }

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

/// Fields of an existing workload that must not change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreservedFields {
    /// Its selector, which is immutable. Only for StatefulSets and Deployments.
    pub selector: Option<StringMap>,
    /// Whether its template has the labels and environment names of v1alpha1. Adding them would restart pods. Only for
    /// StatefulSets, Deployments and LeaderWorkerSets: our own pods get them at creation.
    pub legacy: Option<bool>,
    /// Its topology annotation, empty if it has none, as long as its role has not changed. Its template was created with it,
    /// and another value would restart all pods. Only for StatefulSets, Deployments and LeaderWorkerSets: our own pods get the
    /// topology at creation.
    pub topology: Option<String>,
}
