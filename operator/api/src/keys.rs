//! Label and annotation keys of RoleBasedGroup objects.

/// Prefix of the labels and annotations of `workloads.x-k8s.io/v1alpha2`.
pub const PREFIX: &str = "rbg.workloads.x-k8s.io/";

/// Label: name of the RoleBasedGroup.
pub const GROUP_NAME: &str = "rbg.workloads.x-k8s.io/group-name";
/// Label: hex SHA-1 of `namespace/name` of the group.
pub const GROUP_UID: &str = "rbg.workloads.x-k8s.io/group-uid";
/// Label: revision of the group that a child was rendered from.
pub const GROUP_REVISION: &str = "rbg.workloads.x-k8s.io/group-revision";
/// Label: name of the role inside the group.
pub const ROLE_NAME: &str = "rbg.workloads.x-k8s.io/role-name";
/// Label: `PodTemplate`, `LeaderWorkerSet` or `Components`.
pub const ROLE_TYPE: &str = "rbg.workloads.x-k8s.io/role-type";
/// Label: name of the RoleInstance that a pod belongs to.
pub const ROLE_INSTANCE_NAME: &str = "rbg.workloads.x-k8s.io/role-instance-name";
/// Label: ordinal of a stateful RoleInstance. Wrong for all but one instance at upstream HEAD: not an identity.
pub const ROLE_INSTANCE_INDEX: &str = "rbg.workloads.x-k8s.io/role-instance-index";
/// Label: component of the RoleInstance (standalone: the role's name; leader-worker: `leader` or `worker`).
pub const COMPONENT_NAME: &str = "rbg.workloads.x-k8s.io/component-name";
/// Label: ordinal inside the component.
pub const COMPONENT_ID: &str = "rbg.workloads.x-k8s.io/component-id";
/// Label of leader-worker pods only: 0 is the leader.
pub const COMPONENT_INDEX: &str = "rbg.workloads.x-k8s.io/component-index";
/// Label: pods in the component.
pub const COMPONENT_SIZE: &str = "rbg.workloads.x-k8s.io/component-size";
/// Label: name of the RoleBasedGroupSet.
pub const GROUPSET_NAME: &str = "rbg.workloads.x-k8s.io/groupset-name";
/// Label: index inside the RoleBasedGroupSet.
pub const GROUPSET_INDEX: &str = "rbg.workloads.x-k8s.io/groupset-index";
/// Annotation: replicas of the role.
pub const ROLE_SIZE: &str = "rbg.workloads.x-k8s.io/role-size";
/// Annotation: `apiVersion/kind` of the role's workload.
pub const ROLE_WORKLOAD_TYPE: &str = "rbg.workloads.x-k8s.io/role-workload-type";
/// Annotation: `Stateful` (default) or `Stateless`.
pub const ROLE_INSTANCE_PATTERN: &str = "rbg.workloads.x-k8s.io/role-instance-pattern";
/// Annotation: `legacy` or `refine`.
pub const DISCOVERY_CONFIG_MODE: &str = "rbg.workloads.x-k8s.io/discovery-config-mode";

/// Keys of the v1alpha1 era, which live Services and manifests still select by.
pub mod legacy {
    /// Prefix of the labels and annotations of `workloads.x-k8s.io/v1alpha1`.
    pub const PREFIX: &str = "rolebasedgroup.workloads.x-k8s.io/";
    /// Label: name of the RoleBasedGroup.
    pub const GROUP_NAME: &str = "rolebasedgroup.workloads.x-k8s.io/name";
    /// Label: name of the role.
    pub const ROLE_NAME: &str = "rolebasedgroup.workloads.x-k8s.io/role";
    /// Label: unique key of the group.
    pub const GROUP_UNIQUE_KEY: &str = "rolebasedgroup.workloads.x-k8s.io/group-unique-key";
    /// Annotation: replicas of the role.
    pub const ROLE_SIZE: &str = "rolebasedgroup.workloads.x-k8s.io/role-size";
    /// Annotation: `Stateful` or `Stateless`.
    pub const INSTANCE_PATTERN: &str = "instance.rolebasedgroup.workloads.x-k8s.io/pattern";
    /// Label of LeaderWorkerSet pods: 0 is the leader.
    pub const LWS_WORKER_INDEX: &str = "leaderworkerset.sigs.k8s.io/worker-index";
}
