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
/// Label: kind of the role, `PodTemplate`, `LeaderWorkerSet` or `Components`.
pub const ROLE_TYPE: &str = "rbg.workloads.x-k8s.io/role-type";
/// Label: name of the RoleInstance that a pod belongs to.
pub const ROLE_INSTANCE_NAME: &str = "rbg.workloads.x-k8s.io/role-instance-name";
/// Label: ordinal of a stateful RoleInstance. At upstream HEAD it is wrong for all but one instance, so it is no identity.
pub const ROLE_INSTANCE_INDEX: &str = "rbg.workloads.x-k8s.io/role-instance-index";
/// Label: component of the RoleInstance (standalone: the role's name; leader-worker: `leader` or `worker`).
pub const COMPONENT_NAME: &str = "rbg.workloads.x-k8s.io/component-name";
/// Label: ordinal inside the component, from 0.
pub const COMPONENT_ID: &str = "rbg.workloads.x-k8s.io/component-id";
/// Label of leader-worker pods only: 0 is the leader.
pub const COMPONENT_INDEX: &str = "rbg.workloads.x-k8s.io/component-index";
/// Label: number of pods in the component.
pub const COMPONENT_SIZE: &str = "rbg.workloads.x-k8s.io/component-size";
/// Label: name of the RoleBasedGroupSet.
pub const GROUPSET_NAME: &str = "rbg.workloads.x-k8s.io/groupset-name";
/// Label: index inside the RoleBasedGroupSet, from 0.
pub const GROUPSET_INDEX: &str = "rbg.workloads.x-k8s.io/groupset-index";
/// Annotation: number of replicas of the role.
pub const ROLE_SIZE: &str = "rbg.workloads.x-k8s.io/role-size";
/// Annotation: `apiVersion/kind` of the role's workload.
pub const ROLE_WORKLOAD_TYPE: &str = "rbg.workloads.x-k8s.io/role-workload-type";
/// Annotation: `Stateful` (default) or `Stateless`.
pub const ROLE_INSTANCE_PATTERN: &str = "rbg.workloads.x-k8s.io/role-instance-pattern";
/// Annotation: mode of the discovery file, `legacy` or `refine`.
pub const DISCOVERY_CONFIG_MODE: &str = "rbg.workloads.x-k8s.io/discovery-config-mode";

/// Label: revision of the role's spec; followed by the role's name.
pub const ROLE_REVISION_PREFIX: &str = "rbg.workloads.x-k8s.io/role-revision-";
/// Label: as [`GROUP_UID`], for pods of a group with exclusive topology.
pub const GROUP_UNIQUE_HASH: &str = "rbg.workloads.x-k8s.io/group-unique-hash";
/// Label: UID of the RoleBasedGroup, where node bindings must not outlive the group.
pub const RBG_OWNER_UID: &str = "rbg.workloads.x-k8s.io/rbg-owner-uid";
/// Label: UID of the RoleInstanceSet that a stateless instance belongs to.
pub const ROLE_INSTANCE_OWNER: &str = "rbg.workloads.x-k8s.io/role-instance-owner";
/// Label: the random part of a stateless instance's name.
pub const ROLE_INSTANCE_ID: &str = "rbg.workloads.x-k8s.io/role-instance-id";
/// Label: `Normal`, `PreparingUpdate`, `Updating`, `Updated` or `PreparingDelete`.
pub const LIFECYCLE_STATE: &str = "rbg.workloads.x-k8s.io/role-instance-lifecycle-state";
/// Annotation: time of the last change of [`LIFECYCLE_STATE`].
pub const LIFECYCLE_TIMESTAMP: &str = "rbg.workloads.x-k8s.io/role-instance-lifecycle-timestamp";
/// Annotation of an instance: `true` if its pods are out of service while it is in a `Preparing` state.
pub const LIFECYCLE_NOT_READY: &str = "moongate.io/lifecycle-not-ready";
/// Annotation of an instance: `true` if its pods drain while it is in a `Preparing` state.
pub const LIFECYCLE_DRAIN: &str = "moongate.io/lifecycle-drain";
/// Annotation of a workload that shrinks in steps: the number of instances it had at first and the number to reach, `8 to 6`.
pub const SCALE_IN: &str = "moongate.io/scale-in";
/// Annotation of a pod: an integer, 0 by default. Of several instances, the one whose pods have the lowest sum is removed first.
pub const POD_DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// Annotation of an instance: replaces the sum of [`POD_DELETION_COST`] of its pods.
pub const INSTANCE_DELETION_COST: &str = "controller.kubernetes.io/instance-deletion-cost";
/// Annotation: seconds between taking a pod out of its Services and changing its image.
pub const GRACE_PERIOD_SECONDS: &str = "rbg.workloads.x-k8s.io/inplace-update-grace-period-seconds";
/// Annotation of a group: `true` if its pods are scheduled all together or not at all.
pub const GANG_SCHEDULING: &str = "rbg.workloads.x-k8s.io/group-gang-scheduling";
/// Annotation of a group: seconds to wait for all of its pods (scheduler-plugins).
pub const GANG_SCHEDULING_TIMEOUT: &str = "rbg.workloads.x-k8s.io/group-gang-scheduling-timeout";
/// Annotation of a group: queue of its PodGroup (Volcano).
pub const GANG_SCHEDULING_VOLCANO_QUEUE: &str = "rbg.workloads.x-k8s.io/group-gang-scheduling-volcano-queue";
/// Annotation of a group: priority class of its PodGroup (Volcano).
pub const GANG_SCHEDULING_VOLCANO_PRIORITY: &str =
    "rbg.workloads.x-k8s.io/group-gang-scheduling-volcano-priority";
