//! Builds a plan for one object from a snapshot: deserializes the related objects that the plan depends on.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use moongate_render::{RoleTopology, RuntimeProfiles};
use rbg_api::keys;
use rbg_api::v1alpha2::{
    ClusterEngineRuntimeProfile, CoordinatedPolicy, RoleBasedGroup, RoleBasedGroupScalingAdapter,
    RoleBasedGroupSet, RoleBasedGroupWarmup, RoleInstance, RoleInstanceSet,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    AdapterInput, FaultRules, GroupInput, GroupSetInput, InstanceInput, InstanceSetInput, NodeState,
    PlanError, PlanSettings, ReconcilePlan, WarmupInput,
};
use crate::ResourceKind;
use crate::resource_cache::{ObservedResource, ResourceKey, ResourceSnapshot};
use crate::status;

/// Plans the snapshot's object. The plan is empty if its kind is not reconciled.
///
/// # Errors
/// [`PlanError`].
pub fn plan_for(
    snapshot: &ResourceSnapshot,
    settings: PlanSettings,
    now: Timestamp,
) -> Result<ReconcilePlan, PlanError> {
    let live = snapshot.subject();
    let limits = settings.size_limits;
    match live.key.kind {
        ResourceKind::GroupSet => {
            let Some(set) = live.read::<RoleBasedGroupSet>() else { return Ok(ReconcilePlan::default()) };
            let groups: Vec<RoleBasedGroup> = children(snapshot, live, ResourceKind::Group);
            let exists = |name: &str| named(snapshot, ResourceKind::Group, name).is_some();
            super::group_set(GroupSetInput { set: &set, groups: &groups, exists: &exists, limits, now })
        }
        ResourceKind::Group => Ok(group(snapshot, settings, now)),
        ResourceKind::Adapter => Ok(adapter(snapshot, now)),
        ResourceKind::Set => {
            let Some(set) = live.read::<RoleInstanceSet>() else { return Ok(ReconcilePlan::default()) };
            let revisions: Vec<ControllerRevision> = children(snapshot, live, ResourceKind::Revision);
            let instances: Vec<RoleInstance> = children(snapshot, live, ResourceKind::Instance);
            let (revisions, instances) = (&revisions, &instances);
            let pods = |instance: &str| {
                snapshot.children(instance, ResourceKind::Pod).filter_map(|live| live.read()).collect()
            };
            super::set(InstanceSetInput {
                set: &set,
                revisions,
                instances,
                pods: &pods,
                hook_result: &|call| snapshot.hook_result(call),
                limits,
                now,
            })
        }
        ResourceKind::Instance => instance(snapshot, settings, now),
        ResourceKind::Warmup => warmup(snapshot, now),
        _ => Ok(ReconcilePlan::default()),
    }
}

fn adapter(snapshot: &ResourceSnapshot, now: Timestamp) -> ReconcilePlan {
    let Some(adapter) = snapshot.subject().read::<RoleBasedGroupScalingAdapter>() else {
        return ReconcilePlan::default();
    };
    let target = &adapter.spec.scale_target_ref;
    let live = named(snapshot, ResourceKind::Group, &target.name);
    let group = live.and_then(|live| live.read::<RoleBasedGroup>());
    let workloads = live.map(|live| workloads(snapshot, live)).unwrap_or_default();
    let role = group.as_ref().and_then(|group| group.spec.role(&target.role));
    let workload = role.and_then(|role| super::group::workload(&workloads, role));
    super::adapter(AdapterInput { adapter: &adapter, group: group.as_ref(), workload, now })
}

