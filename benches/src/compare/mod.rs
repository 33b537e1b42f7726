//! Compares gateways under the same load, in interleaved rounds.

mod child;
mod gateways;
mod rounds;
mod scenarios;
mod table;
mod targets;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use child::BenchEnvironment;
use gateways::{BenchGateway, BenchGatewayKind};
use rounds::{BenchPlan, BenchRun};
use scenarios::{SCENARIOS, Scenario};

/// Command-line arguments of `gateway-bench compare`.
#[derive(Debug, Args)]
pub(crate) struct BenchCompareArgs {
    /// Path of the moongate binary to measure.
    #[arg(long, value_name = "FILE")]
    moongate: Option<PathBuf>,

    /// Folder of a tokenizer with which Moongate predicts cache hits, as by default. Without it, Moongate is only measured with
    /// the policy `least_load`, which needs no predictions.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,

    /// The smg binary, measured with two policies.
    #[arg(long, value_name = "FILE")]
    smg: Option<PathBuf>,

    /// Number of rounds; each restarts and measures every gateway, in another order.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,

    /// Measurements of every gateway per round. With more than one, all gateways run at the same time and are measured
    /// in turn: on a machine whose speed drifts, many short alternating measurements determine a ratio faster than a
    /// few long ones.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,

    /// Run only this scenario. Repeatable.
    #[arg(long, value_name = "SCENARIO", value_parser = SCENARIOS.map(|scenario| scenario.name))]
    only: Vec<String>,

    /// Measured time of each run in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    seconds: f64,

    /// CPU core for the gateway.
    #[arg(long, value_name = "N", default_value_t = 0)]
    gateway_cpu: u32,

    /// CPU core for engines and load generator.
    #[arg(long, value_name = "N", default_value_t = 1)]
    load_cpu: u32,

    /// Write every run to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Omit the baselines: engines without a gateway, and nginx where it is installed.
    #[arg(long)]
    no_baselines: bool,

    /// Measure Moongate a second time with this share of requests traced, and report the cost of tracing.
    #[arg(long, value_name = "RATIO")]
    traces: Option<f64>,

    /// Additional flag for the moongate gateway, as one word. Repeatable.
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    moongate_flag: Vec<String>,
}

pub(crate) async fn run(options: BenchCompareArgs) -> anyhow::Result<()> {
    let gateways = gateways(&options).await?;
    ensure!(
        (0.1..=600.0).contains(&options.seconds),
        "--seconds {} is not within 0.1 and 600",
        options.seconds
    );
    let scenarios: Vec<&Scenario> = SCENARIOS
        .iter()
        .filter(|scenario| options.only.is_empty() || options.only.iter().any(|only| only == scenario.name))
        .collect();
    let environment = bench_environment(&options)?;
    let plan = BenchPlan { rounds: options.rounds, repeats: options.repeats, seconds: options.seconds };
    let mut terminate = signal(SignalKind::terminate())?;
    // Dropping the measurement kills every process it has started.
    let runs = tokio::select! {
        runs = rounds::measure(&gateways, &scenarios, &environment, plan) => runs?,
        _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        _ = terminate.recv() => bail!("terminated"),
    };
    if let Some(path) = &options.json {
        std::fs::write(path, json_document(&gateways, &runs, &options).to_string() + "\n")
            .with_context(|| format!("{}", path.display()))?;
    }
    let mut out = std::io::stdout();
    write!(out, "{}", table::markdown(&gateways, &scenarios, &runs))?;
    write!(out, "{}", targets::target_lines(&gateways, &runs))?;
    Ok(())
}

async fn gateways(options: &BenchCompareArgs) -> anyhow::Result<Vec<BenchGateway>> {
    let mut gateways = Vec::new();
    if let Some(path) = &options.moongate {
        let flags = options.moongate_flag.clone();
        let path = canonical_path(path)?;
        let kind = |traces, tokenizer| BenchGatewayKind::Moongate {
            path: path.clone(),
            flags: flags.clone(),
            trace_ratio: traces,
            tokenizer,
        };
        if let Some(tokenizer) = &options.tokenizer {
            gateways.push(BenchGateway::new("moongate", kind(None, Some(canonical_path(tokenizer)?))).await);
        }
        gateways.push(BenchGateway::new("moongate least_load", kind(None, None)).await);
        if let Some(ratio) = options.traces {
            gateways
                .push(BenchGateway::new(&format!("moongate, {ratio} traced"), kind(Some(ratio), None)).await);
        }
    }
    if let Some(path) = &options.smg {
        for policy in ["cache_aware", "round_robin"] {
            let kind = BenchGatewayKind::Smg { path: canonical_path(path)?, policy };
            gateways.push(BenchGateway::new(&format!("smg {policy}"), kind).await);
        }
    }
    if !options.no_baselines {
        if let Some(path) = child::find_on_path("nginx") {
            gateways.push(BenchGateway::new("nginx (no PD)", BenchGatewayKind::Nginx { path }).await);
        }
        gateways.push(BenchGateway::new("no gateway", BenchGatewayKind::EngineOnly).await);
    }
    ensure!(!gateways.is_empty(), "nothing to measure; give --moongate or --smg");
    Ok(gateways)
}

fn canonical_path(path: &Path) -> anyhow::Result<PathBuf> {
    path.canonicalize().with_context(|| format!("{} is not there; build or install it first", path.display()))
}

fn bench_environment(options: &BenchCompareArgs) -> anyhow::Result<BenchEnvironment> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let taskset = child::find_on_path("taskset").filter(|_| cores > 1);
    if taskset.is_none() {
        let mut out = std::io::stderr();
        writeln!(out, "note: one core or no taskset: nothing is pinned, and the numbers include contention")?;
    }
    Ok(BenchEnvironment {
        taskset,
        gateway_cpu: options.gateway_cpu,
        load_cpu: options.load_cpu,
        // Tracing costs less than waking sleeping peers, which a slower gateway has to do more often.
        busy_poll: options.traces.is_some(),
        scratch: tempfile::tempdir().context("no folder for logs")?,
    })
}

fn json_document(
    gateways: &[BenchGateway],
    runs: &[BenchRun],
    options: &BenchCompareArgs,
) -> serde_json::Value {
    let runs: Vec<_> = runs
        .iter()
        .map(|run| {
            let (report, failure) = match &run.outcome {
                Ok(report) => (Some(report), None),
                Err(failure) => (None, Some(format!("{failure:#}"))),
            };
            json!({
                "round": run.round, "gateway": run.gateway, "scenario": run.scenario,
                "report": report, "failure": failure,
            })
        })
        .collect();
    let versions: serde_json::Map<_, _> =
        gateways.iter().map(|gateway| (gateway.name.clone(), gateway.version.clone().into())).collect();
    json!({
        "machine": table::machine(), "versions": versions, "rounds": options.rounds, "repeats": options.repeats,
        "seconds": options.seconds,
        "runs": runs,
    })
}
