//! The operator's plans on API objects in memory, during load: a group of the engines is created, and then updated pod
//! by pod. An engine runs while its pod is ready.
//!
//! Plans, their observations, and writes are the operator's own code; the API server and the kubelet are those of its
//! forecasts. Depending on the seed, watches are late, writes fail or lose their responses, and the operator is
//! restarted.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator::plan::{PlanStep, WriteAction};
use moongate_operator_testkit::{OperatorSimulation, is_ready};
use moongate_runtime::net::simulated::record;
use serde_json::{Value, json};

use crate::plan::{PAIRS, SimulatedHost};
use crate::report::{count, violation};

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
    operator: OperatorSimulation,
    is_updated: bool,
    /// The engine that each pod represents.
    engines: BTreeMap<String, SimulatedHost>,
}

impl SimulatedCluster {
    /// A cluster with the engines' group, whose pods are ready.
    pub(crate) fn new(seed: u64) -> Self {
        let server = SimulatedApiServer::new(Timestamp::from_second(EPOCH).unwrap_or_default());
        let mut operator = OperatorSimulation::new(server, seed ^ 0x0bed);
        operator.container_start_time = CONTAINER_START_TIME;
        operator.allow_invalid = true;
        operator.on_write = record_write;
        let group = json!({ "metadata": { "name": "g" }, "spec": { "roles": roles("i:1") } });
        operator.create(ResourceKind::Group, group);
        let mut cluster = Self { operator, is_updated: false, engines: BTreeMap::new() };
        cluster.run_until_idle();
        cluster.assign_engines();
        let operator = &mut cluster.operator;
        operator.write_failure_percent = operator.random.u8(..30);
        operator.kills_per_mille = operator.random.u16(..20);
        cluster
    }

    /// Whether an engine's pod is down.
    pub(crate) fn is_down(&self, host: SimulatedHost) -> bool {
        let mut pods = self.engines.iter().filter(|(_, engine)| **engine == host);
        !pods.any(|(pod, _)| self.operator.server.get(ResourceKind::Pod, pod).is_some_and(is_ready))
    }

    /// Runs one step, at a time since the start.
    pub(crate) fn step(&mut self, now: Duration) {
        let start = Timestamp::from_second(EPOCH).unwrap_or_default();
        self.operator.server.now = self.operator.server.now.max(start.checked_add(now).unwrap_or(start));
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
        let group = self.operator.server.get(ResourceKind::Group, "g").cloned().unwrap_or_default();
        let settled = group["status"]["observedGeneration"] == group["metadata"]["generation"]
            && condition(&group, "Ready") == Some("True")
            && condition(&group, "RollingUpdateInProgress") == Some("False");
        let pods = self.operator.server.all(ResourceKind::Pod);
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
        self.operator.edit(ResourceKind::Group, "g", |group| group["spec"]["roles"] = roles("i:2"));
        record(format_args!("the group is updated"));
        count("updates");
    }

    /// Runs steps until nothing is left to do.
    fn run_until_idle(&mut self) {
        for _ in 0..MAX_STEPS {
            let now = self.operator.server.now;
            self.operator.server.now = now.checked_add(TICK).unwrap_or(now);
            if !self.advance() {
                match self.operator.next_due() {
                    Some(next) => self.operator.server.now = next,
                    None => return,
                }
            }
        }
        violation("operator converges", &format!("no convergence; queue: {:?}", self.operator.queue));
    }

    /// Takes a step, if there is one.
    fn advance(&mut self) -> bool {
        let kills = self.operator.kills;
        let is_busy = self.operator.step();
        if self.operator.kills > kills {
            count("operator-restarts");
        }
        while let Some((key, error)) = self.operator.invalid.pop_first() {
            violation("operator converges", &format!("no plan for {key:?}: {error}"));
        }
        if is_busy {
            self.check_invariants();
        }
        is_busy
    }

    /// Checks the invariants after every step.
    fn check_invariants(&mut self) {
        if !self.is_updated {
            return;
        }
        self.assign_engines();
        let pods: Vec<&Value> = self.operator.server.all(ResourceKind::Pod).collect();
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
        self.engines.retain(|name, _| self.operator.server.get(ResourceKind::Pod, name).is_some());
        for pod in self.operator.server.all(ResourceKind::Pod) {
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

fn record_write(step: &PlanStep) {
    record(format_args!("operator: {} ({})", name(&step.action), step.reason));
    count("operator-writes");
}

fn name(action: &WriteAction) -> String {
    match action {
        WriteAction::Apply(manifest) => format!("apply {}", manifest.name()),
        WriteAction::Create(manifest) => format!("create {}", manifest.name()),
        WriteAction::Replace { kind, name, .. } => format!("replace {} {name}", kind.name()),
        WriteAction::Patch { kind, name, .. } => format!("patch {} {name}", kind.name()),
        WriteAction::Delete { kind, name, .. } => format!("delete {} {name}", kind.name()),
        WriteAction::ForceDelete { name, .. } => format!("force-delete Pod {name}"),
    }
}
