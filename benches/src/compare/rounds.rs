//! Runs the scenarios on the gateways in rounds.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::child::{self, BenchEnvironment};
use super::gateways::{BenchGateway, MockEngineProcess, StartedGateway};
use super::scenarios::{IDLE, Scenario};
use crate::procfs;

/// Why a gateway could not be started or measured; all its runs share it.
pub(super) type BenchFailure = Arc<anyhow::Error>;

/// One run of one scenario on one gateway.
#[derive(Debug)]
pub(super) struct BenchRun {
    pub(super) round: u32,
    pub(super) gateway: String,
    pub(super) scenario: &'static str,
    /// The report, or the reason why there is none. A run with errors has none.
    pub(super) outcome: Result<Value, BenchFailure>,
}

/// Number and duration of measurements.
#[derive(Debug, Clone, Copy)]
pub(super) struct BenchPlan {
    /// How often every gateway is started.
    pub(super) rounds: u32,
    /// Measurements per start. With more than one, all gateways run at the same time and are measured in turn.
    pub(super) repeats: u32,
    pub(super) seconds: f64,
}

/// Measures every gateway with every scenario as planned. Fails only if the mock engines fail, or if a gateway cannot
/// be stopped.
pub(super) async fn measure(
    gateways: &[BenchGateway],
    scenarios: &[&Scenario],
    environment: &BenchEnvironment,
    plan: BenchPlan,
) -> anyhow::Result<Vec<BenchRun>> {
    let engines = MockEngineProcess::start(environment).await?;
    let mut runs = Vec::new();
    for start in 0..plan.rounds {
        // The order rotates, so that a drift of the machine affects all gateways equally.
        let mut order: Vec<&BenchGateway> = gateways.iter().collect();
        order.rotate_left(start as usize % gateways.len());
        let together = if plan.repeats > 1 { order.len() } else { 1 };
        for gateways in order.chunks(together) {
            let mut interleaved =
                InterleavedGateways { engines: &engines, environment, plan, start, running: Vec::new() };
            interleaved.start(gateways).await;
            for scenario in scenarios {
                interleaved.measure_scenario(scenario, &mut runs).await?;
            }
            interleaved.stop().await?;
        }
    }
    Ok(runs)
}

/// Gateways that run at the same time and are measured in turn.
struct InterleavedGateways<'a> {
    engines: &'a MockEngineProcess,
    environment: &'a BenchEnvironment,
    plan: BenchPlan,
    /// Number of the round, from 0.
    start: u32,
    /// A gateway that could not be started has the error instead.
    running: Vec<(&'a BenchGateway, Result<StartedGateway, BenchFailure>)>,
}

impl<'a> InterleavedGateways<'a> {
    async fn start(&mut self, gateways: &[&'a BenchGateway]) {
        for gateway in gateways {
            let running = StartedGateway::start(gateway, self.engines, self.environment).await;
            self.running.push((gateway, running.map_err(Arc::new)));
        }
    }

    async fn measure_scenario(
        &mut self,
        scenario: &Scenario,
        runs: &mut Vec<BenchRun>,
    ) -> anyhow::Result<()> {
        for repeat in 0..self.plan.repeats {
            let round = self.start * self.plan.repeats + repeat;
            for (gateway, running) in &mut self.running {
                let outcome = match running {
                    Ok(running) => {
                        one_run(running, self.engines, scenario, self.environment, self.plan.seconds)
                            .await
                            .map_err(Arc::new)
                    }
                    Err(failure) => Err(Arc::clone(failure)),
                };
                self.engines.pid()?;
                print_progress(round, &gateway.name, scenario.name, &outcome)?;
                runs.push(BenchRun {
                    round,
                    gateway: gateway.name.clone(),
                    scenario: scenario.name,
                    outcome,
                });
            }
            // Reverse the order for the next repetition.
            self.running.reverse();
        }
        Ok(())
    }

    async fn stop(self) -> anyhow::Result<()> {
        for server in self.running.into_iter().filter_map(|(_, running)| running.ok()?.server) {
            server.stop().await?;
        }
        Ok(())
    }
}

async fn one_run(
    running: &mut StartedGateway,
    engines: &MockEngineProcess,
    scenario: &Scenario,
    environment: &BenchEnvironment,
    seconds: f64,
) -> anyhow::Result<Value> {
    let pid = match &mut running.server {
        Some(server) => {
            server.ensure_running()?;
            Some(server.pid()?)
        }
        None => None,
    };
    if scenario.name == IDLE {
        let rss = procfs::rss_kib(pid.unwrap_or(engines.pid()?))?;
        return Ok(json!({"rss_after_mb": rss as f64 * 1024.0 / 1e6}));
    }
    let mut command = environment.command(environment.load_cpu, &std::env::current_exe()?);
    command.args(["load", "--port", &running.port.to_string(), "--duration", &seconds.to_string()]);
    if !scenario.load.contains(&"--warmup") {
        command.args(["--warmup", &(seconds / 4.0).clamp(0.1, 0.5).to_string()]);
    }
    command.args(scenario.load);
    command.args(environment.busy_poll.then_some("--busy-poll"));
    match pid {
        Some(pid) => command.args(["--pid", &pid.to_string(), "--engine-pid", &engines.pid()?.to_string()]),
        None => command.args(["--pid", &engines.pid()?.to_string()]),
    };
    if let Some(admin) = running.predicts {
        command.args(["--admin", &admin.to_string()]);
        engines.prefills().for_each(|port| {
            command.args(["--prefill", &port.to_string()]);
        });
    }
    let output = child::output(command, Duration::from_secs_f64(seconds) + Duration::from_secs(60)).await?;
    if !output.status.success() {
        bail!("the load generator failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let report: Value = serde_json::from_slice(&output.stdout).context("the load generator's report")?;
    let errors = report["errors"].as_u64().unwrap_or(u64::MAX);
    let requests = report["requests"].as_u64().unwrap_or(0);
    ensure!(
        errors == 0,
        "{errors} errors and {requests} successful requests; first error: {}",
        report["error_example"]
    );
    ensure!(requests > 0, "no response in the measured time");
    Ok(report)
}

fn print_progress(
    round: u32,
    gateway: &str,
    scenario: &str,
    outcome: &Result<Value, BenchFailure>,
) -> anyhow::Result<()> {
    let mut out = std::io::stderr();
    match outcome {
        Ok(report) => {
            let metrics = ["cpu_us_per_request", "cpu_us_per_chunk", "p50_us", "rss_after_mb", "other_cores"];
            let metrics: Vec<String> = metrics
                .iter()
                .filter(|key| report[**key].is_number())
                .map(|key| format!("{key} {:.2}", report[*key].as_f64().unwrap_or(f64::NAN)))
                .collect();
            writeln!(out, "round {round} {gateway}, {scenario}: {}", metrics.join(", "))?;
        }
        Err(failure) => writeln!(out, "round {round} {gateway}, {scenario}: FAILED: {failure:#}")?,
    }
    Ok(())
}
