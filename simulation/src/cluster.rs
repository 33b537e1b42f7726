//! The operator's plans over API objects in memory, while engines serve: a group of the engines is created, and then updated pod by
//! pod. An engine runs while its pod is ready.
//!
//! Plans, what they observe, and writes are the operator's own; the API server and the kubelet are those of its forecasts. Watches
//! are late, writes fail or lose their answers, and the operator is restarted, as the seed has it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use moongate_operator::Kind;
use moongate_operator::forecast::{Change, Server};
use moongate_operator::observed::{Key, Observed};
use moongate_operator::plan::{self, Action, Step};
use moongate_render::GangScheduler;
use moongate_runtime::net::simulated::record;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::plan::{Host, PAIRS};
use crate::report::{count, violation};

/// Objects that are planned for at a time.
const WORKERS: usize = 4;
/// Most moves to an end.
const MAX_MOVES: usize = 20_000;
/// When the group is updated, and how long a container takes to start.
const UPDATE: Duration = Duration::from_millis(2_500);
const START: Duration = Duration::from_millis(400);
/// The date at which a simulation begins, in seconds since 1970.
const EPOCH: i64 = 1_790_000_000;
/// Between two moves.
const TICK: Duration = Duration::from_millis(5);
const ROLES: [&str; 2] = ["prefill", "decode"];
const ROLE: &str = "rbg.workloads.x-k8s.io/role-name";

pub(crate) struct Cluster {
    server: Server,
    observed: Mutex<Observed>,
    queue: BTreeSet<Key>,
    later: BTreeMap<Key, Timestamp>,
    /// What watches have not reported yet.
    news: VecDeque<Change>,
    workers: Vec<(Key, VecDeque<Step>)>,
    random: fastrand::Rng,
    /// Of a hundred writes, so many fail.
    failing: u8,
    /// Of a thousand moves, so many restart the operator.
    restarting: u16,
    is_updated: bool,
    /// Pods that are not ready, and since when.
    down: BTreeMap<String, Timestamp>,
    /// Which engine a pod is.
    engines: BTreeMap<String, Host>,
}

/// What happens next.
enum Move {
    Hear,
    Begin(Key),
    Write(usize),
    Kubernetes(Kind, String),
}

impl Cluster {
    /// A cluster with the engines' group, whose pods are ready.
    pub(crate) fn new(seed: u64) -> Self {
        let mut cluster = Self {
            server: Server::new(Timestamp::from_second(EPOCH).unwrap_or_default()),
            observed: Mutex::default(),
            queue: BTreeSet::new(),
            later: BTreeMap::new(),
            news: VecDeque::new(),
            workers: Vec::new(),
            random: fastrand::Rng::with_seed(seed ^ 0x0bed),
            failing: 0,
            restarting: 0,
            is_updated: false,
            down: BTreeMap::new(),
            engines: BTreeMap::new(),
        };
        let group = json!({ "metadata": { "name": "g" }, "spec": { "roles": roles("i:1") } });
        let change = cluster.server.create(Kind::Group, group);
        cluster.news.push_back(change);
        cluster.settle();
        cluster.assign();
        cluster.failing = cluster.random.u8(..30);
        cluster.restarting = cluster.random.u16(..20);
        cluster
    }

    /// Whether an engine's pod is down.
    pub(crate) fn is_down(&self, host: Host) -> bool {
        let mut pods = self.engines.iter().filter(|(_, engine)| **engine == host);
        !pods.any(|(pod, _)| self.server.get(Kind::Pod, pod).is_some_and(is_ready))
    }

    /// One move, at a time since the beginning.
    pub(crate) fn step(&mut self, now: Duration) {
        let start = Timestamp::from_second(EPOCH).unwrap_or_default();
        self.server.now = self.server.now.max(start.checked_add(now).unwrap_or(start));
        if !self.is_updated && now >= UPDATE {
            self.is_updated = true;
            self.update();
        }
        if self.is_updated {
            self.advance();
        }
    }

    /// Goes on to the end, which there must be.
    pub(crate) fn finish(&mut self) {
        self.settle();
        let group = self.server.get(Kind::Group, "g").cloned().unwrap_or_default();
        let settled = group["status"]["observedGeneration"] == group["metadata"]["generation"]
            && condition(&group, "Ready") == Some("True")
            && condition(&group, "RollingUpdateInProgress") == Some("False");
        let pods = self.server.all(Kind::Pod);
        let is_new = |pod: &Value| is_ready(pod) && pod["spec"]["containers"][0]["image"] == "i:2";
        let (new, old): (Vec<&Value>, Vec<&Value>) = pods.partition(|pod| is_new(pod));
        if !settled || new.len() != 2 * PAIRS || !old.is_empty() {
            let what = format!(
                "{} pods are updated, {} are not; the group: {}",
                new.len(),
                old.len(),
                group["status"]
            );
            violation("operator converges", &what);
        }
    }

    fn update(&mut self) {
        let Some(mut group) = self.server.get(Kind::Group, "g").cloned() else { return };
        group["spec"]["roles"] = roles("i:2");
        let change = self.server.put(Kind::Group, group);
        self.news.push_back(change);
        record(format_args!("the group is updated"));
        count("updates");
    }

    /// Moves until nothing is left to do.
    fn settle(&mut self) {
        for _ in 0..MAX_MOVES {
            self.server.now = self.server.now.checked_add(TICK).unwrap_or(self.server.now);
            if !self.advance() {
                match self.later.values().min().copied().into_iter().chain(self.next_start()).min() {
                    Some(next) => self.server.now = self.server.now.max(next),
                    None => return,
                }
            }
        }
        violation("operator converges", &format!("it has no end; the queue: {:?}", self.queue));
    }

