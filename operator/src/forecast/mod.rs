//! Forecast of a rollout: the operator's plans, carried out on objects in memory until nothing is left to do.
//!
//! The planner is the operator's own, so a forecast differs from the rollout only in its assumptions about Kubernetes: that
//! pods are scheduled, that their images start, and that other controllers act on their objects.

mod simulated_api_server;
mod simulated_controllers;
mod simulated_stateful_set;
mod step;
mod version_mix;

pub use simulated_api_server::{ContainerOutcome, ResourceChange, SimulatedApiServer, SimulatedWriteError};
pub(crate) use simulated_controllers::has;
pub use step::{ForecastStep, ImageChange, StepEffect};
use version_mix::VersionMixRecorder;
pub use version_mix::{ReadyVersions, VersionMix};

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use moongate_render::GangScheduler;
use rbg_api::keys;
use serde::Serialize;
use serde_json::Value;

use crate::ResourceKind;
use crate::plan::{PlanSettings, plan_for};
use crate::resource_cache::{ResourceCache, ResourceKey};
use crate::time::add_duration;
use crate::upgrade_hook::HookResult;

/// Step limit: only an endless rollout needs more.
const MAX_STEPS: usize = 200_000;
/// Time limit: anything later is waiting for an event that does not happen.
const HORIZON: Duration = Duration::from_secs(7 * 24 * 3600);

/// The forecast steps of a rollout, in order.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutForecast {
    /// Steps that concern pods and objects of other controllers. Status and revision writes are omitted.
    pub steps: Vec<ForecastStep>,
    pub roles: Vec<RoleForecast>,
    /// Ready pods of the roles whose images change, if there are at least two: at the start, and whenever they change.
    pub version_mixes: Vec<VersionMix>,
    /// Objects that could not be planned, with the errors.
    pub problems: Vec<String>,
}

/// Effect of a rollout on the pods of one role.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RoleForecast {
    pub name: String,
    /// Number of pods before the rollout.
    pub pods: usize,
    /// Number of pods that restart in place.
    pub restarted: usize,
    /// Number of pods that are created.
    pub created: usize,
    /// Number of pods that are deleted.
    pub deleted: usize,
    /// Maximum number of initially ready pods that are out of service at the same time.
    pub out_of_service: usize,
}

/// Carries plans out on `server` until nothing is left to do. The server then holds the resulting objects.
#[must_use]
pub fn forecast(
    server: &mut SimulatedApiServer,
    gang: GangScheduler,
    absent: &[ResourceKind],
) -> RolloutForecast {
    let mut run = ForecastRun::new(server, gang, absent);
    run.run();
    run.finish()
}

struct ForecastRun<'a> {
    server: &'a mut SimulatedApiServer,
    gang: GangScheduler,
    observed: ResourceCache,
    queue: BTreeSet<ResourceKey>,
    scheduled: BTreeMap<ResourceKey, Timestamp>,
    started_at: Timestamp,
    steps_taken: u64,
    ready_at_first: BTreeMap<String, usize>,
    versions: VersionMixRecorder,
    roles: BTreeMap<String, RoleForecast>,
    forecast: RolloutForecast,
}

impl<'a> ForecastRun<'a> {
    fn new(server: &'a mut SimulatedApiServer, gang: GangScheduler, absent: &[ResourceKind]) -> Self {
        let mut observed = ResourceCache::default();
        absent.iter().for_each(|kind| observed.set_absent(*kind, true));
        let mut roles: BTreeMap<String, RoleForecast> = BTreeMap::new();
        for pod in pods(server) {
            roles.entry(role(pod).to_owned()).or_default().pods += 1;
        }
        let mut run = Self {
            started_at: server.now,
            ready_at_first: ready(server),
            versions: VersionMixRecorder::new(server),
            server,
            gang,
            observed,
            queue: BTreeSet::new(),
            scheduled: BTreeMap::new(),
            steps_taken: 0,
            roles,
            forecast: RolloutForecast::default(),
        };
        run.apply_changes(run.server.initial_changes());
        run
    }

    /// Plans take no time: Kubernetes acts when the operator is idle, and time advances when both are idle.
    fn run(&mut self) {
        for _ in 0..MAX_STEPS {
            self.steps_taken += 1;
            if let Some(key) = self.queue.pop_first() {
                self.reconcile(&key);
            } else if let Some((kind, name)) = self.server.unsettled.first().cloned() {
                let changes = self.server.advance(kind, &name);
                self.record_foreign_pods(kind, &changes);
                self.apply_changes(changes);
                self.count_unready();
            } else if !self.advance_to_next_due() {
                return;
            }
        }
        self.forecast.problems.push("the rollout does not end: it repeats the same steps".to_owned());
    }

    /// Advances the time to the next scheduled plan. Returns whether there is one.
    fn advance_to_next_due(&mut self) -> bool {
        let Some((key, due)) = self.scheduled.iter().min_by_key(|(_, due)| **due) else { return false };
        if *due > add_duration(self.started_at, HORIZON) {
            return false;
        }
        self.server.now = self.server.now.max(*due);
        let key = key.clone();
        self.scheduled.remove(&key);
        self.queue.insert(key);
        true
    }