fn instance(
    snapshot: &ResourceSnapshot,
    settings: PlanSettings,
    now: Timestamp,
) -> Result<ReconcilePlan, PlanError> {
    let live = snapshot.subject();
    let Some(instance) = live.read::<RoleInstance>() else { return Ok(ReconcilePlan::default()) };
    let revisions: Vec<ControllerRevision> = children(snapshot, live, ResourceKind::Revision);
    let pods = pods(snapshot, live);
    let pulls: Vec<Pod> = children(snapshot, live, ResourceKind::WarmupPod);
    let faults = fault_rules(snapshot, &instance);
    super::instance(InstanceInput {
        instance: &instance,
        revisions: &revisions,
        pods: &pods,
        pulls: &pulls,
        limits: settings.size_limits,
        ports: snapshot.ports(),
        hook_result: &|call| snapshot.hook_result(call),
        nodes: &|name| node_labels(snapshot, name),
        node: &|name| node_state(snapshot, name),
        faults: faults.as_ref(),
        now,
    })
}

/// Fault recovery of the policy of the instance's group. An invalid one is reported by the group's plan.
fn fault_rules(snapshot: &ResourceSnapshot, instance: &RoleInstance) -> Option<FaultRules> {
    let policy = snapshot.of_kind(ResourceKind::Policy).next()?;
    let policy = policy.read::<CoordinatedPolicy>()?.spec;
    let annotations = instance.metadata.annotations.as_ref();
    let topology = annotations.and_then(|all| RoleTopology::parse(all.get(keys::TOPOLOGY)?).ok());
    let levels = topology.map(|topology| topology.levels).unwrap_or_default();
    FaultRules::resolve(&policy, Some(&levels)).ok()
}

fn warmup(snapshot: &ResourceSnapshot, now: Timestamp) -> Result<ReconcilePlan, PlanError> {
    let live = snapshot.subject();
    let Some(warmup) = live.read::<RoleBasedGroupWarmup>() else { return Ok(ReconcilePlan::default()) };
    let pods: Vec<Pod> = children(snapshot, live, ResourceKind::WarmupPod);
    let labels = |live: &ObservedResource| live.read::<Node>()?.metadata.labels;
    let nodes = snapshot.of_kind(ResourceKind::Node);
    let nodes = nodes.map(|live| (live.key.name.clone(), labels(live).unwrap_or_default())).collect();
    let target = warmup.spec.target_role_based_group.as_ref();
    let target = target.filter(|target| named(snapshot, ResourceKind::Group, &target.name).is_some());
    let group = target.map(|_| group_pods(snapshot));
    let group = group.as_deref();
    super::warmup(WarmupInput { warmup: &warmup, pods: &pods, nodes: &nodes, group, now })
}

/// All pods of the group, including those created by other controllers.
fn group_pods(snapshot: &ResourceSnapshot) -> Vec<Pod> {
    snapshot.group_pods().iter().filter_map(|live| live.read()).collect()
}

fn group(snapshot: &ResourceSnapshot, settings: PlanSettings, now: Timestamp) -> ReconcilePlan {
    let live = snapshot.subject();
    let Some(group) = live.read::<RoleBasedGroup>() else { return ReconcilePlan::default() };
    let revisions: Vec<ControllerRevision> = children(snapshot, live, ResourceKind::Revision);
    let workloads = workloads(snapshot, live);
    let adapters: Vec<RoleBasedGroupScalingAdapter> = children(snapshot, live, ResourceKind::Adapter);
    let profiles = profiles(snapshot, &group);
    let count = |set: &str, which: fn(&RoleInstance) -> bool| {
        let instances = snapshot.children(set, ResourceKind::Instance);
        let instances = instances.filter_map(|live| live.read::<RoleInstance>());
        i32::try_from(instances.filter(which).count()).unwrap_or(i32::MAX)
    };
    super::group(GroupInput {
        group: &group,
        profiles: &profiles,
        gang: settings.gang_scheduler,
        gang_policy: None,
        limits: settings.size_limits,
        revisions: &revisions,
        workloads: &workloads,
        adapters: &adapters,
        scheduled: &|set| count(set, status::is_scheduled),
        leaving: &|set| count(set, super::lifecycle::is_leaving),
        foreign_pods: &|workload| {
            snapshot.children(workload, ResourceKind::ForeignPod).filter_map(|live| live.read()).collect()
        },
        pods: &|| group_pods(snapshot),
        nodes: &|name| node_labels(snapshot, name),
        node_levels: snapshot.node_levels(),
        node: &|name| node_state(snapshot, name),
        node_names: &|| snapshot.of_kind(ResourceKind::Node).map(|node| node.key.name.clone()).collect(),
        instances: &|| {
            let workloads = snapshot.children(&live.uid, ResourceKind::Set);
            workloads.flat_map(|set| children(snapshot, set, ResourceKind::Instance)).collect()
        },
        live: &|kind, name| named(snapshot, kind, name).and_then(|live| live.read()),
        ports: snapshot.ports(),
        is_absent: &|kind| snapshot.is_absent(kind),
        now,
    })
}

