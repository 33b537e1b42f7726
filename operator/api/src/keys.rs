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

/// Label: revision of the role's spec; followed by the role's name.
pub const ROLE_REVISION_PREFIX: &str = "rbg.workloads.x-k8s.io/role-revision-";
/// Label: as [`GROUP_UID`], for pods of a group that has its topology to itself.
pub const GROUP_UNIQUE_HASH: &str = "rbg.workloads.x-k8s.io/group-unique-hash";
/// Label: UID of the RoleBasedGroup, where bindings to nodes must not outlive it.
pub const RBG_OWNER_UID: &str = "rbg.workloads.x-k8s.io/rbg-owner-uid";
/// Label: UID of the RoleInstanceSet that a stateless instance belongs to.
pub const ROLE_INSTANCE_OWNER: &str = "rbg.workloads.x-k8s.io/role-instance-owner";
/// Label: the random part of a stateless instance's name.
pub const ROLE_INSTANCE_ID: &str = "rbg.workloads.x-k8s.io/role-instance-id";
/// Label: `Normal`, `PreparingUpdate`, `Updating`, `Updated` or `PreparingDelete`.
pub const LIFECYCLE_STATE: &str = "rbg.workloads.x-k8s.io/role-instance-lifecycle-state";
/// Annotation: when [`LIFECYCLE_STATE`] was last changed.
pub const LIFECYCLE_TIMESTAMP: &str = "rbg.workloads.x-k8s.io/role-instance-lifecycle-timestamp";
/// Annotation of an instance: `true` if its pods shall serve nobody while it waits in one of the states that prepare.
pub const LIFECYCLE_NOT_READY: &str = "moongate.io/lifecycle-not-ready";
/// Annotation of an instance: `true` if its pods shall drain meanwhile.
pub const LIFECYCLE_DRAIN: &str = "moongate.io/lifecycle-drain";
/// Annotation: seconds between a pod's being taken out of its services and the change of its image.
pub const GRACE_PERIOD_SECONDS: &str = "rbg.workloads.x-k8s.io/inplace-update-grace-period-seconds";
/// Annotation of a group: `true` if its pods are scheduled at once or not at all.
pub const GANG_SCHEDULING: &str = "rbg.workloads.x-k8s.io/group-gang-scheduling";
/// Annotation of a group: seconds to wait for all of its pods (scheduler-plugins).
pub const GANG_SCHEDULING_TIMEOUT: &str = "rbg.workloads.x-k8s.io/group-gang-scheduling-timeout";
/// Annotation of a group: queue (Volcano).
pub const GANG_SCHEDULING_VOLCANO_QUEUE: &str = "rbg.workloads.x-k8s.io/group-gang-scheduling-volcano-queue";
/// Annotation of a group: priority class (Volcano).
pub const GANG_SCHEDULING_VOLCANO_PRIORITY: &str =
    "rbg.workloads.x-k8s.io/group-gang-scheduling-volcano-priority";
