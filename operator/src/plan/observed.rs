//! From what is observed to the plan for one object: which others its plan looks at.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use moongate_render::{GangScheduler, Profiles};
use parking_lot::Mutex;
use rbg_api::v1alpha2::{
    ClusterEngineRuntimeProfile, RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleBasedGroupSet,
    RoleBasedGroupWarmup, RoleInstance, RoleInstanceSet,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    AdapterInput, Ask, GroupInput, GroupSetInput, InstanceInput, Plan, PlanError, SetInput, WarmupInput,
};
use crate::Kind;
use crate::observed::{Key, Live, Observed};
use crate::status;

/// What is to be done about one object: nothing, if it is gone or of no kind of ours.
///
/// # Errors
/// [`PlanError`].
pub fn observed(
    observed: &Mutex<Observed>,
    key: &Key,
    gang: GangScheduler,
    now: Timestamp,
) -> Result<Plan, PlanError> {
    let Some(live) = observed.lock().get(key) else { return Ok(Plan::default()) };
    match key.kind {
        Kind::GroupSet => {
            let Some(set) = live.read::<RoleBasedGroupSet>() else { return Ok(Plan::default()) };
            let groups: Vec<RoleBasedGroup> = children(observed, &live, Kind::Group);
            let exists = |name: &str| named(observed, key, Kind::Group, name).is_some();
            super::group_set(GroupSetInput { set: &set, groups: &groups, exists: &exists, now })
        }
        Kind::Group => Ok(group(observed, key, &live, gang, now)),
        Kind::Adapter => {
            let Some(adapter) = live.read::<RoleBasedGroupScalingAdapter>() else {
                return Ok(Plan::default());
            };
            let target = &adapter.spec.scale_target_ref;
            let live = named(observed, key, Kind::Group, &target.name);
            let group = live.as_ref().and_then(|live| live.read::<RoleBasedGroup>());
            let workloads = live.map(|live| workloads(observed, &live)).unwrap_or_default();
            let role = group.as_ref().and_then(|group| group.spec.role(&target.role));
            let workload = role.and_then(|role| super::group::workload(&workloads, role));
            Ok(super::adapter(AdapterInput { adapter: &adapter, group: group.as_ref(), workload, now }))
        }
        Kind::Set => {
            let Some(set) = live.read::<RoleInstanceSet>() else { return Ok(Plan::default()) };
            let revisions: Vec<ControllerRevision> = children(observed, &live, Kind::Revision);
            let instances: Vec<RoleInstance> = children(observed, &live, Kind::Instance);
            super::set(SetInput { set: &set, revisions: &revisions, instances: &instances, now })
        }
        Kind::Instance => {
            let Some(instance) = live.read::<RoleInstance>() else { return Ok(Plan::default()) };
            let revisions: Vec<ControllerRevision> = children(observed, &live, Kind::Revision);
            let pods = pods(observed, &live);
            let pulls: Vec<Pod> = children(observed, &live, Kind::WarmupPod);
            let port = |name: &str| observed.lock().choose_port(key, name, now);
            let answer = |ask: &Ask| observed.lock().answer(ask);
            let nodes = |name: &str| node_labels(observed, name);
            super::instance(InstanceInput {
                instance: &instance,
                revisions: &revisions,
                pods: &pods,
                pulls: &pulls,
                port: &port,
                answer: &answer,
                nodes: &nodes,
                now,
            })
        }
        Kind::Warmup => warmup(observed, key, &live, now),
        _ => Ok(Plan::default()),
    }
}

fn warmup(observed: &Mutex<Observed>, key: &Key, live: &Live, now: Timestamp) -> Result<Plan, PlanError> {
    let Some(warmup) = live.read::<RoleBasedGroupWarmup>() else { return Ok(Plan::default()) };
    let pods: Vec<Pod> = children(observed, live, Kind::WarmupPod);
    let nodes: Vec<Arc<Live>> = observed.lock().of_kind(Kind::Node).cloned().collect();
    let labels = |live: &Arc<Live>| live.read::<Node>()?.metadata.labels;
    let nodes = nodes.iter().map(|live| (live.key.name.clone(), labels(live).unwrap_or_default())).collect();
    let target = warmup.spec.target_role_based_group.as_ref();
    let target = target.filter(|target| named(observed, key, Kind::Group, &target.name).is_some());
    let group = target.map(|target| pods_of_group(observed, &key.namespace, &target.name));
    let group = group.as_deref();
    super::warmup(WarmupInput { warmup: &warmup, pods: &pods, nodes: &nodes, group, now })
}

