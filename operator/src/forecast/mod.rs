//! What the operator is about to do: its plans, carried out on objects in memory until nothing is left to do.
//!
//! The plans are those that the operator makes, so a forecast cannot differ from what is done later, but for what it
//! presumes of Kubernetes: that pods get nodes, that their images start, and that others' controllers do what they are told.

mod foreseen;
mod kubelet;
mod server;

pub use foreseen::{Foreseen, ImageChange, What};
pub(crate) use kubelet::has;
pub use server::{Change, Fate, Server};

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use moongate_render::GangScheduler;
use parking_lot::Mutex;
use rbg_api::keys;
use serde::Serialize;
use serde_json::Value;

use crate::Kind;
use crate::observed::{Key, Observed};
use crate::plan::{self, Answer};

/// So many moves are made of no use only by something that has no end.
const MAX_MOVES: usize = 200_000;
/// Who waits for longer than that waits for something that does not come.
const HORIZON: Duration = Duration::from_secs(7 * 24 * 3600);

/// What will be done, in this order.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Forecast {
    /// The steps that concern pods, and others' objects. Statuses and revisions are not told.
    pub steps: Vec<Foreseen>,
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
pub fn forecast(server: &mut Server, gang: GangScheduler, absent: &[Kind]) -> Forecast {
    let mut run = Run::new(server, gang, absent);
    run.carry_on();
    run.ended()
}

struct Run<'a> {
    server: &'a mut Server,
    gang: GangScheduler,
    observed: Mutex<Observed>,
    queue: BTreeSet<Key>,
    later: BTreeMap<Key, Timestamp>,
    begun: Timestamp,
    moves: u64,
    ready_at_first: BTreeMap<String, usize>,
    roles: BTreeMap<String, RoleForecast>,
    forecast: Forecast,
}

impl<'a> Run<'a> {
    fn new(server: &'a mut Server, gang: GangScheduler, absent: &[Kind]) -> Self {
        let mut observed = Observed::default();
        absent.iter().for_each(|kind| observed.set_absent(*kind, true));
        let mut roles: BTreeMap<String, RoleForecast> = BTreeMap::new();
        for pod in pods(server) {
            roles.entry(role(pod).to_owned()).or_default().pods += 1;
        }
        let mut run = Self {
            begun: server.now,
            ready_at_first: ready(server),
            server,
            gang,
            observed: Mutex::new(observed),
            queue: BTreeSet::new(),
            later: BTreeMap::new(),
            moves: 0,
            roles,
            forecast: Forecast::default(),
        };
        let all: Vec<Change> =
            run.server.everything().map(|(kind, object)| Change::Is(kind, object.clone())).collect();
        run.hear(all);
        run
    }

    /// The operator is quick: Kubernetes moves when it has nothing to do, and time passes when both have not.
    fn carry_on(&mut self) {
        for _ in 0..MAX_MOVES {
            self.moves += 1;
            if let Some(key) = self.queue.pop_first() {
                self.reconcile(&key);
            } else if let Some((kind, name)) = self.server.restless.first().cloned() {
                let changes = self.server.advance(kind, &name);
                self.hear(changes);
                self.count_unready();
            } else if !self.wait() {
                return;
            }
        }
        self.forecast.problems.push("it has no end: the same is done again and again".to_owned());
    }

    /// Until the next plan is due. Answers whether there is one.
    fn wait(&mut self) -> bool {
        let Some((key, due)) = self.later.iter().min_by_key(|(_, due)| **due) else { return false };
        if *due > plan::after(self.begun, HORIZON) {
            return false;
        }
        self.server.now = self.server.now.max(*due);
        let key = key.clone();
        self.later.remove(&key);
        self.queue.insert(key);
        true
    }

    fn hear(&mut self, changes: Vec<Change>) {
        let mut observed = self.observed.lock();
        for change in changes {
            let concerns = match change {
                Change::Is(kind, object) => serde_json::from_value::<DynamicObject>(object)
                    .map(|object| observed.take(kind, object))
                    .unwrap_or_default(),
                Change::Gone(kind, object) => {
                    let text =
                        |member: &str| object["metadata"][member].as_str().unwrap_or_default().to_owned();
                    let key = Key { kind, namespace: text("namespace"), name: text("name") };
                    observed.lose(&key, &text("uid"))
                }
            };
            self.queue.extend(concerns);
        }
    }

    fn reconcile(&mut self, key: &Key) {
        let plan = match plan::observed(&self.observed, key, self.gang, self.server.now) {
            Ok(plan) => plan,
            Err(error) => {
                let problem = format!("{} {}: {error}", key.kind.name(), key.name);
                if !self.forecast.problems.contains(&problem) {
                    self.forecast.problems.push(problem);
                }
                return;
            }
        };
        self.later.remove(key);
        if let Some(at) = plan.again_at {
            self.later.insert(key.clone(), at);
        }
        // Whoever is asked has nothing to wait for.
        for ask in plan.asks {
            if self.observed.lock().take_answer(ask, Answer::Done(None)) {
                self.queue.insert(key.clone());
            }
        }
        for step in &plan.steps {
            let waited = self.server.now.duration_since(self.begun).as_secs();
            let foreseen = foreseen::of(step, self.server, waited);
            match self.server.write(&step.action) {
                Ok(changes) => {
                    foreseen.iter().for_each(|step| self.count(step));
                    self.forecast.steps.extend(foreseen);
                    self.hear(changes);
                    self.count_unready();
                }
                Err(_) => {
                    self.queue.insert(key.clone());
                    return;
                }
            }
        }
    }

    fn count(&mut self, step: &Foreseen) {
        let role = self.roles.entry(step.role.clone()).or_default();
        let is_pod = step.kind == Kind::Pod.name();
        match step.what {
            What::RestartInPlace => role.restarted += 1,
            What::Create if is_pod => role.made += 1,
            What::Delete if is_pod => role.ended += 1,
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

    fn ended(self) -> Forecast {
        let named = self.roles.into_iter().filter(|(name, _)| !name.is_empty());
        let roles = named.map(|(name, role)| RoleForecast { name, ..role }).collect();
        Forecast { roles, ..self.forecast }
    }
}

/// The role of an object, by its labels; empty if it is of none.
fn role(object: &Value) -> &str {
    object["metadata"]["labels"][keys::ROLE_NAME].as_str().unwrap_or_default()
}

/// Pods of roles, whoever makes them.
fn pods(server: &Server) -> impl Iterator<Item = &Value> {
    server.all(Kind::Pod).chain(server.all(Kind::ForeignPod))
}

/// Pods that are ready, by role.
fn ready(server: &Server) -> BTreeMap<String, usize> {
    let mut ready = BTreeMap::new();
    for pod in pods(server).filter(|pod| has(pod, "Ready")) {
        *ready.entry(role(pod).to_owned()).or_default() += 1;
    }
    ready
}
