//! Simulation of the operator's plans on an in-memory API server, one step at a time in a random order that is determined
//! by a seed. Watch events are late, writes may fail or lose their response, and the operator may be killed after any
//! write.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use moongate_operator::ResourceKind;
use moongate_operator::forecast::{ResourceChange, SimulatedApiServer, SimulatedWriteError};
use moongate_operator::plan::{PlanSettings, PlanStep, WriteAction, plan_for};
use moongate_operator::resource_cache::{ResourceCache, ResourceKey};
use moongate_operator::upgrade_hook::HookCall;
use serde_json::Value;

use crate::simulated_hooks::SimulatedHooks;

const WORKERS: usize = 4;
/// Range of ports to allocate.
pub const PORTS: Range<u16> = 30000..30012;
/// Simulated time between two steps.
const TICK: Duration = Duration::from_millis(20);
/// Step limit: only an endless run needs more.
const MAX_MOVES: usize = 20_000;

pub struct OperatorSimulation {
    pub server: SimulatedApiServer,
    observed: ResourceCache,
    /// Objects that are to be reconciled.
    pub queue: BTreeSet<ResourceKey>,
    scheduled: BTreeMap<ResourceKey, Timestamp>,
    pending_changes: VecDeque<ResourceChange>,
    workers: Vec<(ResourceKey, VecDeque<PlanStep>)>,
    hook_calls: Vec<(ResourceKey, HookCall)>,
    pub settings: PlanSettings,
    /// Simulated hooks of the pods.
    pub hooks: SimulatedHooks,
    /// Determines the order of the steps, and which writes fail.
    pub random: fastrand::Rng,
    /// Number of writes so far.
    pub writes: usize,
    /// Number of writes after which the operator is killed and another one starts.
    pub kill_after_writes: Option<usize>,
    /// Number of hook responses after which the operator is killed.
    pub kill_after_responses: Option<usize>,
    /// Operators that are killed per thousand steps.
    pub kills_per_mille: u16,
    /// Number of operators killed so far.
    pub kills: usize,
    /// Percentage of writes that fail.
    pub write_failure_percent: u8,
    /// Called after each write, including those that fail.
    pub on_write: fn(&PlanStep),
    /// Whether invalid objects are tolerated; otherwise they fail the test.
    pub allow_invalid: bool,
    /// Invalid objects, with their errors. They are reconciled again after any event.
    pub invalid: BTreeMap<ResourceKey, String>,
    /// Names of the pods that were deleted.
    pub ended: BTreeSet<String>,
    /// Time until the kubelet changes a pod that is not ready.
    pub container_start_time: Duration,
    /// Pods that are not ready, with the start of that time. Empty without a start time.
    not_ready_since: BTreeMap<String, Timestamp>,
}

enum SimulationStep {
    DeliverChange,
    StartReconcile(ResourceKey),
    Write(usize),
    DeliverHookResult(usize),
    AdvanceCluster(ResourceKind, String),
}

impl OperatorSimulation {
    /// Starts an operator on this cluster.
    pub fn new(server: SimulatedApiServer, seed: u64) -> Self {
        let mut simulation = Self {
            server,
            observed: ResourceCache::with_ports(Some(PORTS)),
            queue: BTreeSet::new(),
            scheduled: BTreeMap::new(),
            pending_changes: VecDeque::new(),
            workers: Vec::new(),
            hook_calls: Vec::new(),
            settings: PlanSettings::default(),
            hooks: SimulatedHooks::default(),
            random: fastrand::Rng::with_seed(seed),
            writes: 0,
            kill_after_writes: None,
            kill_after_responses: None,
            kills_per_mille: 0,
            kills: 0,
            write_failure_percent: 0,
            on_write: |_| {},
            allow_invalid: false,
            invalid: BTreeMap::new(),
            ended: BTreeSet::new(),
            container_start_time: Duration::ZERO,
            not_ready_since: BTreeMap::new(),
        };
        simulation.start_operator();
        simulation
    }

    fn kill_operator(&mut self) {
        self.kills += 1;
        self.start_operator();
    }

    /// Starts an operator, which lists everything.
    fn start_operator(&mut self) {
        self.observed = ResourceCache::with_ports(Some(PORTS));
        self.queue.clear();
        self.scheduled.clear();
        self.pending_changes.clear();
        self.workers.clear();
        self.hook_calls.clear();
        let list = self.observed.begin_list();
        self.server.initial_changes().into_iter().for_each(|change| self.deliver_change(change));
        self.queue.extend(self.observed.end_list(ResourceKind::Node, list));
    }

