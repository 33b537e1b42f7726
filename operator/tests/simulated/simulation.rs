//! The operator's plans over an API server in memory, one move at a time: which comes next is drawn, and the same seed draws
//! the same. News of watches come late, writes may fail or lose their answer, the operator may be killed after any write.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use moongate_operator::Kind;
use moongate_operator::forecast::{Change, Server};
use moongate_operator::observed::{Key, Observed};
use moongate_operator::plan::{self, Ask, Step};
use moongate_render::GangScheduler;
use parking_lot::Mutex;
use serde_json::Value;

use crate::answers::Answers;

const WORKERS: usize = 4;
/// Ports that pods may get.
pub(crate) const PORTS: Range<u16> = 30000..30012;
/// Between two moves.
const TICK: Duration = Duration::from_millis(20);
/// So many moves are made of no use only by something that has no end.
const MAX_MOVES: usize = 20_000;

pub(crate) struct Simulation {
    pub(crate) server: Server,
    observed: Mutex<Observed>,
    queue: BTreeSet<Key>,
    later: BTreeMap<Key, Timestamp>,
    news: VecDeque<Change>,
    workers: Vec<(Key, VecDeque<Step>)>,
    asks: Vec<(Key, Ask)>,
    /// What pods answer.
    pub(crate) answers: Answers,
    random: fastrand::Rng,
    /// Writes that were made.
    pub(crate) writes: usize,
    /// After so many writes the operator is killed, and another one begins.
    pub(crate) killed_after: Option<usize>,
    /// The same after so many answers.
    pub(crate) killed_after_answer: Option<usize>,
    /// Of a hundred writes, so many fail.
    pub(crate) failing: u8,
    /// Whether objects that cannot be planned for are left alone, which else is a failure.
    pub(crate) refusing: bool,
    /// Those objects. They are looked at again after whatever news.
    refused: BTreeSet<Key>,
    /// Pods that were told to end.
    pub(crate) ended: BTreeSet<String>,
}

enum Move {
    Hear,
    Begin(Key),
    Write(usize),
    Answer(usize),
    Kubernetes(Kind, String),
}

impl Simulation {
    /// An operator that begins on this cluster.
    pub(crate) fn new(server: Server, seed: u64) -> Self {
        let mut simulation = Self {
            server,
            observed: Mutex::new(Observed::with_ports(Some(PORTS))),
            queue: BTreeSet::new(),
            later: BTreeMap::new(),
            news: VecDeque::new(),
            workers: Vec::new(),
            asks: Vec::new(),
            answers: Answers::default(),
            random: fastrand::Rng::with_seed(seed),
            writes: 0,
            killed_after: None,
            killed_after_answer: None,
            failing: 0,
            refusing: false,
            refused: BTreeSet::new(),
            ended: BTreeSet::new(),
        };
        simulation.begin_anew();
        simulation
    }

    fn begin_anew(&mut self) {
        self.observed = Mutex::new(Observed::with_ports(Some(PORTS)));
        self.queue.clear();
        self.later.clear();
        self.news.clear();
        self.workers.clear();
        self.asks.clear();
        let all: Vec<Change> =
            self.server.everything().map(|(kind, object)| Change::Is(kind, object.clone())).collect();
        all.into_iter().for_each(|change| self.hear(change));
    }

    fn hear(&mut self, change: Change) {
        let mut observed = self.observed.lock();
        let concerns = match change {
            Change::Is(kind, object) => {
                let object: DynamicObject = serde_json::from_value(object).unwrap();
                observed.take(kind, object)
            }
            Change::Gone(kind, object) => {
                let text = |member: &str| object["metadata"][member].as_str().unwrap().to_owned();
                let key = Key { kind, namespace: text("namespace"), name: text("name") };
                observed.lose(&key, &text("uid"))
            }
        };
        self.queue.extend(concerns);
        self.queue.append(&mut self.refused);
    }

    /// Someone else's change.
    pub(crate) fn edit(&mut self, kind: Kind, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut object = self.server.get(kind, name).unwrap().clone();
        edit(&mut object);
        let change = self.server.put(kind, object);
        self.news.push_back(change);
    }

    /// A new object of someone else's.
    pub(crate) fn create(&mut self, kind: Kind, object: Value) {
        let change = self.server.create(kind, object);
        self.news.push_back(change);
    }

    /// Somebody deletes an object.
    pub(crate) fn delete(&mut self, kind: Kind, name: &str) {
        let changes = self.server.remove(kind, name);
        self.news.extend(changes);
    }

    /// Moves until nothing is left to do, looking at each state.
    pub(crate) fn run(&mut self, mut look: impl FnMut(&Server)) {
        for _ in 0..MAX_MOVES {
            if !self.step() {
                return;
            }
            look(&self.server);
        }
        panic!("it has no end; the queue: {:?}, later: {:?}", self.queue, self.later);
    }

    /// Makes so many moves, or fewer if nothing is left to do.
    pub(crate) fn run_for(&mut self, moves: usize, mut look: impl FnMut(&Server)) {
        for _ in 0..moves {
            if !self.step() {
                return;
            }
            look(&self.server);
        }
    }