/// Annotation of a role or instance: `true` if the pods of one instance are made at once or not at all.
pub const INSTANCE_GANG_SCHEDULING: &str = "rbg.workloads.x-k8s.io/role-instance-gang-scheduling";
/// Annotation of a group: the topology key of which one domain has pods of this group only.
pub const GROUP_EXCLUSIVE_TOPOLOGY: &str = "rbg.workloads.x-k8s.io/group-exclusive-topology";
/// Annotation of a pod template: present if [`GROUP_EXCLUSIVE_TOPOLOGY`] does not hold for it.
pub const ROLE_DISABLE_EXCLUSIVE: &str = "rbg.workloads.x-k8s.io/role-disable-exclusive";
/// Annotation of a role: `Preferred` or `Required`, if new pods go to the node of their predecessors.
pub const INPLACE_SCHEDULING: &str = "rbg.workloads.x-k8s.io/role-inplace-scheduling";
/// Annotation of a role: `Pod` or `Component`, what a node is remembered for.
pub const INPLACE_SCHEDULING_GRANULARITY: &str = "rbg.workloads.x-k8s.io/role-inplace-scheduling-granularity";
/// Annotation of a role: labels of nodes to stay away from, separated by commas.
pub const INPLACE_SCHEDULING_AVOID: &str = "rbg.workloads.x-k8s.io/role-inplace-scheduling-avoid";
/// Annotation of a pod template: `Inherit` or `Ignore`, whether its crashes recreate the instance.
pub const RESTART_TRIGGER_POLICY: &str = "rbg.workloads.x-k8s.io/restart-trigger-policy";
/// Annotation of a component or pod template: ports to choose for its pods, as JSON.
pub const PORT_ALLOCATOR: &str = "rolebasedgroup.workloads.x-k8s.io/port-allocator";
/// Annotation of a component or pod template: addresses and ports of other components that it wants to know, as JSON.
pub const COMPONENT_DISCOVERY: &str = "rolebasedgroup.workloads.x-k8s.io/component-discovery";
/// Annotation of a component or pod template: components that start before or are deleted before it, as JSON.
pub const COMPONENT_DEPENDS_ON: &str = "rolebasedgroup.workloads.x-k8s.io/component-depends-on";
/// Annotation of a role or pod template: the port at which pods are asked before and after they are restarted in place.
pub const UPGRADE_HOOKS: &str = "moongate.io/upgrade-hooks";
/// Annotation of a role or pod template: for how long at most.
pub const UPGRADE_TIMEOUT: &str = "moongate.io/upgrade-timeout";
/// Annotation of a group, role or pod template: `true` if new images are pulled before pods are restarted in place for them.
pub const PRE_PULL: &str = "moongate.io/pre-pull";
/// Annotation of a group, role or pod template: for how long that is waited for at most.
pub const PRE_PULL_TIMEOUT: &str = "moongate.io/pre-pull-timeout";
/// Label of instances and pods: their revision.
pub const CONTROLLER_REVISION_HASH: &str = "controller-revision-hash";
/// Label of instances and pods of an ordered role: the instance's name.
pub const POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
/// Label of ControllerRevisions: their hash.
pub const REVISION_HASH: &str = "controller.kubernetes.io/hash";
/// Label of pods of a gang (scheduler-plugins): the PodGroup.
pub const POD_GROUP: &str = "pod-group.scheduling.sigs.k8s.io/name";
/// Annotation of pods of a gang (Volcano): the PodGroup.
pub const VOLCANO_POD_GROUP: &str = "scheduling.k8s.io/group-name";

/// Annotation of a group: levels of nearness, nearest first, each `LEVEL` or `LEVEL=LABEL`.
pub const TOPOLOGY_LADDER: &str = "moongate.io/topology-ladder";
/// Annotation of a group: which role shall be near which, `ROLE:ROLE` separated by commas.
pub const TOPOLOGY_NEAR: &str = "moongate.io/topology-near";
/// Annotation of a group: the level over which instances of a role are spread, or `none`.
pub const TOPOLOGY_SPREAD: &str = "moongate.io/topology-spread";
/// Annotation of workloads and instances: what these three come to for their pods, as JSON.
pub const TOPOLOGY: &str = "moongate.io/topology";

/// Annotation of a pod: the availability zone that it runs in.
pub const ZONE: &str = "moongate.io/zone";
/// Annotation of a pod: the rack or RDMA rail that it runs in.
pub const RACK: &str = "moongate.io/rack";
/// Annotation of a pod: the NVLink domain that it runs in.
pub const NVLINK_DOMAIN: &str = "moongate.io/nvlink-domain";
/// Label of pods of a warmup: its name.
pub const WARMUP_NAME: &str = "workloads.x-k8s.io/warmup-name";
/// Label of pods of a warmup: its UID.
pub const WARMUP_UID: &str = "workloads.x-k8s.io/warmup-uid";
/// Label of pods of a warmup: the node that they are for.
pub const WARMUP_NODE: &str = "workloads.x-k8s.io/node-name";
/// Label of nodes: what pods are bound to a node by.
pub const HOSTNAME: &str = "kubernetes.io/hostname";

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
    /// Annotation of a group: as [`super::GROUP_EXCLUSIVE_TOPOLOGY`].
    pub const EXCLUSIVE_TOPOLOGY: &str = "rolebasedgroup.workloads.x-k8s.io/exclusive-topology";
    /// Annotation of a pod template: as [`super::ROLE_DISABLE_EXCLUSIVE`].
    pub const DISABLE_EXCLUSIVE_TOPOLOGY: &str =
        "rolebasedgroup.workloads.x-k8s.io/disable-exclusive-topology";
    /// Annotation: `Stateful` or `Stateless`.
    pub const INSTANCE_PATTERN: &str = "instance.rolebasedgroup.workloads.x-k8s.io/pattern";
    /// Label: index inside the RoleBasedGroupSet.
    pub const GROUPSET_INDEX: &str = "rolebasedgroupset.workloads.x-k8s.io/rbg-index";
    /// Label of LeaderWorkerSet pods: 0 is the leader.
    pub const LWS_WORKER_INDEX: &str = "leaderworkerset.sigs.k8s.io/worker-index";
}