    fn deliver_change(&mut self, change: ResourceChange) {
        self.queue.extend(change.apply_to(&mut self.observed));
        self.queue.extend(std::mem::take(&mut self.invalid).into_keys());
    }

    /// Applies a change by another client.
    pub fn edit(&mut self, kind: ResourceKind, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut object = self.server.get(kind, name).unwrap().clone();
        edit(&mut object);
        let change = self.server.put(kind, object);
        self.pending_changes.push_back(change);
    }

    /// Creates an object for another client.
    pub fn create(&mut self, kind: ResourceKind, object: Value) {
        let change = self.server.create(kind, object);
        self.pending_changes.push_back(change);
    }

    /// Deletes an object for another client.
    pub fn delete(&mut self, kind: ResourceKind, name: &str) {
        let changes = self.server.remove(kind, name);
        self.pending_changes.extend(changes);
    }

    /// Steps until nothing is left to do, and calls `observe` on each state.
    pub fn run(&mut self, mut observe: impl FnMut(&SimulatedApiServer)) {
        for _ in 0..MAX_MOVES {
            if !self.advance() {
                return;
            }
            observe(&self.server);
        }
        panic!("the run does not end; queue: {:?}, later: {:?}", self.queue, self.scheduled);
    }

    /// Takes at most this number of steps.
    pub fn run_for(&mut self, steps: usize, mut observe: impl FnMut(&SimulatedApiServer)) {
        for _ in 0..steps {
            if !self.advance() {
                return;
            }
            observe(&self.server);
        }
    }

    /// Takes a step, or else advances the time to the next one. Returns false if nothing is left to do.
    fn advance(&mut self) -> bool {
        self.server.now = self.server.now.checked_add(TICK).unwrap();
        if self.step() {
            return true;
        }
        let Some(next) = self.next_due() else { return false };
        self.server.now = next;
        true
    }

    /// Takes a step at the present time, if there is one.
    pub fn step(&mut self) -> bool {
        let now = self.server.now;
        let due = self.scheduled.extract_if(.., |_, at| *at <= now).map(|(key, _)| key);
        self.queue.extend(due);
        if self.kills_per_mille > 0 && self.random.u16(..1000) < self.kills_per_mille {
            self.kill_operator();
        }
        let mut steps = self.possible_steps();
        if steps.is_empty() {
            return false;
        }
        let chosen = steps.swap_remove(self.random.usize(..steps.len()));
        self.take_step(chosen);
        self.update_not_ready();
        true
    }

    /// When there will be a step if there is none now; `None` if nothing is left to do.
    #[must_use]
    pub fn next_due(&self) -> Option<Timestamp> {
        let unsettled = self.server.unsettled.iter().filter_map(|(kind, name)| self.starts_at(*kind, name));
        self.scheduled.values().copied().chain(unsettled).min()
    }

    /// When the containers of this pod will have started; `None` for a ready pod, and for other objects.
    fn starts_at(&self, kind: ResourceKind, name: &str) -> Option<Timestamp> {
        let since = self.not_ready_since.get(name).filter(|_| kind == ResourceKind::Pod)?;
        Some(since.checked_add(self.container_start_time).unwrap())
    }

