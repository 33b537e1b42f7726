//! Cost of many groups: time, requests, CPU and memory of an operator on a real control plane, with a kubelet that runs no
//! containers.
//!
//! `cargo bench -p moongate-operator --bench scale -- --groups 20 -- "$PWD"/target/release/moongate operator`
//!
//! Any controller manager for RoleBasedGroups can be measured: the command after the second `--` is started with
//! `KUBECONFIG` set. Cargo runs the benchmark in the crate's folder, so use absolute paths.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a tool for a person at a terminal")]

mod cluster;
mod group_watcher;
mod process;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use futures_util::{StreamExt as _, stream};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use cluster::{BenchCluster, MethodCounts};
use group_watcher::{GroupWatcher, ObservedGroup};
use process::ProcessStats;

/// Maximum number of concurrent requests of this program.
const CALLERS: usize = 4;
/// Time without requests after which the operator counts as idle.
const QUIET: Duration = Duration::from_secs(3);

/// Creates groups of two roles, changes their images in place, and deletes them.
#[derive(Debug, Parser)]
struct ScaleBenchArgs {
    /// Number of groups to create
    #[arg(long, default_value_t = 20)]
    groups: usize,
    /// Number of pods of each group's two roles
    #[arg(long, value_name = "NUMBER,NUMBER", value_delimiter = ',', num_args = 2, default_value = "2,2")]
    pods: Vec<usize>,
    /// Folder of CRDs to install without conversion. Default: ours
    #[arg(long)]
    crds: Option<PathBuf>,
    /// Metrics address of the operator as `host:port`, to report durations of reconciliations
    #[arg(long)]
    metrics: Option<String>,
    /// Log file for the operator's output
    #[arg(long, default_value = "/dev/null")]
    log: PathBuf,
    /// Duration of the idle measurement, in seconds
    #[arg(long, default_value_t = 20)]
    idle: u64,
    /// Timeout of each step, in seconds
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// Command line of the operator
    #[arg(last = true, required = true)]
    program: Vec<String>,
}

fn main() {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    // Cargo appends `--bench`, which is no argument of the operator.
    words.pop_if(|last| last == "--bench");
    let arguments = ScaleBenchArgs::parse_from(words);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(measure(&arguments));
}

struct ScaleBench<'a> {
    cluster: BenchCluster,
    groups: Api<RoleBasedGroup>,
    watcher: GroupWatcher,
    process: ProcessStats,
    arguments: &'a ScaleBenchArgs,
}

async fn measure(arguments: &ScaleBenchArgs) {
    let cluster = BenchCluster::start(arguments.crds.as_deref()).await;
    let watcher = GroupWatcher::follow(&cluster.namespace.client, arguments.pods.iter().sum());
    let (mut running, process) = ProcessStats::start(&arguments.program, &cluster.operator, &arguments.log);
    let groups = Api::default_namespaced(cluster.namespace.client.clone());
    let bench = ScaleBench { cluster, groups, watcher, process, arguments };
    tokio::select! {
        () = run_scenario(bench, arguments) => {}
        status = running.wait() => println!("the operator has exited: {status}; see {}", arguments.log.display()),
    }
}

async fn run_scenario(mut bench: ScaleBench<'_>, arguments: &ScaleBenchArgs) {
    // When the first group is ready, all kinds have been listed. The group stays.
    bench.make(&["first".to_owned()]).await;
    bench.wait_for_groups(&["first".to_owned()], &[("", is_ready)]).await;
    bench.wait_until_quiet().await;

    let names: Vec<String> = (0..arguments.groups).map(|index| format!("g{index}")).collect();
    let pods: Vec<String> = arguments.pods.iter().map(usize::to_string).collect();
    println!("{} groups of {} pods; {}", names.len(), pods.join(" and "), arguments.program.join(" "));
    bench
        .step("make", &names, async |bench| {
            bench.make(&names).await;
            bench.wait_for_groups(&names, &[("ready", is_ready), ("reports ready", reports_ready)]).await;
        })
        .await;
    bench.idle().await;
    bench
        .step("change images in place", &names, async |bench| {
            bench.change(&names).await;
            bench
                .wait_for_groups(&names, &[("updated", is_updated), ("reports updated", reports_updated)])
                .await;
        })
        .await;
    bench.idle().await;
    bench.step("delete", &names, async |bench| bench.end(&names).await).await;
    bench.reconciles();
}

fn is_ready(group: &ObservedGroup, pods: usize) -> bool {
    group.pods.len() == pods && group.pods.values().all(|pod| pod.is_ready)
}

fn reports_ready(group: &ObservedGroup, _: usize) -> bool {
    group.status.is_current && group.status.is_ready
}