    fn step(&mut self) -> bool {
        self.server.now = self.server.now.checked_add(TICK).unwrap();
        let now = self.server.now;
        let due: Vec<Key> =
            self.later.iter().filter(|(_, at)| **at <= now).map(|(key, _)| key.clone()).collect();
        for key in due {
            self.later.remove(&key);
            self.queue.insert(key);
        }
        let mut moves = self.moves();
        if moves.is_empty() {
            let Some(first) = self.later.values().min() else { return false };
            self.server.now = *first;
            return true;
        }
        let chosen = moves.swap_remove(self.random.usize(..moves.len()));
        self.make(chosen);
        true
    }

    fn moves(&self) -> Vec<Move> {
        let mut moves: Vec<Move> = (0..self.workers.len()).map(Move::Write).collect();
        moves.extend((0..self.asks.len()).map(Move::Answer));
        if !self.news.is_empty() {
            moves.push(Move::Hear);
        }
        if self.workers.len() < WORKERS {
            let is_free = |key: &&Key| !self.workers.iter().any(|(busy, _)| busy == *key);
            moves.extend(self.queue.iter().filter(is_free).cloned().map(Move::Begin));
        }
        let restless = self.server.restless.iter();
        moves.extend(restless.map(|(kind, name)| Move::Kubernetes(*kind, name.clone())));
        moves
    }

    fn make(&mut self, chosen: Move) {
        match chosen {
            Move::Hear => {
                if let Some(change) = self.news.pop_front() {
                    self.hear(change);
                }
            }
            Move::Begin(key) => self.begin(key),
            Move::Write(worker) => self.write(worker),
            Move::Answer(ask) => self.answer(ask),
            Move::Kubernetes(kind, name) => {
                let before = self.server.get(kind, &name).filter(|_| kind == Kind::Pod).cloned();
                let changes = self.server.advance(kind, &name);
                if let Some((before, now)) = before.zip(self.server.get(kind, &name)) {
                    self.answers.see(&before, now);
                }
                self.news.extend(changes);
            }
        }
    }

    fn begin(&mut self, key: Key) {
        self.queue.remove(&key);
        let plan = plan::observed(&self.observed, &key, GangScheduler::default(), self.server.now);
        let plan = match plan {
            Err(_) if self.refusing => {
                self.refused.insert(key);
                return;
            }
            plan => plan.unwrap(),
        };
        if let Some(at) = plan.again_at {
            self.later.insert(key.clone(), at);
        }
        for ask in plan.asks {
            if !self.asks.iter().any(|(_, asked)| asked.pod == ask.pod) {
                self.asks.push((key.clone(), ask));
            }
        }
        if !plan.steps.is_empty() {
            self.workers.push((key, plan.steps.into()));
        }
    }

    /// A pod answers, or the answer is lost.
    fn answer(&mut self, ask: usize) {
        let (key, ask) = self.asks.swap_remove(ask);
        let answer = self.answers.answer(&self.server, &ask);
        let is_lost = self.random.u8(..100) < self.failing;
        if let Some(answer) = answer.filter(|_| !is_lost)
            && self.observed.lock().take_answer(ask, answer)
        {
            self.queue.insert(key);
        }
        if self.killed_after_answer == Some(self.answers.given) {
            self.killed_after_answer = None;
            self.begin_anew();
        }
    }

    fn write(&mut self, worker: usize) {
        let (key, steps) = &mut self.workers[worker];
        let key = key.clone();
        let Some(step) = steps.pop_front() else { return };
        if steps.is_empty() {
            self.workers.swap_remove(worker);
        }
        if let plan::Action::Delete { kind: Kind::Instance, uid, .. } = &step.action {
            for pod in self.server.all(Kind::Pod) {
                let metadata = &pod["metadata"];
                if metadata["ownerReferences"][0]["uid"] == uid.as_str() {
                    self.answers.end(metadata["name"].as_str().unwrap(), metadata["uid"].as_str().unwrap());
                }
            }
        }
        let fails = self.random.u8(..100) < self.failing;
        // Either before the write was made, or before its answer arrived.
        let outcome = match fails && self.random.bool() {
            true => Err("the API server is overloaded".to_owned()),
            false => self.server.write(&step.action),
        };
        self.writes += 1;
        if let plan::Action::Delete { kind: Kind::Pod, name, uid } = &step.action {
            self.answers.end(name, uid);
            self.ended.insert(name.clone());
        }
        match outcome {
            Ok(changes) => {
                if let Some(answer) = changes.first().filter(|_| !fails) {
                    self.hear(answer.clone());
                }
                self.news.extend(changes);
                if fails {
                    self.give_up(key);
                }
            }
            Err(_) => self.give_up(key),
        }
        if self.killed_after == Some(self.writes) {
            self.begin_anew();
        }
    }

    fn give_up(&mut self, key: Key) {
        self.workers.retain(|(busy, _)| *busy != key);
        self.queue.insert(key);
    }
}
