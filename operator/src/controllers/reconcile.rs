//! One look at one object: read, plan, write.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use moongate_render::Profiles;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleInstance, RoleInstanceSet};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::Kind;
use crate::apply::Outcome;
use crate::observed::{Key, Live};
use crate::plan::{self, GroupInput, InstanceInput, Plan, PlanError, SetInput};

/// Takes keys from the queue until stopped. A write in progress is ended first.
pub(super) async fn work(shared: Arc<Shared>, stop: CancellationToken) {
    let mut listed = shared.listed.subscribe();
    tokio::select! {
        () = stop.cancelled() => return,
        all = listed.wait_for(|listed| listed.len() == Kind::ALL.len()) => if all.is_err() { return },
    }
    drop(listed);
    loop {
        let key = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            key = shared.queue.next() => key,
        };
        let success = reconcile(&shared, &key, &stop).await;
        shared.queue.done(&key, success);
    }
}

async fn reconcile(shared: &Shared, key: &Key, stop: &CancellationToken) -> bool {
    let plan = match make_plan(shared, key) {
        Ok(plan) => plan,
        Err(error) => {
            tracing::warn!(kind = key.kind.name(), namespace = key.namespace, name = key.name, %error, "no plan");
            return false;
        }
    };
    if let Some(at) = plan.again_at {
        let wait = Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default();
        shared.queue.push_at(Instant::now() + wait, key.clone());
    }
    for step in &plan.steps {
        if stop.is_cancelled() {
            return true;
        }
        tracing::debug!(kind = key.kind.name(), name = key.name, reason = step.reason, action = ?step.action, "step");
        match shared.writer.write(&key.namespace, &step.action).await {
            Ok(outcome) => take(shared, outcome, &key.namespace),
            Err(error) => {
                let reason = &step.reason;
                tracing::info!(kind = key.kind.name(), namespace = key.namespace, name = key.name, reason, %error, "a write was refused; the plan is made anew");
                return false;
            }
        }
    }
    true
}

fn take(shared: &Shared, outcome: Outcome, namespace: &str) {
    let concerns = {
        let mut observed = shared.observed.lock();
        match outcome {
            Outcome::Is(kind, object) => observed.take(kind, *object),
            Outcome::Gone(kind, name, uid) => {
                let key = Key { kind, namespace: namespace.to_owned(), name };
                observed.lose(&key, &uid)
            }
            Outcome::Unknown => Vec::new(),
        }
    };
    for key in concerns {
        shared.queue.push(key);
    }
}

fn make_plan(shared: &Shared, key: &Key) -> Result<Plan, PlanError> {
    let Some(live) = shared.observed.lock().get(key) else { return Ok(Plan::default()) };
    let now = Timestamp::now();
    match key.kind {
        Kind::Group => Ok(plan_group(shared, key, &live, now)),
        Kind::Set => {
            let Some(set) = live.read::<RoleInstanceSet>() else { return Ok(Plan::default()) };
            let revisions: Vec<ControllerRevision> = children(shared, &live, Kind::Revision);
            let instances: Vec<RoleInstance> = children(shared, &live, Kind::Instance);
            let entropy = fastrand::u64(..);
            plan::set(SetInput { set: &set, revisions: &revisions, instances: &instances, now, entropy })
        }
        Kind::Instance => {
            let Some(instance) = live.read::<RoleInstance>() else { return Ok(Plan::default()) };
            let revisions: Vec<ControllerRevision> = children(shared, &live, Kind::Revision);
            let pods: Vec<Pod> = children(shared, &live, Kind::Pod);
            plan::instance(InstanceInput { instance: &instance, revisions: &revisions, pods: &pods, now })
        }
        _ => Ok(Plan::default()),
    }
}

fn plan_group(shared: &Shared, key: &Key, live: &Live, now: Timestamp) -> Plan {
    let Some(group) = live.read::<RoleBasedGroup>() else { return Plan::default() };
    let revisions: Vec<ControllerRevision> = children(shared, live, Kind::Revision);
    let kinds = [Kind::Set, Kind::StatefulSet, Kind::Deployment];
    let workloads: Vec<Value> = kinds.into_iter().flat_map(|kind| children(shared, live, kind)).collect();
    let profiles = Profiles::new();
    let other = |kind, name: &str| {
        let key = Key { kind, namespace: key.namespace.clone(), name: name.to_owned() };
        let live = shared.observed.lock().get(&key);
        live.and_then(|live| live.read::<Value>())
    };
    plan::group(GroupInput {
        group: &group,
        profiles: &profiles,
        gang: shared.gang,
        revisions: &revisions,
        workloads: &workloads,
        live: &other,
        now,
    })
}

fn children<T: DeserializeOwned>(shared: &Shared, owner: &Live, kind: Kind) -> Vec<T> {
    let all = shared.observed.lock().children(&owner.uid, kind);
    all.iter().filter_map(|live| live.read()).collect()
}