fn node_labels(snapshot: &ResourceSnapshot, name: &str) -> Option<BTreeMap<String, String>> {
    let key = ResourceKey { kind: ResourceKind::Node, namespace: String::new(), name: name.to_owned() };
    snapshot.get(&key)?.read::<Node>()?.metadata.labels
}

fn node_state(snapshot: &ResourceSnapshot, name: &str) -> NodeState {
    let key = ResourceKey { kind: ResourceKind::Node, namespace: String::new(), name: name.to_owned() };
    let Some(live) = snapshot.get(&key) else {
        return if snapshot.are_nodes_listed() { NodeState::Gone } else { NodeState::Unlisted };
    };
    let conditions = live.read::<Node>().and_then(|node| node.status?.conditions).unwrap_or_default();
    let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
    let not_ready = ready.filter(|condition| condition.status != "True");
    let not_ready_since = not_ready.and_then(|condition| Some(condition.last_transition_time?.0));
    NodeState::Present { uid: live.uid.clone(), not_ready_since }
}

/// The runtime profiles that the group references.
fn profiles(snapshot: &ResourceSnapshot, group: &RoleBasedGroup) -> RuntimeProfiles {
    let runtimes = group.spec.roles.iter().flat_map(|role| &role.engine_runtimes);
    let profile = |name: &String| {
        let key = ResourceKey { kind: ResourceKind::Profile, namespace: String::new(), name: name.clone() };
        Some((name.clone(), snapshot.get(&key)?.read::<ClusterEngineRuntimeProfile>()?.spec))
    };
    runtimes.filter_map(|runtime| profile(&runtime.profile_name)).collect()
}

fn workloads(snapshot: &ResourceSnapshot, group: &ObservedResource) -> Vec<Value> {
    let kinds = [
        ResourceKind::Set,
        ResourceKind::StatefulSet,
        ResourceKind::Deployment,
        ResourceKind::LeaderWorkerSet,
    ];
    kinds.into_iter().flat_map(|kind| children(snapshot, group, kind)).collect()
}

/// An object in the namespace of the snapshot's object.
fn named<'a>(snapshot: &'a ResourceSnapshot, kind: ResourceKind, name: &str) -> Option<&'a ObservedResource> {
    let namespace = snapshot.subject().key.namespace.clone();
    snapshot.get(&ResourceKey { kind, namespace, name: name.to_owned() }).map(Arc::as_ref)
}

/// An instance's pods, with the newest resource version in the cache.
fn pods(snapshot: &ResourceSnapshot, instance: &ObservedResource) -> Vec<Pod> {
    let read = |live: &Arc<ObservedResource>| {
        let mut pod: Pod = live.read()?;
        pod.metadata.resource_version = Some(live.version().to_string());
        Some(pod)
    };
    snapshot.children(&instance.uid, ResourceKind::Pod).filter_map(read).collect()
}

fn children<T: DeserializeOwned>(
    snapshot: &ResourceSnapshot,
    owner: &ObservedResource,
    kind: ResourceKind,
) -> Vec<T> {
    snapshot.children(&owner.uid, kind).filter_map(|live| live.read()).collect()
}
