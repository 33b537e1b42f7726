//! From what is observed to the plan for one object: which others its plan looks at.

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use moongate_render::{GangScheduler, Profiles};
use parking_lot::Mutex;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleInstance, RoleInstanceSet};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{GroupInput, InstanceInput, Plan, PlanError, SetInput};
use crate::Kind;
use crate::observed::{Key, Live, Observed};

/// What is to be done about one object: nothing, if it is gone or of no kind of ours. `entropy` is for names.
///
/// # Errors
/// [`PlanError`].
pub fn observed(
    observed: &Mutex<Observed>,
    key: &Key,
    gang: GangScheduler,
    now: Timestamp,
    entropy: u64,
) -> Result<Plan, PlanError> {
    let Some(live) = observed.lock().get(key) else { return Ok(Plan::default()) };
    match key.kind {
        Kind::Group => Ok(group(observed, key, &live, gang, now)),
        Kind::Set => {
            let Some(set) = live.read::<RoleInstanceSet>() else { return Ok(Plan::default()) };
            let revisions: Vec<ControllerRevision> = children(observed, &live, Kind::Revision);
            let instances: Vec<RoleInstance> = children(observed, &live, Kind::Instance);
            super::set(SetInput { set: &set, revisions: &revisions, instances: &instances, now, entropy })
        }
        Kind::Instance => {
            let Some(instance) = live.read::<RoleInstance>() else { return Ok(Plan::default()) };
            let revisions: Vec<ControllerRevision> = children(observed, &live, Kind::Revision);
            let pods: Vec<Pod> = children(observed, &live, Kind::Pod);
            super::instance(InstanceInput { instance: &instance, revisions: &revisions, pods: &pods, now })
        }
        _ => Ok(Plan::default()),
    }
}

fn group(observed: &Mutex<Observed>, key: &Key, live: &Live, gang: GangScheduler, now: Timestamp) -> Plan {
    let Some(group) = live.read::<RoleBasedGroup>() else { return Plan::default() };
    let revisions: Vec<ControllerRevision> = children(observed, live, Kind::Revision);
    let kinds = [Kind::Set, Kind::StatefulSet, Kind::Deployment];
    let workloads: Vec<Value> = kinds.into_iter().flat_map(|kind| children(observed, live, kind)).collect();
    let profiles = Profiles::new();
    let other = |kind, name: &str| {
        let key = Key { kind, namespace: key.namespace.clone(), name: name.to_owned() };
        let live = observed.lock().get(&key);
        live.and_then(|live| live.read::<Value>())
    };
    super::group(GroupInput {
        group: &group,
        profiles: &profiles,
        gang,
        revisions: &revisions,
        workloads: &workloads,
        live: &other,
        now,
    })
}

/// The lock is held for a moment only: objects are read outside it.
fn children<T: DeserializeOwned>(observed: &Mutex<Observed>, owner: &Live, kind: Kind) -> Vec<T> {
    let all = observed.lock().children(&owner.uid, kind);
    all.iter().filter_map(|live| live.read()).collect()
}
