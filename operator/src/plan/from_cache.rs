//! Builds a plan for one object from the resource cache: reads the related objects that the plan depends on.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use moongate_render::{GangScheduler, RuntimeProfiles};
use parking_lot::Mutex;
use rbg_api::v1alpha2::{
    ClusterEngineRuntimeProfile, RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleBasedGroupSet,
    RoleBasedGroupWarmup, RoleInstance, RoleInstanceSet,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    AdapterInput, GroupInput, GroupSetInput, InstanceInput, InstanceSetInput, PlanError,
    ReconcilePlan, WarmupInput,
};
use crate::ResourceKind;
use crate::resource_cache::{ObservedResource, ResourceCache, ResourceKey};
use crate::status;
use crate::upgrade_hook::HookCall;

/// Plans one object. The plan is empty if the object is gone or its kind is not reconciled.
///
/// # Errors
/// [`PlanError`].
pub fn plan_for(
    observed: &Mutex<ResourceCache>,
    key: &ResourceKey,
    gang: GangScheduler,
    now: Timestamp,
) -> Result<ReconcilePlan, PlanError> {
    let Some(live) = observed.lock().get(key) else { return Ok(ReconcilePlan::default()) };
    match key.kind {
        ResourceKind::GroupSet => {
            let Some(set) = live.read::<RoleBasedGroupSet>() else { return Ok(ReconcilePlan::default()) };
            let groups: Vec<RoleBasedGroup> = children(observed, &live, ResourceKind::Group);
            let exists = |name: &str| named(observed, key, ResourceKind::Group, name).is_some();
            super::group_set(GroupSetInput { set: &set, groups: &groups, exists: &exists, now })
        }
        ResourceKind::Group => Ok(group(observed, key, &live, gang, now)),
        ResourceKind::Adapter => {
            let Some(adapter) = live.read::<RoleBasedGroupScalingAdapter>() else {
                return Ok(ReconcilePlan::default());
            };
            let target = &adapter.spec.scale_target_ref;
            let live = named(observed, key, ResourceKind::Group, &target.name);
            let group = live.as_ref().and_then(|live| live.read::<RoleBasedGroup>());
            let workloads = live.map(|live| workloads(observed, &live)).unwrap_or_default();
            let role = group.as_ref().and_then(|group| group.spec.role(&target.role));
            let workload = role.and_then(|role| super::group::workload(&workloads, role));
            Ok(super::adapter(AdapterInput { adapter: &adapter, group: group.as_ref(), workload, now }))
        }
        ResourceKind::Set => {
            let Some(set) = live.read::<RoleInstanceSet>() else { return Ok(ReconcilePlan::default()) };
            let revisions: Vec<ControllerRevision> = children(observed, &live, ResourceKind::Revision);
            let instances: Vec<RoleInstance> = children(observed, &live, ResourceKind::Instance);
            super::set(InstanceSetInput { set: &set, revisions: &revisions, instances: &instances, now })
        }
        ResourceKind::Instance => {
            let Some(instance) = live.read::<RoleInstance>() else { return Ok(ReconcilePlan::default()) };
            let revisions: Vec<ControllerRevision> = children(observed, &live, ResourceKind::Revision);
            let pods = pods(observed, &live);
            let pulls: Vec<Pod> = children(observed, &live, ResourceKind::WarmupPod);
            let port = |name: &str| observed.lock().allocate_port(key, name, now);
            let hook_result = |call: &HookCall| observed.lock().hook_result(call);
            let nodes = |name: &str| node_labels(observed, name);
            super::instance(InstanceInput {
                instance: &instance,
                revisions: &revisions,
                pods: &pods,
                pulls: &pulls,
                port: &port,
                hook_result: &hook_result,
                nodes: &nodes,
                now,
            })
        }
        ResourceKind::Warmup => warmup(observed, key, &live, now),
        _ => Ok(ReconcilePlan::default()),
    }
}

fn warmup(
    observed: &Mutex<ResourceCache>,
    key: &ResourceKey,
    live: &ObservedResource,
    now: Timestamp,
) -> Result<ReconcilePlan, PlanError> {
    let Some(warmup) = live.read::<RoleBasedGroupWarmup>() else { return Ok(ReconcilePlan::default()) };
    let pods: Vec<Pod> = children(observed, live, ResourceKind::WarmupPod);
    let nodes: Vec<Arc<ObservedResource>> = observed.lock().of_kind(ResourceKind::Node).cloned().collect();
    let labels = |live: &Arc<ObservedResource>| live.read::<Node>()?.metadata.labels;
    let nodes = nodes.iter().map(|live| (live.key.name.clone(), labels(live).unwrap_or_default())).collect();
    let target = warmup.spec.target_role_based_group.as_ref();
    let target = target.filter(|target| named(observed, key, ResourceKind::Group, &target.name).is_some());
    let group = target.map(|target| pods_of_group(observed, &key.namespace, &target.name));
    let group = group.as_deref();
    super::warmup(WarmupInput { warmup: &warmup, pods: &pods, nodes: &nodes, group, now })
}

