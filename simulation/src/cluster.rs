//! The operator's plans on API objects in memory, during load: a group of the engines is created, and then updated pod
//! by pod. An engine runs while its pod is ready.
//!
//! Plans, their observations, and writes are the operator's own code; the API server and the kubelet are those of its
//! forecasts. Depending on the seed, watches are late, writes fail or lose their responses, and the operator is
//! restarted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use moongate_operator::ResourceKind;
use moongate_operator::forecast::{ResourceChange, SimulatedApiServer, SimulatedWriteError};
use moongate_operator::plan::{PlanStep, WriteAction, plan_for};
use moongate_operator::resource_cache::{ResourceCache, ResourceKey};
use moongate_render::GangScheduler;
use moongate_runtime::net::simulated::record;
use serde_json::{Value, json};

use crate::plan::{PAIRS, SimulatedHost};
use crate::report::{count, violation};

/// Maximum number of objects planned concurrently.
const MAX_WORKERS: usize = 4;
/// Maximum number of steps to convergence.
const MAX_STEPS: usize = 20_000;
/// When the group is updated, and how long a container takes to start.
const UPDATE_AT: Duration = Duration::from_millis(2_500);
const CONTAINER_START_TIME: Duration = Duration::from_millis(400);
/// Start date of a simulation, in seconds since 1970.
const EPOCH: i64 = 1_790_000_000;
const TICK: Duration = Duration::from_millis(5);
const ROLES: [&str; 2] = ["prefill", "decode"];
const ROLE_NAME_LABEL: &str = "rbg.workloads.x-k8s.io/role-name";

pub(crate) struct SimulatedCluster {
    server: SimulatedApiServer,
    observed: ResourceCache,
    queue: BTreeSet<ResourceKey>,
    requeue_at: BTreeMap<ResourceKey, Timestamp>,
    /// Changes that watches have not reported yet.
    pending_watch_events: VecDeque<ResourceChange>,
    workers: Vec<(ResourceKey, VecDeque<PlanStep>)>,
    random: fastrand::Rng,
    write_failure_percent: u8,
    /// Restarts of the operator per thousand steps.
    restart_per_mille: u16,
    is_updated: bool,
    /// Pods that are not ready, with the start of that time.
    not_ready_since: BTreeMap<String, Timestamp>,
    /// The engine that each pod represents.
    engines: BTreeMap<String, SimulatedHost>,
}

/// Next step of the simulation.
enum ClusterStep {
    DeliverWatchEvent,
    Reconcile(ResourceKey),
    Write(usize),
    AdvanceKubernetes(ResourceKind, String),
}

impl SimulatedCluster {
    /// A cluster with the engines' group, whose pods are ready.
    pub(crate) fn new(seed: u64) -> Self {
        let mut cluster = Self {
            server: SimulatedApiServer::new(Timestamp::from_second(EPOCH).unwrap_or_default()),
            observed: ResourceCache::default(),
            queue: BTreeSet::new(),
            requeue_at: BTreeMap::new(),
            pending_watch_events: VecDeque::new(),
            workers: Vec::new(),
            random: fastrand::Rng::with_seed(seed ^ 0x0bed),
            write_failure_percent: 0,
            restart_per_mille: 0,
            is_updated: false,
            not_ready_since: BTreeMap::new(),
            engines: BTreeMap::new(),
        };
        let group = json!({ "metadata": { "name": "g" }, "spec": { "roles": roles("i:1") } });
        let change = cluster.server.create(ResourceKind::Group, group);
        cluster.pending_watch_events.push_back(change);
        cluster.run_until_idle();
        cluster.assign_engines();
        cluster.write_failure_percent = cluster.random.u8(..30);
        cluster.restart_per_mille = cluster.random.u16(..20);
        cluster
    }

    /// Whether an engine's pod is down.
    pub(crate) fn is_down(&self, host: SimulatedHost) -> bool {
        let mut pods = self.engines.iter().filter(|(_, engine)| **engine == host);
        !pods.any(|(pod, _)| self.server.get(ResourceKind::Pod, pod).is_some_and(is_ready))
    }

    /// Runs one step, at a time since the start.
    pub(crate) fn step(&mut self, now: Duration) {
        let start = Timestamp::from_second(EPOCH).unwrap_or_default();
        self.server.now = self.server.now.max(start.checked_add(now).unwrap_or(start));
        if !self.is_updated && now >= UPDATE_AT {
            self.is_updated = true;
            self.update();
        }
        if self.is_updated {
            self.advance();
        }
    }