    /// When the next container has started that is starting now.
    fn next_start(&self) -> Option<Timestamp> {
        self.down.values().filter_map(|since| since.checked_add(START).ok()).min()
    }

    /// Makes a move, if there is one.
    fn advance(&mut self) -> bool {
        let now = self.server.now;
        let due = self.later.extract_if(.., |_, at| *at <= now).map(|(key, _)| key);
        self.queue.extend(due.collect::<Vec<_>>());
        if self.restarting > 0 && self.random.u16(..1000) < self.restarting {
            self.restart();
        }
        let mut moves = self.moves();
        if moves.is_empty() {
            return false;
        }
        match moves.swap_remove(self.random.usize(..moves.len())) {
            Move::Hear => {
                if let Some(change) = self.news.pop_front() {
                    self.hear(change);
                }
            }
            Move::Begin(key) => self.begin(key),
            Move::Write(worker) => self.write(worker),
            Move::Kubernetes(kind, name) => {
                let changes = self.server.advance(kind, &name);
                self.news.extend(changes);
            }
        }
        self.look();
        true
    }

    fn moves(&self) -> Vec<Move> {
        let mut moves: Vec<Move> = (0..self.workers.len()).map(Move::Write).collect();
        if !self.news.is_empty() {
            moves.push(Move::Hear);
        }
        if self.workers.len() < WORKERS {
            let is_free = |key: &&Key| !self.workers.iter().any(|(busy, _)| busy == *key);
            moves.extend(self.queue.iter().filter(is_free).cloned().map(Move::Begin));
        }
        let has_started = |name: &str| {
            let since = self.down.get(name).and_then(|since| since.checked_add(START).ok());
            since.is_none_or(|since| since <= self.server.now)
        };
        let restless = self.server.restless.iter().filter(|(_, name)| has_started(name));
        moves.extend(restless.map(|(kind, name)| Move::Kubernetes(*kind, name.clone())));
        moves
    }

    /// The operator's process ends, and another one reads everything anew.
    fn restart(&mut self) {
        count("operator-restarts");
        self.observed = Mutex::default();
        self.queue.clear();
        self.later.clear();
        self.news.clear();
        self.workers.clear();
        let all = self.server.everything().map(|(kind, object)| Change::Is(kind, object.clone()));
        all.collect::<Vec<_>>().into_iter().for_each(|change| self.hear(change));
    }

    fn hear(&mut self, change: Change) {
        let mut observed = self.observed.lock();
        let concerns = match change {
            Change::Is(kind, object) => match serde_json::from_value::<DynamicObject>(object) {
                Ok(object) => observed.take(kind, object),
                Err(_) => Vec::new(),
            },
            Change::Gone(kind, object) => {
                let text = |member: &str| object["metadata"][member].as_str().unwrap_or_default().to_owned();
                let key = Key { kind, namespace: text("namespace"), name: text("name") };
                observed.lose(&key, &text("uid"))
            }
        };
        self.queue.extend(concerns);
    }

    fn begin(&mut self, key: Key) {
        self.queue.remove(&key);
        match plan::observed(&self.observed, &key, GangScheduler::default(), self.server.now) {
            Err(error) => violation("operator converges", &format!("no plan for {key:?}: {error}")),
            Ok(plan) => {
                if let Some(at) = plan.again_at {
                    self.later.insert(key.clone(), at);
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
        let fails = self.random.u8(..100) < self.failing;
        // Either before the write was made, or before its answer arrived.
        let outcome = match fails && self.random.bool() {
            true => Err("the API server is overloaded".to_owned()),
            false => self.server.write(&step.action),
        };
        record(format_args!("operator: {} ({})", name(&step.action), step.reason));
        count("operator-writes");
        let is_written = outcome.is_ok();
        if let Ok(changes) = outcome {
            if let Some(answer) = changes.first().filter(|_| !fails) {
                self.hear(answer.clone());
            }
            self.news.extend(changes);
        }
        if fails || !is_written {
            self.workers.retain(|(busy, _)| *busy != key);
            self.queue.insert(key);
        }
    }

    /// Checks what must hold after every move.
    fn look(&mut self) {
        let now = self.server.now;
        let pods: Vec<Value> = self.server.all(Kind::Pod).cloned().collect();
        self.down.retain(|name, _| self.server.get(Kind::Pod, name).is_some_and(|pod| !is_ready(pod)));
        for pod in pods.iter().filter(|pod| !is_ready(pod)) {
            self.down.entry(text(&pod["metadata"]["name"])).or_insert(now);
        }
        if !self.is_updated {
            return;
        }
        self.assign();
        for role in ROLES {
            let of_role = || pods.iter().filter(|pod| pod["metadata"]["labels"][ROLE] == role);
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

    /// Gives every pod an engine that no other pod is.
    fn assign(&mut self) {
        self.engines.retain(|name, _| self.server.get(Kind::Pod, name).is_some());
        for pod in self.server.all(Kind::Pod) {
            let name = text(&pod["metadata"]["name"]);
            if self.engines.contains_key(&name) {
                continue;
            }
            let is_prefill = pod["metadata"]["labels"][ROLE] == "prefill";
            let host = |number| if is_prefill { Host::Prefill(number) } else { Host::Decode(number) };
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

fn name(action: &Action) -> String {
    match action {
        Action::Apply(manifest) => format!("apply {}", manifest.name()),
        Action::Create(manifest) => format!("create {}", manifest.name()),
        Action::Replace { kind, name, .. } => format!("replace {} {name}", kind.name()),
        Action::Patch { kind, name, .. } => format!("patch {} {name}", kind.name()),
        Action::Delete { kind, name, .. } => format!("delete {} {name}", kind.name()),
    }
}
