//! Planning time of the operator among many groups, without an API server: all of it is the operator's own time.
//!
//! `cargo bench -p moongate-operator --bench plans -- --groups 1000`
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a tool for a person at a terminal")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use clap::Parser;
use k8s_openapi::jiff::Timestamp;
use moongate_operator::ResourceKind;
use moongate_operator::forecast::{ResourceChange, SimulatedApiServer};
use moongate_operator::plan::{PlanSettings, plan_for};
use moongate_operator::resource_cache::{ResourceCache, ResourceKey};
use serde_json::{Value, json};

/// Creates groups of two roles with three pods in memory, and changes their images in place.
#[derive(Debug, Parser)]
struct PlansBenchArgs {
    /// Number of groups to create in memory
    #[arg(long, default_value_t = 1000)]
    groups: usize,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() {
    let groups = PlansBenchArgs::parse().groups;
    let mut bench = PlansBench {
        server: SimulatedApiServer::new(Timestamp::UNIX_EPOCH),
        observed: ResourceCache::default(),
        queue: VecDeque::new(),
        queued: BTreeSet::new(),
        scheduled: BTreeMap::new(),
        reconcile_times: Vec::new(),
        writes: 0,
    };
    bench.step("make", groups, |server, name| {
        let metadata = json!({ "name": name });
        server.create(ResourceKind::Group, json!({ "metadata": metadata, "spec": spec("engine:1") }))
    });
    bench.step("change images in place", groups, |server, name| {
        let mut group = server.get(ResourceKind::Group, name).unwrap().clone();
        group["spec"] = spec("engine:2");
        server.put(ResourceKind::Group, group)
    });
}

fn spec(image: &str) -> Value {
    let pod = json!({ "containers": [{ "name": "engine", "image": image }] });
    let role = |name: &str, replicas: i32| {
        json!({ "name": name, "replicas": replicas,
        "standalonePattern": { "template": { "spec": pod } } })
    };
    json!({ "roles": [role("prefill", 2), role("decode", 1)] })
}

struct PlansBench {
    server: SimulatedApiServer,
    observed: ResourceCache,
    queue: VecDeque<ResourceKey>,
    queued: BTreeSet<ResourceKey>,
    scheduled: BTreeMap<ResourceKey, Timestamp>,
    /// Durations of reconciliations: planning, and updating the cache with the responses of writes.
    reconcile_times: Vec<Duration>,
    writes: usize,
}

impl PlansBench {
    fn step(
        &mut self,
        what: &str,
        groups: usize,
        act: impl Fn(&mut SimulatedApiServer, &str) -> ResourceChange,
    ) {
        let changes = (0..groups).map(|index| act(&mut self.server, &format!("g{index}"))).collect();
        self.apply_changes(changes);
        self.run_until_idle();
        self.reconcile_times.sort();
        let total: Duration = self.reconcile_times.iter().sum();
        let at = |percent: usize| {
            self.reconcile_times[(self.reconcile_times.len() - 1) * percent / 100].as_secs_f64() * 1e3
        };
        let (looks, writes) = (self.reconcile_times.len(), self.writes);
        println!(
            "{what} {groups}: {looks} looks, {writes} writes, {:.2} s; p50 {:.2} ms, p99 {:.2} ms, most {:.2} ms",
            total.as_secs_f64(),
            at(50),
            at(99),
            at(100)
        );
        self.reconcile_times.clear();
        self.writes = 0;
    }

    /// Kubernetes acts when the operator is idle, and time advances when both are idle.
    fn run_until_idle(&mut self) {
        loop {
            if let Some(key) = self.queue.pop_front() {
                self.queued.remove(&key);
                self.reconcile(&key);
            } else if let Some((kind, name)) = self.server.unsettled.first().cloned() {
                let changes = self.server.advance(kind, &name);
                self.apply_changes(changes);
            } else if let Some((key, due)) = self.scheduled.pop_first() {
                self.server.now = self.server.now.max(due);
                self.push(key);
            } else {
                return;
            }
        }
    }

    fn reconcile(&mut self, key: &ResourceKey) {
        let started = Instant::now();
        let snapshot = self.observed.snapshot(key, self.server.now).unwrap();
        let plan = plan_for(&snapshot, PlanSettings::default(), self.server.now).unwrap();
        let mut took = started.elapsed();
        if let Some(at) = plan.requeue_at {
            self.scheduled.insert(key.clone(), at);
        }
        for step in &plan.steps {
            self.writes += 1;
            let changes = self.server.write(&step.action).unwrap();
            took += self.apply_changes(changes);
        }
        self.reconcile_times.push(took);
    }

    fn apply_changes(&mut self, changes: Vec<ResourceChange>) -> Duration {
        let mut took = Duration::ZERO;
        for change in changes {
            let ResourceChange::Present(kind, object) = change else { continue };
            let object = serde_json::from_value(object).unwrap();
            let started = Instant::now();
            let concerns = self.observed.upsert(kind, object);
            took += started.elapsed();
            concerns.into_iter().for_each(|key| self.push(key));
        }
        took
    }

    fn push(&mut self, key: ResourceKey) {
        if self.queued.insert(key.clone()) {
            self.queue.push_back(key);
        }
    }
}
