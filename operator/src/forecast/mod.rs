//! What the operator is about to do: its plans, carried out on objects in memory until nothing is left to do.
//!
//! The plans are those that the operator makes, so a forecast cannot differ from what is done later, but for what it
//! presumes of Kubernetes: that pods get nodes, that their images start, and that others' controllers do what they are told.

mod simulated_api_server;
mod simulated_controllers;
mod step;

pub use simulated_api_server::{ContainerOutcome, ResourceChange, SimulatedApiServer};
pub(crate) use simulated_controllers::has;
pub use step::{ForecastStep, ImageChange, StepEffect};

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use moongate_render::GangScheduler;
use parking_lot::Mutex;
use rbg_api::keys;
use serde::Serialize;
use serde_json::Value;

use crate::ResourceKind;
use crate::plan::{self, HookResult};
use crate::resource_cache::{ResourceCache, ResourceKey};

/// So many moves are made of no use only by something that has no end.
const MAX_STEPS: usize = 200_000;
/// Who waits for longer than that waits for something that does not come.
const HORIZON: Duration = Duration::from_secs(7 * 24 * 3600);

/// What will be done, in this order.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutForecast {
    /// The steps that concern pods, and others' objects. Statuses and revisions are not told.
    pub steps: Vec<ForecastStep>,
    /// What that means for each role.
    pub roles: Vec<RoleForecast>,
    /// What no plan could be made for, and why.
    pub problems: Vec<String>,
}

/// What the steps mean for the pods of one role.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RoleForecast {
    /// The role.
    pub name: String,
    /// Pods that it has now.
    pub pods: usize,
    /// Pods that restart in place.
    pub restarted: usize,
    /// Pods that are made.
    pub made: usize,
    /// Pods that end.
    pub ended: usize,
    /// Most pods that are out of service at a time, of those that are ready now.
    pub out_of_service: usize,
}

/// Carries plans out on `server` until nothing is left to do. The server then has what comes of it.
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
    observed: Mutex<ResourceCache>,
    queue: BTreeSet<ResourceKey>,
    scheduled: BTreeMap<ResourceKey, Timestamp>,
    started_at: Timestamp,
    steps_taken: u64,
    ready_at_first: BTreeMap<String, usize>,
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
            server,
            gang,
            observed: Mutex::new(observed),
            queue: BTreeSet::new(),
            scheduled: BTreeMap::new(),
            steps_taken: 0,
            roles,
            forecast: RolloutForecast::default(),
        };
        let all: Vec<ResourceChange> = run
            .server
            .objects()
            .map(|(kind, object)| ResourceChange::Present(kind, object.clone()))
            .collect();
        run.apply_changes(all);
        run
    }

    /// The operator is quick: Kubernetes moves when it has nothing to do, and time passes when both have not.
    fn run(&mut self) {
        for _ in 0..MAX_STEPS {
            self.steps_taken += 1;
            if let Some(key) = self.queue.pop_first() {
                self.reconcile(&key);
            } else if let Some((kind, name)) = self.server.unsettled.first().cloned() {
                let changes = self.server.advance(kind, &name);
                self.apply_changes(changes);
                self.count_unready();
            } else if !self.advance_to_next_due() {
                return;
            }
        }
        self.forecast.problems.push("it has no end: the same is done again and again".to_owned());
    }

    /// Until the next plan is due. Answers whether there is one.
    fn advance_to_next_due(&mut self) -> bool {
        let Some((key, due)) = self.scheduled.iter().min_by_key(|(_, due)| **due) else { return false };
        if *due > plan::add_duration(self.started_at, HORIZON) {
            return false;
        }
        self.server.now = self.server.now.max(*due);
        let key = key.clone();
        self.scheduled.remove(&key);
        self.queue.insert(key);
        true
    }

    fn apply_changes(&mut self, changes: Vec<ResourceChange>) {
        let mut observed = self.observed.lock();
        for change in changes {
            let concerns = match change {
                ResourceChange::Present(kind, object) => serde_json::from_value::<DynamicObject>(object)
                    .map(|object| observed.upsert(kind, object))
                    .unwrap_or_default(),
                ResourceChange::Gone(kind, object) => {
                    let text =
                        |member: &str| object["metadata"][member].as_str().unwrap_or_default().to_owned();
                    let key = ResourceKey { kind, namespace: text("namespace"), name: text("name") };
                    observed.remove(&key, &text("uid"))
                }
            };
            self.queue.extend(concerns);
        }
    }

    fn reconcile(&mut self, key: &ResourceKey) {
        let plan = match plan::plan_for(&self.observed, key, self.gang, self.server.now) {
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
        // Whoever is asked has nothing to wait for.
        for ask in plan.hook_calls {
            if self.observed.lock().record_hook_result(ask, HookResult::Done(None)) {
                self.queue.insert(key.clone());
            }
        }
        for step in &plan.steps {
            let waited = self.server.now.duration_since(self.started_at).as_secs();
            let foreseen = step::for_step(step, self.server, waited);
            match self.server.write(&step.action) {
                Ok(changes) => {
                    foreseen.iter().for_each(|step| self.count(step));
                    self.forecast.steps.extend(foreseen);
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

    fn count(&mut self, step: &ForecastStep) {
        let role = self.roles.entry(step.role.clone()).or_default();
        let is_pod = step.kind == ResourceKind::Pod.name();
        match step.what {
            StepEffect::RestartInPlace => role.restarted += 1,
            StepEffect::Create if is_pod => role.made += 1,
            StepEffect::Delete if is_pod => role.ended += 1,
            _ => {}
        }
    }

    fn count_unready(&mut self) {
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
        RolloutForecast { roles, ..self.forecast }
    }
}

/// The role of an object, by its labels; empty if it is of none.
fn role(object: &Value) -> &str {
    object["metadata"]["labels"][keys::ROLE_NAME].as_str().unwrap_or_default()
}

/// Pods of roles, whoever makes them.
fn pods(server: &SimulatedApiServer) -> impl Iterator<Item = &Value> {
    server.all(ResourceKind::Pod).chain(server.all(ResourceKind::ForeignPod))
}

/// Pods that are ready, by role.
fn ready(server: &SimulatedApiServer) -> BTreeMap<String, usize> {
    let mut ready = BTreeMap::new();
    for pod in pods(server).filter(|pod| has(pod, "Ready")) {
        *ready.entry(role(pod).to_owned()).or_default() += 1;
    }
    ready
}