/// All pods of a group, including those created by other controllers.
fn pods_of_group(observed: &Mutex<ResourceCache>, namespace: &str, group: &str) -> Vec<Pod> {
    let all = observed.lock().pods_of_group(namespace, group);
    all.iter().filter_map(|live| live.read()).collect()
}

fn group(
    observed: &Mutex<ResourceCache>,
    key: &ResourceKey,
    live: &ObservedResource,
    gang: GangScheduler,
    now: Timestamp,
) -> ReconcilePlan {
    let Some(group) = live.read::<RoleBasedGroup>() else { return ReconcilePlan::default() };
    let revisions: Vec<ControllerRevision> = children(observed, live, ResourceKind::Revision);
    let workloads = workloads(observed, live);
    let adapters: Vec<RoleBasedGroupScalingAdapter> = children(observed, live, ResourceKind::Adapter);
    let profiles = profiles(observed, &group);
    let other = |kind, name: &str| named(observed, key, kind, name).and_then(|live| live.read());
    let scheduled = |set: &str| {
        let instances = observed.lock().children(set, ResourceKind::Instance);
        let instances = instances.iter().filter_map(|live| live.read::<RoleInstance>());
        i32::try_from(instances.filter(status::is_scheduled).count()).unwrap_or(i32::MAX)
    };
    super::group(GroupInput {
        group: &group,
        profiles: &profiles,
        gang,
        revisions: &revisions,
        workloads: &workloads,
        adapters: &adapters,
        scheduled: &scheduled,
        foreign_pods: &|workload| {
            let pods = observed.lock().children(workload, ResourceKind::ForeignPod);
            pods.iter().filter_map(|live| live.read()).collect()
        },
        pods: &|| pods_of_group(observed, &key.namespace, &key.name),
        nodes: &|name| node_labels(observed, name),
        live: &other,
        port: &|workload, name| {
            let object = ResourceKey {
                kind: ResourceKind::Set,
                namespace: key.namespace.clone(),
                name: workload.to_owned(),
            };
            observed.lock().allocate_port(&object, name, now)
        },
        is_absent: &|kind| observed.lock().is_absent(kind),
        now,
    })
}

fn node_labels(observed: &Mutex<ResourceCache>, name: &str) -> Option<BTreeMap<String, String>> {
    let key = ResourceKey { kind: ResourceKind::Node, namespace: String::new(), name: name.to_owned() };
    let live = observed.lock().get(&key)?;
    live.read::<Node>()?.metadata.labels
}

/// The runtime profiles that the group references.
fn profiles(observed: &Mutex<ResourceCache>, group: &RoleBasedGroup) -> RuntimeProfiles {
    let runtimes = group.spec.roles.iter().flat_map(|role| &role.engine_runtimes);
    let profile = |name: &String| {
        let key = ResourceKey { kind: ResourceKind::Profile, namespace: String::new(), name: name.clone() };
        let live = observed.lock().get(&key)?;
        Some((name.clone(), live.read::<ClusterEngineRuntimeProfile>()?.spec))
    };
    runtimes.filter_map(|runtime| profile(&runtime.profile_name)).collect()
}

fn workloads(observed: &Mutex<ResourceCache>, group: &ObservedResource) -> Vec<Value> {
    let kinds = [
        ResourceKind::Set,
        ResourceKind::StatefulSet,
        ResourceKind::Deployment,
        ResourceKind::LeaderWorkerSet,
    ];
    kinds.into_iter().flat_map(|kind| children(observed, group, kind)).collect()
}

/// An object in the namespace of `key`.
fn named(
    observed: &Mutex<ResourceCache>,
    key: &ResourceKey,
    kind: ResourceKind,
    name: &str,
) -> Option<Arc<ObservedResource>> {
    let key = ResourceKey { kind, namespace: key.namespace.clone(), name: name.to_owned() };
    observed.lock().get(&key)
}

/// An instance's pods, with the newest resource version in the cache.
fn pods(observed: &Mutex<ResourceCache>, instance: &ObservedResource) -> Vec<Pod> {
    let all = observed.lock().children(&instance.uid, ResourceKind::Pod);
    let read = |live: &Arc<ObservedResource>| {
        let mut pod: Pod = live.read()?;
        pod.metadata.resource_version = Some(live.version().to_string());
        Some(pod)
    };
    all.iter().filter_map(read).collect()
}

/// Holds the lock only to copy references: objects are deserialized outside it.
fn children<T: DeserializeOwned>(
    observed: &Mutex<ResourceCache>,
    owner: &ObservedResource,
    kind: ResourceKind,
) -> Vec<T> {
    let all = observed.lock().children(&owner.uid, kind);
    all.iter().filter_map(|live| live.read()).collect()
}
