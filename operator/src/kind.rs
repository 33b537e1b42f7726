//! The kinds of objects that the operator reads and writes.

use kube::api::{ApiResource, GroupVersionKind};

/// A kind of object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `RoleBasedGroupSet`
    GroupSet,
    /// `RoleBasedGroup`
    Group,
    /// `RoleBasedGroupScalingAdapter`
    Adapter,
    /// `CoordinatedPolicy`
    Policy,
    /// `RoleInstanceSet`
    Set,
    /// `RoleInstance`
    Instance,
    /// `Pod`
    Pod,
    /// `ConfigMap`
    ConfigMap,
    /// `Service`
    Service,
    /// `ControllerRevision`
    Revision,
    /// `StatefulSet`
    StatefulSet,
    /// `Deployment`
    Deployment,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 12] = [
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
    ];

    /// As an object's `kind` has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GroupSet => "RoleBasedGroupSet",
            Self::Group => "RoleBasedGroup",
            Self::Adapter => "RoleBasedGroupScalingAdapter",
            Self::Policy => "CoordinatedPolicy",
            Self::Set => "RoleInstanceSet",
            Self::Instance => "RoleInstance",
            Self::Pod => "Pod",
            Self::ConfigMap => "ConfigMap",
            Self::Service => "Service",
            Self::Revision => "ControllerRevision",
            Self::StatefulSet => "StatefulSet",
            Self::Deployment => "Deployment",
        }
    }

    /// The kind of that name, if it is one of ours.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// `group/version`.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Self::GroupSet | Self::Group | Self::Adapter | Self::Policy | Self::Set | Self::Instance => {
                "workloads.x-k8s.io/v1alpha2"
            }
            Self::Pod | Self::ConfigMap | Self::Service => "v1",
            Self::Revision | Self::StatefulSet | Self::Deployment => "apps/v1",
        }
    }

    /// Whether it is a definition of ours: other patches are understood than for kinds that Kubernetes knows by itself.
    #[must_use]
    pub fn is_custom(self) -> bool {
        self.api_version().starts_with("workloads.x-k8s.io/")
    }

    /// Where the API server serves it.
    #[must_use]
    pub fn resource(self) -> ApiResource {
        let (group, version) = self.api_version().split_once('/').unwrap_or(("", self.api_version()));
        let plural = match self {
            Self::Policy => "coordinatedpolicies".to_owned(),
            _ => format!("{}s", self.name().to_lowercase()),
        };
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, self.name()), &plural)
    }

    /// Only objects with this label concern us; core kinds have many that do not. `None` where not all of ours have one.
    #[must_use]
    pub fn label(self) -> Option<&'static str> {
        match self {
            Self::Pod => Some(rbg_api::keys::ROLE_INSTANCE_NAME),
            Self::Service | Self::StatefulSet | Self::Deployment => Some(rbg_api::keys::GROUP_NAME),
            _ => None,
        }
    }
}