/// Annotation of a role or instance: `true` if the pods of one instance are created and recreated all together.
pub const INSTANCE_GANG_SCHEDULING: &str = "rbg.workloads.x-k8s.io/role-instance-gang-scheduling";
/// Annotation of a group: topology key; each domain of it runs pods of at most one such group.
pub const GROUP_EXCLUSIVE_TOPOLOGY: &str = "rbg.workloads.x-k8s.io/group-exclusive-topology";
/// Annotation of a pod template: present if [`GROUP_EXCLUSIVE_TOPOLOGY`] does not apply to it.
pub const ROLE_DISABLE_EXCLUSIVE: &str = "rbg.workloads.x-k8s.io/role-disable-exclusive";
/// Annotation of a role: `Preferred` or `Required`, to schedule new pods to the nodes of their predecessors.
pub const INPLACE_SCHEDULING: &str = "rbg.workloads.x-k8s.io/role-inplace-scheduling";
/// Annotation of a role: `Pod` or `Component`, the granularity at which nodes are stored.
pub const INPLACE_SCHEDULING_GRANULARITY: &str = "rbg.workloads.x-k8s.io/role-inplace-scheduling-granularity";
/// Annotation of a role: node labels to avoid, separated by commas.
pub const INPLACE_SCHEDULING_AVOID: &str = "rbg.workloads.x-k8s.io/role-inplace-scheduling-avoid";
/// Annotation of a pod template: `Inherit` or `Ignore`, whether crashes of its pods recreate the instance.
pub const RESTART_TRIGGER_POLICY: &str = "rbg.workloads.x-k8s.io/restart-trigger-policy";
/// Annotation of a component or pod template: ports to allocate for its pods, as JSON.
pub const PORT_ALLOCATOR: &str = "rolebasedgroup.workloads.x-k8s.io/port-allocator";
/// Annotation of a component or pod template: addresses and ports of other components to inject, as JSON.
pub const COMPONENT_DISCOVERY: &str = "rolebasedgroup.workloads.x-k8s.io/component-discovery";
/// Annotation of a component or pod template: components that start or are deleted before it, as JSON.
pub const COMPONENT_DEPENDS_ON: &str = "rolebasedgroup.workloads.x-k8s.io/component-depends-on";
/// Annotation of a role or pod template: port at which pods serve hooks before and after an in-place restart.
pub const UPGRADE_HOOKS: &str = "moongate.io/upgrade-hooks";
/// Annotation of a role or pod template: timeout of the hooks, for example `2m`.
pub const UPGRADE_TIMEOUT: &str = "moongate.io/upgrade-timeout";
/// Annotation of a group, role or pod template: `true` to pull new images before pods are restarted in place.
pub const PRE_PULL: &str = "moongate.io/pre-pull";
/// Annotation of a group, role or pod template: timeout of pulling images, for example `15m`.
pub const PRE_PULL_TIMEOUT: &str = "moongate.io/pre-pull-timeout";
/// Label of instances and pods: hash or name of their revision.
pub const CONTROLLER_REVISION_HASH: &str = "controller-revision-hash";
/// Label of instances and pods of an ordered role: the instance's name.
pub const POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
/// Label of ControllerRevisions: hash of their data.
pub const REVISION_HASH: &str = "controller.kubernetes.io/hash";
/// Label of pods of a gang: name of the PodGroup (scheduler-plugins).
pub const COSCHEDULING_POD_GROUP: &str = "scheduling.x-k8s.io/pod-group";
/// Label of pods of a gang: name of the PodGroup (Koordinator, and earlier releases of upstream for scheduler-plugins).
pub const POD_GROUP: &str = "pod-group.scheduling.sigs.k8s.io/name";
/// Annotation of pods of a gang: name of the PodGroup (Volcano).
pub const VOLCANO_POD_GROUP: &str = "scheduling.k8s.io/group-name";
/// Annotation of a group: the queue of its pods, in Kueue or Volcano.
pub const QUEUE: &str = "moongate.io/queue";
/// Label of pods and workloads: LocalQueue (Kueue). Annotation of instances: that of their pods.
pub const KUEUE_QUEUE: &str = "kueue.x-k8s.io/queue-name";
/// Label of pods: pods with the same value are admitted together (Kueue).
pub const KUEUE_POD_GROUP: &str = "kueue.x-k8s.io/pod-group-name";
/// Annotation of these pods: their number (Kueue).
pub const KUEUE_POD_GROUP_SIZE: &str = "kueue.x-k8s.io/pod-group-total-count";
/// Annotation of these pods: `false` if a pod that has ended is not replaced within its group (Kueue).
pub const KUEUE_RETRIABLE: &str = "kueue.x-k8s.io/retriable-in-group";
/// Annotation of pods and workloads: queue (Volcano).
pub const VOLCANO_QUEUE: &str = "scheduling.volcano.sh/queue-name";