/// All pods of a group, whoever made them.
fn pods_of_group(observed: &Mutex<Observed>, namespace: &str, group: &str) -> Vec<Pod> {
    let all = observed.lock().pods_of_group(namespace, group);
    all.iter().filter_map(|live| live.read()).collect()
}

fn group(observed: &Mutex<Observed>, key: &Key, live: &Live, gang: GangScheduler, now: Timestamp) -> Plan {
    let Some(group) = live.read::<RoleBasedGroup>() else { return Plan::default() };
    let revisions: Vec<ControllerRevision> = children(observed, live, Kind::Revision);
    let workloads = workloads(observed, live);
    let adapters: Vec<RoleBasedGroupScalingAdapter> = children(observed, live, Kind::Adapter);
    let profiles = profiles(observed, &group);
    let other = |kind, name: &str| named(observed, key, kind, name).and_then(|live| live.read());
    let scheduled = |set: &str| {
        let instances = observed.lock().children(set, Kind::Instance);
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
            let pods = observed.lock().children(workload, Kind::ForeignPod);
            pods.iter().filter_map(|live| live.read()).collect()
        },
        pods: &|| pods_of_group(observed, &key.namespace, &key.name),
        nodes: &|name| node_labels(observed, name),
        live: &other,
        port: &|workload, name| {
            let object = Key { kind: Kind::Set, namespace: key.namespace.clone(), name: workload.to_owned() };
            observed.lock().choose_port(&object, name, now)
        },
        is_absent: &|kind| observed.lock().is_absent(kind),
        now,
    })
}

fn node_labels(observed: &Mutex<Observed>, name: &str) -> Option<BTreeMap<String, String>> {
    let key = Key { kind: Kind::Node, namespace: String::new(), name: name.to_owned() };
    let live = observed.lock().get(&key)?;
    live.read::<Node>()?.metadata.labels
}

/// The profiles that the group names.
fn profiles(observed: &Mutex<Observed>, group: &RoleBasedGroup) -> Profiles {
    let runtimes = group.spec.roles.iter().flat_map(|role| &role.engine_runtimes);
    let profile = |name: &String| {
        let key = Key { kind: Kind::Profile, namespace: String::new(), name: name.clone() };
        let live = observed.lock().get(&key)?;
        Some((name.clone(), live.read::<ClusterEngineRuntimeProfile>()?.spec))
    };
    runtimes.filter_map(|runtime| profile(&runtime.profile_name)).collect()
}

fn workloads(observed: &Mutex<Observed>, group: &Live) -> Vec<Value> {
    let kinds = [Kind::Set, Kind::StatefulSet, Kind::Deployment, Kind::LeaderWorkerSet];
    kinds.into_iter().flat_map(|kind| children(observed, group, kind)).collect()
}

/// An object beside that of `key`.
fn named(observed: &Mutex<Observed>, key: &Key, kind: Kind, name: &str) -> Option<Arc<Live>> {
    let key = Key { kind, namespace: key.namespace.clone(), name: name.to_owned() };
    observed.lock().get(&key)
}

/// An instance's pods, with the versions that are known of them.
fn pods(observed: &Mutex<Observed>, instance: &Live) -> Vec<Pod> {
    let all = observed.lock().children(&instance.uid, Kind::Pod);
    let read = |live: &Arc<Live>| {
        let mut pod: Pod = live.read()?;
        pod.metadata.resource_version = Some(live.version().to_string());
        Some(pod)
    };
    all.iter().filter_map(read).collect()
}

/// The lock is held for a moment only: objects are read outside it.
fn children<T: DeserializeOwned>(observed: &Mutex<Observed>, owner: &Live, kind: Kind) -> Vec<T> {
    let all = observed.lock().children(&owner.uid, kind);
    all.iter().filter_map(|live| live.read()).collect()
}