fn is_updated(group: &ObservedGroup, pods: usize) -> bool {
    is_ready(group, pods) && group.pods.values().all(|pod| pod.image == NEW)
}

fn reports_updated(group: &ObservedGroup, pods: usize) -> bool {
    reports_ready(group, pods) && group.status.generation > 1 && group.status.updated == pods
}

/// A predicate on groups with this number of pods, and its name. Without a name it is not reported.
type GroupPredicate<'a> = (&'a str, fn(&ObservedGroup, usize) -> bool);

const OLD: &str = "engine:1";
const NEW: &str = "engine:2";

fn spec(image: &str, pods: &[usize]) -> Value {
    // No scheduler has that name: the kubelet binds the pods.
    let pod = json!({ "schedulerName": "none", "terminationGracePeriodSeconds": 1,
        "containers": [{ "name": "engine", "image": image }] });
    let role = |(name, replicas): (&str, &usize)| {
        json!({ "name": name, "replicas": replicas,
        "standalonePattern": { "template": { "spec": pod } } })
    };
    let roles: Vec<Value> = ["prefill", "decode"].into_iter().zip(pods).map(role).collect();
    json!({ "roles": roles })
}

impl ScaleBench<'_> {
    async fn step(&mut self, what: &str, names: &[String], act: impl AsyncFnOnce(&mut Self)) {
        let (requests, cpu) = (self.cluster.requests(), self.process.cpu());
        let started = Instant::now();
        act(self).await;
        let took = started.elapsed();
        self.wait_until_quiet().await;
        let requests = self.cluster.requests() - requests;
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let each = requests.total() as f64 / names.len() as f64;
        println!("{what}: {:.1} s; {each:.1} requests per group ({requests})", took.as_secs_f64());
        let (now, most) = self.process.memory();
        let cpu = self.process.cpu() - cpu;
        println!("  CPU {:.2} s, RSS {now:.1} MB, peak {most:.1} MB", cpu.as_secs_f64());
    }

    async fn make(&self, names: &[String]) {
        stream::iter(names)
            .for_each_concurrent(CALLERS, async |name| {
                let group = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
                "metadata": { "name": name }, "spec": spec(OLD, &self.arguments.pods) });
                let group = serde_json::from_value(group).unwrap();
                self.groups.create(&PostParams::default(), &group).await.unwrap();
            })
            .await;
    }

    async fn change(&self, names: &[String]) {
        let body = Patch::Merge(json!({ "spec": spec(NEW, &self.arguments.pods) }));
        stream::iter(names)
            .for_each_concurrent(CALLERS, async |name| {
                self.groups.patch(name, &PatchParams::default(), &body).await.unwrap();
            })
            .await;
    }

    /// Deletes the groups and waits until no pod exists.
    async fn end(&mut self, names: &[String]) {
        stream::iter(names)
            .for_each_concurrent(CALLERS, async |name| {
                self.groups.delete(name, &DeleteParams::background()).await.unwrap();
            })
            .await;
        self.wait_for_groups(names, &[("no pods", |group: &ObservedGroup, _| group.pods.is_empty())]).await;
    }

    /// Waits until all groups fulfil the predicates. Reports the times of the median and the last group.
    async fn wait_for_groups(&mut self, names: &[String], wanted: &[GroupPredicate<'_>]) {
        let limit = Duration::from_secs(self.arguments.limit);
        let wants: Vec<_> = wanted.iter().map(|(_, want)| *want).collect();
        for ((what, _), mut times) in wanted.iter().zip(self.watcher.reached(names, &wants, limit).await) {
            times.sort();
            let (Some(half), Some(last)) = (times.get(times.len() / 2), times.last()) else { continue };
            if !what.is_empty() {
                let seconds = [half, last].map(Duration::as_secs_f64);
                println!("  {what}: p50 {:.1} s, last {:.1} s", seconds[0], seconds[1]);
            }
        }
    }

    async fn wait_until_quiet(&self) {
        let mut before = self.cluster.audit_log_length();
        loop {
            tokio::time::sleep(QUIET).await;
            let now = self.cluster.audit_log_length();
            if now == before {
                return;
            }
            before = now;
        }
    }

    async fn idle(&self) {
        let before = self.cluster.requests();
        let cpu = self.process.cpu();
        tokio::time::sleep(Duration::from_secs(self.arguments.idle)).await;
        let requests: MethodCounts = self.cluster.requests() - before;
        let cpu = self.process.cpu() - cpu;
        println!(
            "  idle for {} s: {} requests, CPU {:.3} s",
            self.arguments.idle,
            requests.total(),
            cpu.as_secs_f64()
        );
    }

    /// Prints the durations that the operator's metrics report.
    fn reconciles(&self) {
        let Some(address) = &self.arguments.metrics else { return };
        print!("{}", process::durations(&process::scrape(address)));
    }
}
