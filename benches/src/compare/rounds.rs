//! The measurement itself.

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::child::{self, Places};
use super::gateways::{Engines, Gateway, Running};
use super::scenarios::{IDLE, Scenario};
use crate::procfs;

/// One scenario on one gateway, once.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) round: u32,
    pub(super) gateway: String,
    pub(super) scenario: &'static str,
    /// The report, or why there is none. A run with errors has none.
    pub(super) outcome: Result<Value, String>,
}

/// Every gateway through every scenario, `rounds` times. Fails only if the mock engines do.
pub(super) async fn measure(
    gateways: &[Gateway],
    scenarios: &[&Scenario],
    places: &Places,
    rounds: u32,
    seconds: f64,
) -> anyhow::Result<Vec<Run>> {
    let engines = Engines::start(places).await?;
    let mut runs = Vec::new();
    for round in 0..rounds {
        for turn in 0..gateways.len() {
            // Another gateway begins each round, so that a drift of the machine meets all alike.
            let gateway = &gateways[(turn + round as usize) % gateways.len()];
            let outcomes = one_gateway(gateway, &engines, scenarios, places, seconds).await;
            engines.pid()?;
            let outcomes = outcomes.unwrap_or_else(|error| {
                scenarios.iter().map(|scenario| (scenario.name, Err(format!("{error:#}")))).collect()
            });
            for (scenario, outcome) in outcomes {
                progress(round, &gateway.name, scenario, &outcome)?;
                runs.push(Run { round, gateway: gateway.name.clone(), scenario, outcome });
            }
        }
    }
    Ok(runs)
}

type Outcomes = Vec<(&'static str, Result<Value, String>)>;

async fn one_gateway(
    gateway: &Gateway,
    engines: &Engines,
    scenarios: &[&Scenario],
    places: &Places,
    seconds: f64,
) -> anyhow::Result<Outcomes> {
    let mut running = Running::start(gateway, engines, places).await?;
    let mut outcomes = Outcomes::new();
    for scenario in scenarios {
        let outcome = one_run(&mut running, engines, scenario, places, seconds).await;
        outcomes.push((scenario.name, outcome.map_err(|error| format!("{error:#}"))));
    }
    if let Some(server) = running.server.take() {
        server.stop().await?;
    }
    Ok(outcomes)
}

async fn one_run(
    running: &mut Running,
    engines: &Engines,
    scenario: &Scenario,
    places: &Places,
    seconds: f64,
) -> anyhow::Result<Value> {
    let pid = match &mut running.server {
        Some(server) => {
            server.check()?;
            Some(server.pid()?)
        }
        None => None,
    };
    if scenario.name == IDLE {
        let rss = procfs::rss_kib(pid.unwrap_or(engines.pid()?))?;
        return Ok(json!({"rss_after_mb": rss as f64 * 1024.0 / 1e6}));
    }
    let mut command = places.command(places.load_cpu, &std::env::current_exe()?);
    command.args(["load", "--port", &running.port.to_string(), "--duration", &seconds.to_string()]);
    command.args(scenario.load);
    command.args(places.awake.then_some("--awake"));
    match pid {
        Some(pid) => command.args(["--pid", &pid.to_string(), "--engine-pid", &engines.pid()?.to_string()]),
        None => command.args(["--pid", &engines.pid()?.to_string()]),
    };
    let output = child::output(command, Duration::from_secs_f64(seconds) + Duration::from_secs(60)).await?;
    if !output.status.success() {
        bail!("the load generator failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let report: Value = serde_json::from_slice(&output.stdout).context("the load generator's report")?;
    let errors = report["errors"].as_u64().unwrap_or(u64::MAX);
    let requests = report["requests"].as_u64().unwrap_or(0);
    ensure!(errors == 0, "{errors} errors beside {requests} answers; the first: {}", report["error_example"]);
    ensure!(requests > 0, "no answer in the measured time");
    Ok(report)
}

fn progress(
    round: u32,
    gateway: &str,
    scenario: &str,
    outcome: &Result<Value, String>,
) -> anyhow::Result<()> {
    let mut out = std::io::stderr();
    match outcome {
        Ok(report) => {
            let told = ["cpu_us_per_request", "cpu_us_per_chunk", "p50_us", "rss_after_mb", "foreign_cores"];
            let told: Vec<String> = told
                .iter()
                .filter(|key| report[**key].is_number())
                .map(|key| format!("{key} {:.2}", report[*key].as_f64().unwrap_or(f64::NAN)))
                .collect();
            writeln!(out, "round {round} {gateway}, {scenario}: {}", told.join(", "))?;
        }
        Err(failure) => writeln!(out, "round {round} {gateway}, {scenario}: FAILED: {failure}")?,
    }
    Ok(())
}