    fn apply_changes(&mut self, changes: Vec<ResourceChange>) {
        for change in changes {
            self.queue.extend(change.apply_to(&mut self.observed));
        }
    }

    fn reconcile(&mut self, key: &ResourceKey) {
        let Some(snapshot) = self.observed.snapshot(key, self.server.now) else {
            self.scheduled.remove(key);
            return;
        };
        let settings = PlanSettings { gang_scheduler: self.gang, ..PlanSettings::default() };
        let plan = match plan_for(&snapshot, settings, self.server.now) {
            Ok(plan) => plan,
            Err(error) => {
                let problem = format!("{} {}: {error}", key.kind.name(), key.name);
                if !self.forecast.problems.contains(&problem) {
                    self.forecast.problems.push(problem);
                }
                return;
            }
        };
        self.scheduled.remove(key);
        if let Some(at) = plan.requeue_at {
            self.scheduled.insert(key.clone(), at);
        }
        // Hooks are assumed to finish at once.
        for call in plan.hook_calls {
            if self.observed.record_hook_result(call, HookResult::Done(None)) {
                self.queue.insert(key.clone());
            }
        }
        for step in &plan.steps {
            let delay = self.server.now.duration_since(self.started_at).as_secs();
            let forecast_steps = step::for_step(step, self.server, delay);
            match self.server.write(&step.action) {
                Ok(changes) => {
                    forecast_steps.iter().for_each(|step| self.count(step));
                    self.forecast.steps.extend(forecast_steps);
                    self.apply_changes(changes);
                    self.count_unready();
                }
                Err(_) => {
                    self.queue.insert(key.clone());
                    return;
                }
            }
        }
    }

    /// Records pods that the StatefulSet controller has created or deleted.
    fn record_foreign_pods(&mut self, by: ResourceKind, changes: &[ResourceChange]) {
        if by != ResourceKind::StatefulSet {
            return;
        }
        let delay_seconds = self.server.now.duration_since(self.started_at).as_secs();
        for change in changes {
            let (effect, pod) = match change {
                ResourceChange::Present(ResourceKind::ForeignPod, pod) => (StepEffect::Create, pod),
                ResourceChange::Gone(ResourceKind::ForeignPod, pod) => (StepEffect::Delete, pod),
                _ => continue,
            };
            let step = ForecastStep {
                delay_seconds,
                effect,
                kind: ResourceKind::ForeignPod.name(),
                name: pod["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
                role: role(pod).to_owned(),
                images: Vec::new(),
                reason: "by its StatefulSet".to_owned(),
            };
            self.count(&step);
            self.forecast.steps.push(step);
        }
    }

    fn count(&mut self, step: &ForecastStep) {
        let pods = self.replaced_pods(step);
        let role = self.roles.entry(step.role.clone()).or_default();
        let is_pod = step.kind == ResourceKind::Pod.name();
        match step.effect {
            StepEffect::RestartInPlace => role.restarted += 1,
            StepEffect::Create if is_pod => role.created += 1,
            StepEffect::Delete if is_pod => role.deleted += 1,
            StepEffect::ReplacePods => {
                role.created += pods;
                role.deleted += pods;
            }
            _ => {}
        }
    }

    /// Number of pods that the controller of a changed workload replaces. Those of StatefulSets are simulated one by one.
    fn replaced_pods(&self, step: &ForecastStep) -> usize {
        if step.effect != StepEffect::ReplacePods || step.kind == ResourceKind::StatefulSet.name() {
            return 0;
        }
        self.server.all(ResourceKind::ForeignPod).filter(|pod| role(pod) == step.role).count()
    }

    fn count_unready(&mut self) {
        let delay_seconds = self.server.now.duration_since(self.started_at).as_secs();
        self.versions.record(self.server, delay_seconds);
        let now = ready(self.server);
        for (role, before) in &self.ready_at_first {
            let unready = before.saturating_sub(now.get(role).copied().unwrap_or(0));
            if let Some(role) = self.roles.get_mut(role) {
                role.out_of_service = role.out_of_service.max(unready);
            }
        }
    }

    fn finish(self) -> RolloutForecast {
        let named = self.roles.into_iter().filter(|(name, _)| !name.is_empty());
        let roles = named.map(|(name, role)| RoleForecast { name, ..role }).collect();
        RolloutForecast { roles, version_mixes: self.versions.finish(), ..self.forecast }
    }
}

/// Role label of an object; empty if it has none.
fn role(object: &Value) -> &str {
    object["metadata"]["labels"][keys::ROLE_NAME].as_str().unwrap_or_default()
}

/// Pods of roles, including those of other controllers.
fn pods(server: &SimulatedApiServer) -> impl Iterator<Item = &Value> {
    server.all(ResourceKind::Pod).chain(server.all(ResourceKind::ForeignPod))
}

/// Number of ready pods by role.
fn ready(server: &SimulatedApiServer) -> BTreeMap<String, usize> {
    let mut ready = BTreeMap::new();
    for pod in pods(server).filter(|pod| has(pod, "Ready")) {
        *ready.entry(role(pod).to_owned()).or_default() += 1;
    }
    ready
}