    fn update_not_ready(&mut self) {
        if self.container_start_time.is_zero() {
            return;
        }
        let pods = self.server.all(ResourceKind::Pod).filter(|pod| !is_ready(pod));
        let names = pods.map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned());
        let mut before = std::mem::take(&mut self.not_ready_since);
        let since = |name| {
            let since = before.remove(&name).unwrap_or(self.server.now);
            (name, since)
        };
        self.not_ready_since = names.map(since).collect();
    }

    fn possible_steps(&self) -> Vec<SimulationStep> {
        let mut steps: Vec<SimulationStep> = (0..self.workers.len()).map(SimulationStep::Write).collect();
        steps.extend((0..self.hook_calls.len()).map(SimulationStep::DeliverHookResult));
        if !self.pending_changes.is_empty() {
            steps.push(SimulationStep::DeliverChange);
        }
        if self.workers.len() < WORKERS {
            let is_free = |key: &&ResourceKey| !self.workers.iter().any(|(busy, _)| busy == *key);
            steps.extend(self.queue.iter().filter(is_free).cloned().map(SimulationStep::StartReconcile));
        }
        let has_started =
            |kind, name: &str| self.starts_at(kind, name).is_none_or(|at| at <= self.server.now);
        let restless = self.server.unsettled.iter().filter(|(kind, name)| has_started(*kind, name));
        steps.extend(restless.map(|(kind, name)| SimulationStep::AdvanceCluster(*kind, name.clone())));
        steps
    }

    fn take_step(&mut self, chosen: SimulationStep) {
        match chosen {
            SimulationStep::DeliverChange => {
                if let Some(change) = self.pending_changes.pop_front() {
                    self.deliver_change(change);
                }
            }
            SimulationStep::StartReconcile(key) => self.begin(key),
            SimulationStep::Write(worker) => self.write(worker),
            SimulationStep::DeliverHookResult(call) => self.deliver_hook_result(call),
            SimulationStep::AdvanceCluster(kind, name) => {
                let before = self.server.get(kind, &name).filter(|_| kind == ResourceKind::Pod).cloned();
                let changes = self.server.advance(kind, &name);
                if let Some((before, now)) = before.zip(self.server.get(kind, &name)) {
                    self.hooks.observe(&before, now);
                }
                self.pending_changes.extend(changes);
            }
        }
    }

    fn begin(&mut self, key: ResourceKey) {
        self.queue.remove(&key);
        let Some(snapshot) = self.observed.snapshot(&key, self.server.now) else { return };
        let plan = match plan_for(&snapshot, self.settings, self.server.now) {
            Err(error) if self.allow_invalid => {
                self.invalid.insert(key, error.to_string());
                return;
            }
            plan => plan.unwrap(),
        };
        assert!(self.observed.reserve_ports(&plan.port_choices, self.server.now));
        if let Some(at) = plan.requeue_at {
            self.scheduled.insert(key.clone(), at);
        }
        for call in plan.hook_calls {
            if !self.hook_calls.iter().any(|(_, noted)| noted.pod == call.pod) {
                self.hook_calls.push((key.clone(), call));
            }
        }
        if !plan.steps.is_empty() {
            self.workers.push((key, plan.steps.into()));
        }
    }

    /// Delivers the response of a hook, or loses it.
    fn deliver_hook_result(&mut self, call: usize) {
        let (key, call) = self.hook_calls.swap_remove(call);
        let answer = self.hooks.answer(&self.server, &call);
        let is_lost = self.random.u8(..100) < self.write_failure_percent;
        if let Some(answer) = answer.filter(|_| !is_lost)
            && self.observed.record_hook_result(call, answer)
        {
            self.queue.insert(key);
        }
        if self.kill_after_responses == Some(self.hooks.response_count) {
            self.kill_after_responses = None;
            self.kill_operator();
        }
    }

    fn write(&mut self, worker: usize) {
        let (key, steps) = &mut self.workers[worker];
        let key = key.clone();
        let Some(step) = steps.pop_front() else { return };
        if steps.is_empty() {
            self.workers.swap_remove(worker);
        }
        if let WriteAction::Delete { kind: ResourceKind::Instance, uid, .. } = &step.action {
            for pod in self.server.all(ResourceKind::Pod) {
                let metadata = &pod["metadata"];
                if metadata["ownerReferences"][0]["uid"] == uid.as_str() {
                    self.hooks.end(metadata["name"].as_str().unwrap(), metadata["uid"].as_str().unwrap());
                }
            }
        }
        let fails = self.random.u8(..100) < self.write_failure_percent;
        // Fails either before the write takes effect, or before its response arrives.
        let outcome = match fails && self.random.bool() {
            true => Err(SimulatedWriteError::Overloaded),
            false => self.server.write(&step.action),
        };
        self.writes += 1;
        (self.on_write)(&step);
        if let WriteAction::Delete { kind: ResourceKind::Pod, name, uid } = &step.action {
            self.hooks.end(name, uid);
            self.ended.insert(name.clone());
        }
        if let WriteAction::ForceDelete { name, .. } = &step.action {
            self.ended.insert(name.clone());
        }
        match outcome {
            Ok(changes) => {
                if let Some(answer) = changes.first().filter(|_| !fails) {
                    self.deliver_change(answer.clone());
                }
                self.pending_changes.extend(changes);
                if fails {
                    self.requeue(key);
                }
            }
            Err(_) => self.requeue(key),
        }
        if self.kill_after_writes == Some(self.writes) {
            self.kill_operator();
        }
    }

    fn requeue(&mut self, key: ResourceKey) {
        self.workers.retain(|(busy, _)| *busy != key);
        self.queue.insert(key);
    }
}

/// Whether a pod is ready and not being deleted.
#[must_use]
pub fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    let is_ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
    pod["metadata"].get("deletionTimestamp").is_none()
        && conditions.is_some_and(|conditions| conditions.iter().any(is_ready))
}