    /// Runs to convergence, which is an invariant.
    pub(crate) fn finish(&mut self) {
        self.run_until_idle();
        let group = self.server.get(ResourceKind::Group, "g").cloned().unwrap_or_default();
        let settled = group["status"]["observedGeneration"] == group["metadata"]["generation"]
            && condition(&group, "Ready") == Some("True")
            && condition(&group, "RollingUpdateInProgress") == Some("False");
        let pods = self.server.all(ResourceKind::Pod);
        let is_new = |pod: &Value| is_ready(pod) && pod["spec"]["containers"][0]["image"] == "i:2";
        let (new, old): (Vec<&Value>, Vec<&Value>) = pods.partition(|pod| is_new(pod));
        if !settled || new.len() != 2 * PAIRS || !old.is_empty() {
            let problem = format!(
                "{} pods are updated, {} are not; the group: {}",
                new.len(),
                old.len(),
                group["status"]
            );
            violation("operator converges", &problem);
        }
    }

    fn update(&mut self) {
        let Some(mut group) = self.server.get(ResourceKind::Group, "g").cloned() else { return };
        group["spec"]["roles"] = roles("i:2");
        let change = self.server.put(ResourceKind::Group, group);
        self.pending_watch_events.push_back(change);
        record(format_args!("the group is updated"));
        count("updates");
    }

    /// Runs steps until nothing is left to do.
    fn run_until_idle(&mut self) {
        for _ in 0..MAX_STEPS {
            self.server.now = self.server.now.checked_add(TICK).unwrap_or(self.server.now);
            if !self.advance() {
                match self.requeue_at.values().min().copied().into_iter().chain(self.next_start()).min() {
                    Some(next) => self.server.now = self.server.now.max(next),
                    None => return,
                }
            }
        }
        violation("operator converges", &format!("no convergence; queue: {:?}", self.queue));
    }

    /// When the next starting container will have started.
    fn next_start(&self) -> Option<Timestamp> {
        self.not_ready_since.values().filter_map(|since| since.checked_add(CONTAINER_START_TIME).ok()).min()
    }

    /// Runs one step, if there is one.
    fn advance(&mut self) -> bool {
        let now = self.server.now;
        let due = self.requeue_at.extract_if(.., |_, at| *at <= now).map(|(key, _)| key);
        self.queue.extend(due.collect::<Vec<_>>());
        if self.restart_per_mille > 0 && self.random.u16(..1000) < self.restart_per_mille {
            self.restart();
        }
        let mut moves = self.possible_steps();
        if moves.is_empty() {
            return false;
        }
        match moves.swap_remove(self.random.usize(..moves.len())) {
            ClusterStep::DeliverWatchEvent => {
                if let Some(change) = self.pending_watch_events.pop_front() {
                    self.observe(change);
                }
            }
            ClusterStep::Reconcile(key) => self.reconcile(key),
            ClusterStep::Write(worker) => self.write(worker),
            ClusterStep::AdvanceKubernetes(kind, name) => {
                let changes = self.server.advance(kind, &name);
                self.pending_watch_events.extend(changes);
            }
        }
        self.check_invariants();
        true
    }

    fn possible_steps(&self) -> Vec<ClusterStep> {
        let mut moves: Vec<ClusterStep> = (0..self.workers.len()).map(ClusterStep::Write).collect();
        if !self.pending_watch_events.is_empty() {
            moves.push(ClusterStep::DeliverWatchEvent);
        }
        if self.workers.len() < MAX_WORKERS {
            let is_free = |key: &&ResourceKey| !self.workers.iter().any(|(busy, _)| busy == *key);
            moves.extend(self.queue.iter().filter(is_free).cloned().map(ClusterStep::Reconcile));
        }
        let has_started = |name: &str| {
            let since =
                self.not_ready_since.get(name).and_then(|since| since.checked_add(CONTAINER_START_TIME).ok());
            since.is_none_or(|since| since <= self.server.now)
        };
        let restless = self.server.unsettled.iter().filter(|(_, name)| has_started(name));
        moves.extend(restless.map(|(kind, name)| ClusterStep::AdvanceKubernetes(*kind, name.clone())));
        moves
    }

    /// Ends the operator's process and starts a new one, which lists everything.
    fn restart(&mut self) {
        count("operator-restarts");
        self.observed = ResourceCache::default();
        self.queue.clear();
        self.requeue_at.clear();
        self.pending_watch_events.clear();
        self.workers.clear();
        self.server.initial_changes().into_iter().for_each(|change| self.observe(change));
    }

    fn observe(&mut self, change: ResourceChange) {
        self.queue.extend(change.apply_to(&mut self.observed));
    }

