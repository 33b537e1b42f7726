//! Kinds of objects that the operator reads and writes.

use kube::api::{ApiResource, GroupVersionKind};
use moongate_render::Manifest;

/// A kind of object, as the operator distinguishes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResourceKind {
    GroupSet,
    Group,
    Adapter,
    Policy,
    Set,
    Instance,
    /// A `Pod` that belongs to a RoleInstance
    Pod,
    ConfigMap,
    Service,
    Revision,
    StatefulSet,
    Deployment,
    Profile,
    LeaderWorkerSet,
    /// `PodGroup` in the API of scheduler-plugins
    PodGroup,
    /// `PodGroup` in the API of Volcano
    VolcanoPodGroup,
    Warmup,
    /// `Pod` of a warmup, or one that pulls images for other pods
    WarmupPod,
    /// `Pod` of a role created by a StatefulSet, Deployment or LeaderWorkerSet
    ForeignPod,
    Node,
}

/// Selects pods of groups, except those of RoleInstances.
const EXTERNAL_PODS: &str = "rbg.workloads.x-k8s.io/group-name,!rbg.workloads.x-k8s.io/role-instance-name";

impl ResourceKind {
    pub const ALL: [Self; 20] = [
        Self::GroupSet,
        Self::Group,
        Self::Adapter,
        Self::Policy,
        Self::Set,
        Self::Instance,
        Self::Pod,
        Self::ConfigMap,
        Self::Service,
        Self::Revision,
        Self::StatefulSet,
        Self::Deployment,
        Self::Profile,
        Self::LeaderWorkerSet,
        Self::PodGroup,
        Self::VolcanoPodGroup,
        Self::Warmup,
        Self::WarmupPod,
        Self::ForeignPod,
        Self::Node,
    ];

    /// Value of an object's `kind` field.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GroupSet => "RoleBasedGroupSet",
            Self::Group => "RoleBasedGroup",
            Self::Adapter => "RoleBasedGroupScalingAdapter",
            Self::Policy => "CoordinatedPolicy",
            Self::Set => "RoleInstanceSet",
            Self::Instance => "RoleInstance",
            Self::Pod | Self::WarmupPod | Self::ForeignPod => "Pod",
            Self::ConfigMap => "ConfigMap",
            Self::Service => "Service",
            Self::Revision => "ControllerRevision",
            Self::StatefulSet => "StatefulSet",
            Self::Deployment => "Deployment",
            Self::Profile => "ClusterEngineRuntimeProfile",
            Self::LeaderWorkerSet => "LeaderWorkerSet",
            Self::PodGroup | Self::VolcanoPodGroup => "PodGroup",
            Self::Warmup => "RoleBasedGroupWarmup",
            Self::Node => "Node",
        }
    }

    /// Finds a kind by its name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Finds the kind of a manifest.
    #[must_use]
    pub fn from_manifest(manifest: &Manifest) -> Option<Self> {
        let is_it =
            |kind: &Self| kind.name() == manifest.kind() && kind.api_version() == manifest.api_version();
        let kind = Self::ALL.into_iter().find(is_it)?;
        let is_warmup = manifest.label(rbg_api::keys::WARMUP_NAME).is_some();
        Some(if kind == Self::Pod && is_warmup { Self::WarmupPod } else { kind })
    }

    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Self::GroupSet
            | Self::Group
            | Self::Adapter
            | Self::Policy
            | Self::Set
            | Self::Instance
            | Self::Profile
            | Self::Warmup => "workloads.x-k8s.io/v1alpha2",
            Self::Pod | Self::WarmupPod | Self::ForeignPod | Self::Node | Self::ConfigMap | Self::Service => {
                "v1"
            }
            Self::Revision | Self::StatefulSet | Self::Deployment => "apps/v1",
            Self::LeaderWorkerSet => "leaderworkerset.x-k8s.io/v1",
            Self::PodGroup => "scheduling.x-k8s.io/v1alpha1",
            Self::VolcanoPodGroup => "scheduling.volcano.sh/v1beta1",
        }
    }

    /// Whether the kind is one of our CRDs, which accept merge patches only.
    #[must_use]
    pub fn is_custom(self) -> bool {
        self.api_version().starts_with("workloads.x-k8s.io/")
    }

    /// Whether the cluster may not serve the kind: another project defines it.
    #[must_use]
    pub fn is_optional(self) -> bool {
        matches!(self, Self::LeaderWorkerSet | Self::PodGroup | Self::VolcanoPodGroup)
    }

    /// Whether the kind is cluster-scoped.
    #[must_use]
    pub fn is_of_cluster(self) -> bool {
        matches!(self, Self::Profile | Self::Node)
    }

    #[must_use]
    pub fn resource(self) -> ApiResource {
        let (group, version) = self.api_version().split_once('/').unwrap_or(("", self.api_version()));
        let plural = match self {
            Self::Policy => "coordinatedpolicies".to_owned(),
            _ => format!("{}s", self.name().to_lowercase()),
        };
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, self.name()), &plural)
    }

    /// Label selector for the objects to watch; `None` if not all relevant objects have a common label.
    #[must_use]
    pub fn selector(self) -> Option<&'static str> {
        match self {
            Self::Pod => Some(rbg_api::keys::ROLE_INSTANCE_NAME),
            Self::WarmupPod => Some(rbg_api::keys::WARMUP_NAME),
            Self::ForeignPod => Some(EXTERNAL_PODS),
            Self::Service | Self::StatefulSet | Self::Deployment | Self::LeaderWorkerSet => {
                Some(rbg_api::keys::GROUP_NAME)
            }
            _ => None,
        }
    }
}
