//! CPU time of a planner with many deployments: `cargo bench -p moongate-planner --bench cpu -- --deployments 200 --seconds 60`.
//!
//! The API server and the gateways are scripted, in other threads of this process. What is printed is the CPU time of the planner's threads alone.
#![expect(clippy::print_stdout, reason = "a benchmark prints its result")]
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

mod scripted_servers;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moongate_planner::{PlanBoard, PlannerMetrics, PlannerOptions};
use moongate_runtime::{ClientTls, ClientTlsFiles, Supervisor};
use serde_json::json;

/// The same allocator as in the command.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Name of the planner's threads.
const PLANNER_THREAD: &str = "planner";
/// Time for the first lists of pods, before the measurement.
const WARMUP: Duration = Duration::from_secs(20);

fn argument(name: &str, default: u64) -> u64 {
    let arguments: Vec<String> = std::env::args().collect();
    let position = arguments.iter().position(|argument| argument == name);
    position.map_or(default, |position| arguments[position + 1].parse().unwrap())
}

fn main() {
    let (deployments, seconds) = (argument("--deployments", 200), argument("--seconds", 60));
    let folder = tempfile::tempdir().unwrap();
    let port = scripted_servers::start();
    write_files(folder.path(), port, deployments);
    let metrics = Arc::<PlannerMetrics>::default();
    let supervisor = Supervisor::new();
    let planner = start_planner(folder.path(), Arc::clone(&metrics), supervisor.clone());
    std::thread::sleep(WARMUP);
    let (cpu_before, steps_before, started) = (cpu_time(), steps(&metrics), Instant::now());
    std::thread::sleep(Duration::from_secs(seconds));
    let (cpu, steps, took) = (cpu_time() - cpu_before, steps(&metrics) - steps_before, started.elapsed());
    supervisor.token().cancel();
    planner.join().unwrap();
    let share = cpu.as_secs_f64() / took.as_secs_f64();
    let per_step = cpu.as_secs_f64() / steps * 1e6;
    println!(
        "{deployments} deployments, {steps} steps in {:.0} s: {:.2} % of a core, {per_step:.0} µs per step",
        took.as_secs_f64(),
        share * 100.0
    );
}

fn write_files(folder: &Path, port: u16, deployments: u64) {
    let server = format!("http://127.0.0.1:{port}");
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "c", "cluster": { "server": server } }],
        "users": [{ "name": "u", "user": {} }],
        "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        "current-context": "c",
    });
    fs::write(folder.join("kubeconfig"), kubeconfig.to_string()).unwrap();
    let deployments: Vec<_> = (0..deployments)
        .map(|index| {
            let role = json!({ "max": 16, "first_tokens_per_s": 5000 });
            json!({
                "name": format!("model-{index}"),
                "namespace": "models",
                "gateways": [format!("{server}/gateways/{index}/metrics")],
                "scale": {
                    "prefill": format!("deployments.v1.apps/model-{index}-prefill"),
                    "decode": format!("deployments.v1.apps/model-{index}-decode"),
                },
                "settings": { "prefill": role, "decode": role },
            })
        })
        .collect();
    fs::write(folder.join("deployments.yaml"), json!({ "deployments": deployments }).to_string()).unwrap();
}

/// On one thread, as the command.
fn start_planner(
    folder: &Path,
    metrics: Arc<PlannerMetrics>,
    supervisor: Supervisor,
) -> std::thread::JoinHandle<()> {
    let options = PlannerOptions {
        kubeconfig: Some(folder.join("kubeconfig")),
        deployments: folder.join("deployments.yaml"),
        own_namespace: "planner".to_owned(),
        dry_run: false,
        gateway_tls: ClientTls::load(ClientTlsFiles::default()).unwrap(),
        metrics,
        plans: Arc::<PlanBoard>::default(),
    };
    let run = move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().thread_name(PLANNER_THREAD).build();
        runtime.unwrap().block_on(moongate_planner::run(options, &supervisor)).unwrap();
    };
    std::thread::Builder::new().name(PLANNER_THREAD.to_owned()).spawn(run).unwrap()
}

/// CPU time of the planner's threads so far.
fn cpu_time() -> Duration {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let of_planner = tasks.filter(|task| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == PLANNER_THREAD)
    });
    let nanoseconds = of_planner.map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(|nanoseconds| nanoseconds.parse().ok()).unwrap_or(0)
    });
    Duration::from_nanos(nanoseconds.sum())
}

/// Decisions so far.
fn steps(metrics: &PlannerMetrics) -> f64 {
    let text = metrics.text();
    let samples = text.lines().filter(|line| {
        line.starts_with("moongate_planner_steps_total{") && line.contains("outcome=\"decided\"")
    });
    samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