    fn reconcile(&mut self, key: ResourceKey) {
        self.queue.remove(&key);
        let Some(snapshot) = self.observed.snapshot(&key, self.server.now) else { return };
        match plan_for(&snapshot, GangScheduler::default(), self.server.now) {
            Err(error) => violation("operator converges", &format!("no plan for {key:?}: {error}")),
            Ok(plan) => {
                if let Some(at) = plan.requeue_at {
                    self.requeue_at.insert(key.clone(), at);
                }
                if !plan.steps.is_empty() {
                    self.workers.push((key, plan.steps.into()));
                }
            }
        }
    }

    fn write(&mut self, worker: usize) {
        let Some((key, steps)) = self.workers.get_mut(worker) else { return };
        let key = key.clone();
        let Some(step) = steps.pop_front() else { return };
        if steps.is_empty() {
            self.workers.swap_remove(worker);
        }
        let fails = self.random.u8(..100) < self.write_failure_percent;
        // Either before the write was applied, or before its response arrived.
        let outcome = match fails && self.random.bool() {
            true => Err(SimulatedWriteError::Overloaded),
            false => self.server.write(&step.action),
        };
        record(format_args!("operator: {} ({})", name(&step.action), step.reason));
        count("operator-writes");
        let is_written = outcome.is_ok();
        if let Ok(changes) = outcome {
            if let Some(first_change) = changes.first().filter(|_| !fails) {
                self.observe(first_change.clone());
            }
            self.pending_watch_events.extend(changes);
        }
        if fails || !is_written {
            self.workers.retain(|(busy, _)| *busy != key);
            self.queue.insert(key);
        }
    }

    /// Checks the invariants after every step.
    fn check_invariants(&mut self) {
        let now = self.server.now;
        let pods: Vec<Value> = self.server.all(ResourceKind::Pod).cloned().collect();
        self.not_ready_since
            .retain(|name, _| self.server.get(ResourceKind::Pod, name).is_some_and(|pod| !is_ready(pod)));
        for pod in pods.iter().filter(|pod| !is_ready(pod)) {
            self.not_ready_since.entry(text(&pod["metadata"]["name"])).or_insert(now);
        }
        if !self.is_updated {
            return;
        }
        self.assign_engines();
        for role in ROLES {
            let of_role = || pods.iter().filter(|pod| pod["metadata"]["labels"][ROLE_NAME_LABEL] == role);
            let ready = of_role().filter(|pod| is_ready(pod)).count();
            // The default budget of an update.
            if ready + 1 < PAIRS {
                violation("operator budget", &format!("only {ready} of {PAIRS} {role} engines are ready"));
            }
        }
        for pod in &pods {
            let owners = pod["metadata"]["ownerReferences"].as_array().map_or(&[][..], Vec::as_slice);
            let controllers = owners.iter().filter(|owner| owner["controller"] == true).count();
            if controllers != 1 {
                violation("one owner", &format!("{} has {controllers} owners", pod["metadata"]["name"]));
            }
        }
    }

    /// Assigns each pod an engine that no other pod has.
    fn assign_engines(&mut self) {
        self.engines.retain(|name, _| self.server.get(ResourceKind::Pod, name).is_some());
        for pod in self.server.all(ResourceKind::Pod) {
            let name = text(&pod["metadata"]["name"]);
            if self.engines.contains_key(&name) {
                continue;
            }
            let is_prefill = pod["metadata"]["labels"][ROLE_NAME_LABEL] == "prefill";
            let host = |number| {
                if is_prefill { SimulatedHost::Prefill(number) } else { SimulatedHost::Decode(number) }
            };
            let free = (0..PAIRS).map(host).find(|host| !self.engines.values().any(|used| used == host));
            if let Some(free) = free {
                self.engines.insert(name, free);
            }
        }
    }
}

fn roles(image: &str) -> Value {
    let template = json!({ "spec": { "containers": [{ "name": "c", "image": image }] } });
    let role = |name: &str| json!({ "name": name, "replicas": PAIRS, "standalonePattern": { "template": template } });
    json!(ROLES.map(role))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a str> {
    let conditions = object["status"]["conditions"].as_array()?;
    conditions.iter().find(|one| one["type"] == kind)?["status"].as_str()
}

fn is_ready(pod: &Value) -> bool {
    pod["metadata"].get("deletionTimestamp").is_none() && condition(pod, "Ready") == Some("True")
}

fn name(action: &WriteAction) -> String {
    match action {
        WriteAction::Apply(manifest) => format!("apply {}", manifest.name()),
        WriteAction::Create(manifest) => format!("create {}", manifest.name()),
        WriteAction::Replace { kind, name, .. } => format!("replace {} {name}", kind.name()),
        WriteAction::Patch { kind, name, .. } => format!("patch {} {name}", kind.name()),
        WriteAction::Delete { kind, name, .. } => format!("delete {} {name}", kind.name()),
    }
}