/// Annotation of a group: topology levels, nearest first, each `LEVEL` or `LEVEL=LABEL`.
pub const TOPOLOGY_LADDER: &str = "moongate.io/topology-ladder";
/// Annotation of a group: pairs of roles with affinity, `ROLE:ROLE` separated by commas.
pub const TOPOLOGY_NEAR: &str = "moongate.io/topology-near";
/// Annotation of a group: the level over which instances of a role are spread, or `none`.
pub const TOPOLOGY_SPREAD: &str = "moongate.io/topology-spread";
/// Annotation of workloads and instances: topology resolved from these three annotations, as JSON.
pub const TOPOLOGY: &str = "moongate.io/topology";
/// Annotations for the placement of pods, which are in no revision: instances inherit them from their set.
pub const PLACEMENT: [&str; 3] = [TOPOLOGY, KUEUE_QUEUE, VOLCANO_QUEUE];

/// Annotation of a pod: availability zone of its node.
pub const ZONE: &str = "moongate.io/zone";
/// Annotation of a pod: rack or RDMA rail of its node.
pub const RACK: &str = "moongate.io/rack";
/// Annotation of a pod: NVLink domain of its node.
pub const NVLINK_DOMAIN: &str = "moongate.io/nvlink-domain";
/// Annotation of an instance: its latest fault and the nodes of its pods, as JSON. Only if a policy has fault recovery for its role.
pub const FAULT: &str = "moongate.io/fault";
/// Annotation of an instance: the faults that the group has dealt with, and the action that it requests, as JSON.
pub const FAULT_ACTION: &str = "moongate.io/fault-action";
/// Annotation of a pod: key of the fault action that has restarted it.
pub const FAULT_RESTART: &str = "moongate.io/fault-restart";
/// Label of pods that are replaced together in one domain: identity of the replacement.
pub const FAULT_REPLACEMENT: &str = "moongate.io/fault-replacement";
/// Label of pods of a warmup: the warmup's name.
pub const WARMUP_NAME: &str = "workloads.x-k8s.io/warmup-name";
/// Label of pods of a warmup: the warmup's UID.
pub const WARMUP_UID: &str = "workloads.x-k8s.io/warmup-uid";
/// Label of pods of a warmup: the node that they prepare.
pub const WARMUP_NODE: &str = "workloads.x-k8s.io/node-name";
/// Label of nodes to which warmup pods and placed pods are bound.
pub const HOSTNAME: &str = "kubernetes.io/hostname";

/// Keys of v1alpha1, which existing Services and manifests still select.
pub mod legacy {
    /// Prefix of the labels and annotations of `workloads.x-k8s.io/v1alpha1`.
    pub const PREFIX: &str = "rolebasedgroup.workloads.x-k8s.io/";
    /// Label: name of the RoleBasedGroup.
    pub const GROUP_NAME: &str = "rolebasedgroup.workloads.x-k8s.io/name";
    /// Label: name of the role.
    pub const ROLE_NAME: &str = "rolebasedgroup.workloads.x-k8s.io/role";
    /// Label: unique key of the group, as [`super::GROUP_UID`].
    pub const GROUP_UNIQUE_KEY: &str = "rolebasedgroup.workloads.x-k8s.io/group-unique-key";
    /// Annotation: number of replicas of the role.
    pub const ROLE_SIZE: &str = "rolebasedgroup.workloads.x-k8s.io/role-size";
    /// Annotation of a group: as [`super::GROUP_EXCLUSIVE_TOPOLOGY`].
    pub const EXCLUSIVE_TOPOLOGY: &str = "rolebasedgroup.workloads.x-k8s.io/exclusive-topology";
    /// Annotation of a pod template: as [`super::ROLE_DISABLE_EXCLUSIVE`].
    pub const DISABLE_EXCLUSIVE_TOPOLOGY: &str =
        "rolebasedgroup.workloads.x-k8s.io/disable-exclusive-topology";
    /// Annotation of a role: instance pattern, `Stateful` or `Stateless`.
    pub const INSTANCE_PATTERN: &str = "instance.rolebasedgroup.workloads.x-k8s.io/pattern";
    /// Label: index inside the RoleBasedGroupSet, from 0.
    pub const GROUPSET_INDEX: &str = "rolebasedgroupset.workloads.x-k8s.io/rbg-index";
    /// Label of LeaderWorkerSet pods: 0 is the leader.
    pub const LWS_WORKER_INDEX: &str = "leaderworkerset.sigs.k8s.io/worker-index";
}
