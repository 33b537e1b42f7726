//! Arguments of `moongate loadtest simulate`.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use clap::Args;
use moongate_scheduler::SchedulerOptions;

use super::agents::AgentTrafficOptions;
use super::multiturn::MultiTurnOptions;
use super::settings::{EngineOutage, EngineQueueOrder, MAX_PREFILL, SimPrefetchPolicy, SimulationOptions};
use super::store_cache::StoreRetention;
use super::suite::{SuiteOptions, SuiteStoreOptions};
use super::sweep::{ExperimentLoad, PolicyExperiment, PolicyVariant, run_experiment, with_overrides};
use super::tide::ArrivalTide;
use super::workload::{ReplayOptions, SimulatedWorkload, copies_of_rows};
use super::{report, suite, table};
use crate::generate::trace::{TraceReadOptions, read_trace_with};

/// Each tenant has a row in the results.
const MAX_TENANTS: usize = 64;

impl FromStr for EngineOutage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let usage = || format!("{text:?}: give ENGINE@START+DURATION in seconds, such as 0@600+120");
        let (engine, times) = text.split_once('@').ok_or_else(usage)?;
        let (start, length) = times.split_once('+').ok_or_else(usage)?;
        let number = |text: &str| text.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0);
        match (engine.parse(), number(start), number(length)) {
            (Ok(engine), Some(at_s), Some(for_s)) => Ok(EngineOutage { engine, at_s, for_s }),
            _ => Err(usage()),
        }
    }
}

/// Arguments of `moongate loadtest simulate`.
#[derive(Debug, Clone, Args)]
#[command(group = clap::ArgGroup::new("load").required(true).args(["trace", "multiturn", "agents", "suite", "calibrate"]))]
pub struct SimulateArgs {
    /// Trace to replay: Mooncake or Qwen-Bailian JSON lines, a dataset of aiperf with sessions, or an Azure CSV.
    #[arg(long, env = "MOONGATE_LOADTEST_TRACE")]
    pub trace: Option<PathBuf>,
    /// Simulate SGLang's bench_multiturn: clients with growing conversations and few requests in flight.
    #[arg(long, env = "MOONGATE_LOADTEST_MULTITURN")]
    pub multiturn: bool,
    /// Generate tool and agent traffic: few long tool prompts, and agents with short pauses between turns.
    #[arg(long, env = "MOONGATE_LOADTEST_AGENTS")]
    pub agents: bool,
    /// Run the standard experiments on the traces conversation_trace.jsonl and synthetic_trace.jsonl of this folder,
    /// and print a table in Markdown. Only --policy, --seeds, --first-seed, --set, --suite-filter, --retention
    /// and --return-hints are used in addition.
    #[arg(long, value_name = "DIR", env = "MOONGATE_LOADTEST_SUITE")]
    pub suite: Option<PathBuf>,
    /// Compare one engine without routing with the benchmark to which its constants were fitted.
    #[arg(long, env = "MOONGATE_LOADTEST_CALIBRATE")]
    pub calibrate: bool,
    /// Run only the experiments whose name contains one of these texts.
    #[arg(long, value_delimiter = ',', requires = "suite", env = "MOONGATE_LOADTEST_SUITE_FILTER")]
    pub suite_filter: Vec<String>,
    /// Instead of results, print how the distance from the first policy to a lower bound of the mean time to first
    /// token divides into evictions, capacity, duplicates, information and order.
    #[arg(long, requires = "suite", env = "MOONGATE_LOADTEST_BOUND_GAP")]
    pub bound_gap: bool,
    /// Policies to compare; ideal (shortest first), ideal_fcfs, ideal_aged and ideal_best (the best order for each seed)
    /// are one queue in front of engines that share an unbounded cache. A policy may have its own settings: predictive:slack=0.5+length_price=0.
    #[arg(long, value_delimiter = ',', default_value = "predictive", env = "MOONGATE_LOADTEST_POLICY")]
    pub policy: Vec<PolicyVariant>,
    /// Replay speed of a trace relative to the recording.
    #[arg(long, default_value_t = 1.0, env = "MOONGATE_LOADTEST_SPEED")]
    pub speed: f64,
    /// With a dataset of aiperf: mean rate at which its sessions start, instead of the recorded times.
    #[arg(long, env = "MOONGATE_LOADTEST_SESSIONS_PER_SECOND")]
    pub sessions_per_second: Option<f64>,
    /// Maximum number of trace rows to replay, or of requests to generate.
    #[arg(long, env = "MOONGATE_LOADTEST_REQUESTS")]
    pub requests: Option<usize>,
    /// Number of copies of a trace that are replayed at once, each with blocks and conversations of its own: for fleets
    /// that need more load than the trace has.
    #[arg(long, default_value_t = 1, env = "MOONGATE_LOADTEST_COPIES")]
    pub copies: usize,
    /// Ratio of the highest to the lowest arrival rate of new conversations, which follow a sine; 1 disables it. The
    /// mean rate is unchanged.
    #[arg(long, default_value_t = 1.0, env = "MOONGATE_LOADTEST_TIDE")]
    pub tide: f64,
    /// With --tide: seconds between two maxima, in replayed time. The load starts at a minimum.
    #[arg(long, default_value_t = 86_400.0, env = "MOONGATE_LOADTEST_TIDE_PERIOD")]
    pub tide_period: f64,
    /// Maximum random jitter of each arrival of a trace in recorded seconds. Mooncake's conversation trace has a
    /// resolution of 3 s.
    #[arg(long, default_value_t = 3.0, env = "MOONGATE_LOADTEST_JITTER")]
    pub jitter: f64,
    /// Share of the requests, from the first on, that warm the caches and are excluded from the results. No effect with
    /// --multiturn.
    #[arg(long, default_value_t = 0.1, env = "MOONGATE_LOADTEST_WARMUP")]
    pub warmup: f64,
    /// Send the turns of a conversation at their recorded times, even before the previous response has ended.
    #[arg(long, env = "MOONGATE_LOADTEST_IGNORE_SESSIONS")]
    pub ignore_sessions: bool,
    /// Number of prefill engines, or of plain workers without decode engines.
    #[arg(long, default_value_t = 8, env = "MOONGATE_LOADTEST_PREFILL")]
    pub prefill: usize,
    /// Number of decode engines; without any, the others are plain workers.
    #[arg(long, default_value_t = 4, env = "MOONGATE_LOADTEST_DECODE")]
    pub decode: usize,
    /// Number of runs with different arrivals; the results are their mean.
    #[arg(long, default_value_t = 2, env = "MOONGATE_LOADTEST_SEEDS")]
    pub seeds: u64,
    /// Seed of the first run; the next run has the next seed.
    #[arg(long, default_value_t = 1, env = "MOONGATE_LOADTEST_FIRST_SEED")]
    pub first_seed: u64,
    /// Number of gateways, each with a scheduler of its own.
    #[arg(long, default_value_t = 1, env = "MOONGATE_LOADTEST_GATEWAYS")]
    pub gateways: usize,
    /// One gateway decides for all, a millisecond later.
    #[arg(long, env = "MOONGATE_LOADTEST_SHARED_QUEUE")]
    pub shared_queue: bool,
    /// Device cache per engine in tokens.
    #[arg(long, default_value_t = 360_000, env = "MOONGATE_LOADTEST_L1_TOKENS")]
    pub l1_tokens: u64,
    /// Host cache per engine in tokens; 0 disables it, and the shared store with it.
    #[arg(long, default_value_t = 1_662_000, env = "MOONGATE_LOADTEST_L2_TOKENS")]
    pub l2_tokens: u64,
    /// Shared store in tokens; 0 disables it.
    #[arg(long, default_value_t = 8_700_000, env = "MOONGATE_LOADTEST_L3_TOKENS")]
    pub l3_tokens: u64,
    /// Which blocks a full shared store evicts. `belady` is a bound: it requires the future.
    #[arg(long, value_enum, default_value = "learned", env = "MOONGATE_LOADTEST_RETENTION")]
    pub retention: StoreRetention,
    /// Share of the requests whose clients send a hint whether most of the prompt will be used again.
    #[arg(long, default_value_t = 0.0, env = "MOONGATE_LOADTEST_RETURN_HINTS")]
    pub return_hints: f64,
    /// Read bandwidth of one engine from the shared store, in GB per second.
    #[arg(long, default_value_t = 20.0, env = "MOONGATE_LOADTEST_L3_GBPS")]
    pub l3_gbps: f64,
    /// Zones over which the prefill engines and the shared store are spread. Reads from another zone take four times as
    /// long.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64), env = "MOONGATE_LOADTEST_ZONES")]
    pub zones: u8,
    /// Hide the zones of engines and store from the gateways.
    #[arg(long, env = "MOONGATE_LOADTEST_HIDE_ZONES")]
    pub hide_zones: bool,
    /// When an engine stops waiting for the shared store.
    #[arg(long, value_enum, default_value = "wait_complete", env = "MOONGATE_LOADTEST_PREFETCH")]
    pub prefetch: SimPrefetchPolicy,
    /// Variation of computation times: standard deviation of their logarithm.
    #[arg(long, default_value_t = 0.0, env = "MOONGATE_LOADTEST_NOISE")]
    pub noise: f64,
    /// Slowdown of the first prefill engines.
    #[arg(long, default_value_t = 1.0, env = "MOONGATE_LOADTEST_SLOW_ENGINE")]
    pub slow_engine: f64,
    /// Number of prefill engines that --slow-engine slows down.
    #[arg(long, default_value_t = 1, env = "MOONGATE_LOADTEST_SLOW_ENGINES")]
    pub slow_engines: usize,
    /// Speed of all prefill engines relative to the calibrated one.
    #[arg(long, default_value_t = 1.0, env = "MOONGATE_LOADTEST_ENGINE_SPEED")]
    pub engine_speed: f64,
    /// Bytes of KV cache per token.
    #[arg(long, default_value_t = 192_512, env = "MOONGATE_LOADTEST_KV_BYTES")]
    pub kv_bytes: u64,
    /// Milliseconds between two polls of the engines' load; 0 disables polling.
    #[arg(long, default_value_t = 100.0, env = "MOONGATE_LOADTEST_POLL_MS")]
    pub poll_ms: f64,
    /// Delay in seconds until the gateways receive a change of a cache.
    #[arg(long, default_value_t = 0.0, env = "MOONGATE_LOADTEST_INDEX_LAG")]
    pub index_lag: f64,
    /// Order in which an engine computes waiting prompts.
    #[arg(long, value_enum, default_value = "fcfs", env = "MOONGATE_LOADTEST_ENGINE_ORDER")]
    pub engine_order: EngineQueueOrder,
    /// With --engine-order priority and a policy that sets none: share of a request's arrival time in its priority.
    #[arg(long, default_value_t = 0.1, env = "MOONGATE_LOADTEST_PRIORITY_AGEING")]
    pub priority_ageing: f64,
    /// Let a prefill pass take tokens of several prompts.
    #[arg(long, env = "MOONGATE_LOADTEST_PACKED")]
    pub packed: bool,
    /// Outage of an engine as ENGINE@START+DURATION in seconds; engines are numbered from 0, prefill engines first. May
    /// be given several times.
    #[arg(long, value_delimiter = ',', env = "MOONGATE_LOADTEST_OUTAGE")]
    pub outage: Vec<EngineOutage>,
    /// Rejected clients retry once, after the time in Retry-After.
    #[arg(long, env = "MOONGATE_LOADTEST_RETRY")]
    pub retry: bool,
    /// Send a TTFT target with each request: twice the computation of the whole prompt, or two seconds.
    #[arg(long, env = "MOONGATE_LOADTEST_TTFT_TARGETS")]
    pub ttft_targets: bool,
    /// Target of the time per output token in milliseconds, for the share of requests that meet both targets.
    #[arg(long, default_value_t = 50.0, env = "MOONGATE_LOADTEST_TPOT_TARGET_MS")]
    pub tpot_target_ms: f64,
    /// Give the gateways the target of the time per output token.
    #[arg(long, env = "MOONGATE_LOADTEST_TPOT_TARGETS")]
    pub tpot_targets: bool,
    /// Relative loads of tenants, such as 70,10,10,10. The seed selects a tenant for every conversation.
    #[arg(long, value_delimiter = ',', value_name = "SHARE", env = "MOONGATE_LOADTEST_TENANTS")]
    pub tenants: Vec<f64>,
    /// Share of the conversations with priority 1; the others have priority 0.
    #[arg(long, default_value_t = 0.0, env = "MOONGATE_LOADTEST_URGENT")]
    pub urgent: f64,
    /// KV cache of a decode engine in tokens.
    #[arg(long, default_value_t = 360_000, env = "MOONGATE_LOADTEST_DECODE_TOKENS")]
    pub decode_tokens: u64,
    /// Decode engines can also compute prompts, as vLLM's can. The gateways use it with --tpot-targets.
    #[arg(long, env = "MOONGATE_LOADTEST_LOCAL_PREFILL")]
    pub local_prefill: bool,
    /// Factor on the length of the responses.
    #[arg(long, default_value_t = 1.0, env = "MOONGATE_LOADTEST_OUTPUT_SCALE")]
    pub output_scale: f64,
    /// Number of clients of --multiturn.
    #[arg(long, default_value_t = 150, env = "MOONGATE_LOADTEST_CLIENTS")]
    pub clients: u32,
    /// Maximum number of requests in flight of --multiturn.
    #[arg(long, default_value_t = 4, env = "MOONGATE_LOADTEST_IN_FLIGHT")]
    pub in_flight: u32,
    /// Requests per second of --multiturn.
    #[arg(long, default_value_t = 16.0, env = "MOONGATE_LOADTEST_REQUEST_RATE")]
    pub request_rate: f64,
    /// Override a setting of the scheduler: NAME=VALUE, such as slack=0.2. May be given several times.
    #[arg(long, value_name = "NAME=VALUE", env = "MOONGATE_LOADTEST_SET")]
    pub set: Vec<String>,
    /// Write an HTML report with plots to this file.
    #[arg(long, env = "MOONGATE_LOADTEST_REPORT")]
    pub report: Option<PathBuf>,
    /// Write the distribution of times to first token to this file, as SVG.
    #[arg(long, env = "MOONGATE_LOADTEST_PLOT")]
    pub plot: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long, env = "MOONGATE_LOADTEST_JSON")]
    pub json: bool,
}

impl SimulateArgs {
    /// Converts the arguments to an experiment.
    ///
    /// # Errors
    /// A setting is out of range, or the trace cannot be read.
    pub fn experiment(&self) -> anyhow::Result<PolicyExperiment> {
        self.validate()?;
        let replay = ReplayOptions {
            speed: self.speed,
            jitter_s: self.jitter,
            output_scale: self.output_scale,
            tide: ArrivalTide { ratio: self.tide, period_s: self.tide_period },
            seed: 0,
        };
        let load = match &self.trace {
            Some(path) => {
                let rows = read_trace_with(
                    path,
                    TraceReadOptions { limit: self.requests, sessions_per_second: self.sessions_per_second },
                )?;
                let rows = copies_of_rows(rows, self.copies);
                ExperimentLoad::Open(SimulatedWorkload::of_rows(&rows, !self.ignore_sessions), replay)
            }
            None if self.agents => {
                let settings = AgentTrafficOptions {
                    requests: self.requests.unwrap_or(AgentTrafficOptions::default().requests),
                    ..AgentTrafficOptions::default()
                };
                ExperimentLoad::Agents(settings, ReplayOptions { jitter_s: 0.0, ..replay })
            }
            None => ExperimentLoad::MultiTurn(MultiTurnOptions {
                clients: self.clients,
                in_flight: self.in_flight,
                per_second: self.request_rate,
                ..MultiTurnOptions::default()
            }),
        };
        Ok(PolicyExperiment {
            settings: self.settings(),
            scheduling: self.scheduling()?,
            load,
            variants: self.policy.clone(),
            seeds: self.all_seeds(),
        })
    }

    fn scheduling(&self) -> anyhow::Result<SchedulerOptions> {
        with_overrides(&SchedulerOptions::default(), &self.set).context("--set")
    }

    fn validate(&self) -> anyhow::Result<()> {
        let positive = [
            ("--speed", self.speed),
            ("--l3-gbps", self.l3_gbps),
            ("--slow-engine", self.slow_engine),
            ("--engine-speed", self.engine_speed),
            ("--request-rate", self.request_rate),
            ("--tpot-target-ms", self.tpot_target_ms),
            ("--output-scale", self.output_scale),
            ("--tide-period", self.tide_period),
            ("--sessions-per-second", self.sessions_per_second.unwrap_or(1.0)),
        ];
        for (flag, value) in positive {
            anyhow::ensure!(value.is_finite() && value > 0.0, "{flag} {value}: give a number above 0");
        }
        anyhow::ensure!(
            !self.local_prefill || self.tpot_targets,
            "--local-prefill has no effect without a target of the time per token: add --tpot-targets"
        );
        let not_negative = [
            ("--jitter", self.jitter),
            ("--noise", self.noise),
            ("--poll-ms", self.poll_ms),
            ("--index-lag", self.index_lag),
            ("--warmup", self.warmup),
            ("--return-hints", self.return_hints),
            ("--priority-ageing", self.priority_ageing),
            ("--urgent", self.urgent),
        ];
        for (flag, value) in not_negative {
            anyhow::ensure!(value.is_finite() && value >= 0.0, "{flag} {value}: give a number, 0 or more");
        }
        anyhow::ensure!(
            self.return_hints <= 1.0,
            "--return-hints {}: give a share of the requests, 0 to 1",
            self.return_hints
        );
        anyhow::ensure!(
            self.tenants.iter().all(|share| share.is_finite() && *share > 0.0)
                && self.tenants.len() <= MAX_TENANTS,
            "--tenants: give at most {MAX_TENANTS} numbers above 0"
        );
        anyhow::ensure!(
            self.urgent <= 1.0,
            "--urgent {}: give a share of the conversations, 0 to 1",
            self.urgent
        );
        anyhow::ensure!(
            self.tide.is_finite() && self.tide >= 1.0,
            "--tide {}: give the ratio of the highest to the lowest rate, 1 or more",
            self.tide
        );
        anyhow::ensure!((1..=1_000).contains(&self.copies), "--copies {}: give 1 to 1000", self.copies);
        let prefill = self.prefill;
        anyhow::ensure!(
            (1..=MAX_PREFILL).contains(&prefill),
            "--prefill {prefill}: give 1 to {MAX_PREFILL} engines"
        );
        anyhow::ensure!(self.decode <= 1_024, "--decode {}: give at most 1024 engines", self.decode);
        anyhow::ensure!((1..=64).contains(&self.gateways), "--gateways {}: give 1 to 64", self.gateways);
        anyhow::ensure!((1..=1_000).contains(&self.seeds), "--seeds {}: give 1 to 1000", self.seeds);
        anyhow::ensure!(
            (1..=100_000).contains(&self.clients) && self.in_flight > 0,
            "--clients {} --in-flight {}: give 1 to 100000 clients, and at least one in flight",
            self.clients,
            self.in_flight
        );
        let engines = prefill + self.decode;
        if let Some(failure) = self.outage.iter().find(|failure| failure.engine >= engines) {
            anyhow::bail!("--outage {}@…: there are only {engines} engines, numbered from 0", failure.engine);
        }
        Ok(())
    }

    fn all_seeds(&self) -> RangeInclusive<u64> {
        self.first_seed..=self.first_seed.saturating_add(self.seeds.saturating_sub(1))
    }

    fn settings(&self) -> SimulationOptions {
        let mut settings = SimulationOptions::eight_plus_four();
        let service = &mut settings.service;
        service.prefill_base_s /= self.engine_speed;
        service.prefill_linear_s /= self.engine_speed;
        service.prefill_quadratic_s /= self.engine_speed;
        service.storage_bytes_per_s = self.l3_gbps * 1e9;
        service.kv_bytes_per_token = self.kv_bytes;
        SimulationOptions {
            prefill: self.prefill,
            decode: self.decode,
            l1_tokens: self.l1_tokens,
            l2_tokens: self.l2_tokens,
            l3_tokens: self.l3_tokens,
            retention: self.retention,
            return_hints: self.return_hints,
            zones: self.zones,
            zones_known: !self.hide_zones,
            prefetch: self.prefetch,
            packed: self.packed,
            order: self.engine_order,
            priority_ageing: self.priority_ageing,
            noise_sigma: self.noise,
            slow_engine: self.slow_engine,
            slow_engines: self.slow_engines,
            failures: self.outage.clone(),
            gateways: self.gateways,
            shared_queue: self.shared_queue,
            poll_s: self.poll_ms / 1_000.0,
            index_lag_s: self.index_lag,
            retry: self.retry,
            ttft_targets: self.ttft_targets,
            tpot_target_s: self.tpot_target_ms / 1_000.0,
            tpot_target_known: self.tpot_targets,
            tenants: self.tenants.clone(),
            urgent: self.urgent,
            decode_tokens: self.decode_tokens,
            local_prefill: self.local_prefill,
            warmup_share: if self.multiturn { 0.0 } else { self.warmup },
            ..settings
        }
    }
}

/// Runs the experiment and returns the text to print. Setting `stop` ends it.
///
/// # Errors
/// A setting is out of range, the trace cannot be read, the report cannot be written, or the run was stopped.
pub fn simulate(args: &SimulateArgs, stop: &AtomicBool) -> anyhow::Result<String> {
    if let Some(folder) = &args.suite {
        args.validate()?;
        let options = SuiteOptions {
            contenders: &args.policy,
            scheduling: &args.scheduling()?,
            seeds: args.all_seeds(),
            only: &args.suite_filter,
            bound_gap: args.bound_gap,
            store: SuiteStoreOptions { retention: args.retention, return_hints: args.return_hints },
        };
        return suite::run(folder, options, stop);
    }
    if args.calibrate {
        args.validate()?;
        return Ok(table::calibration(args.seeds));
    }
    let case = args.experiment()?;
    let started = std::time::Instant::now();
    let standings = run_experiment(&case, stop);
    anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
    let elapsed = started.elapsed();
    let write = |path: &Option<PathBuf>, text: &dyn Fn() -> String| match path {
        Some(path) => {
            std::fs::write(path, text()).with_context(|| format!("cannot write {}", path.display()))
        }
        None => Ok(()),
    };
    write(&args.report, &|| report::html(&case, &standings))?;
    write(&args.plot, &|| report::plot(&standings))?;
    Ok(if args.json { table::json(&standings) } else { table::text(&standings, elapsed) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct SimulateTestArgs {
        #[command(flatten)]
        args: SimulateArgs,
    }

    fn case(flags: &[&str]) -> anyhow::Result<PolicyExperiment> {
        SimulateTestArgs::try_parse_from([&["x", "--agents", "--requests=10"], flags].concat())?
            .args
            .experiment()
    }

    #[test]
    fn flags_become_a_fleet() {
        let case = case(&[
            "--prefill=2",
            "--l3-gbps=3",
            "--outage=0@60+30",
            "--policy=random,ideal",
            "--tenants=70,30",
        ])
        .expect("valid");
        assert_eq!(case.settings.prefill, 2);
        assert!((case.settings.service.storage_bytes_per_s - 3e9).abs() < 1.0);
        assert_eq!(case.settings.failures, [EngineOutage { engine: 0, at_s: 60.0, for_s: 30.0 }]);
        assert_eq!(case.variants.len(), 2);
        assert_eq!(case.settings.tenants, [70.0, 30.0]);
    }

    #[test]
    fn invalid_arguments_are_rejected() {
        for flag in [
            "--speed=0",
            "--prefill=0",
            "--prefill=1025",
            "--outage=12@1+1",
            "--outage=1@x",
            "--noise=-1",
            "--gateways=0",
            "--return-hints=2",
            "--tenants=1,0",
            "--tenants=x",
            "--urgent=1.5",
            "--tide=0.5",
            "--copies=0",
            "--sessions-per-second=0",
        ] {
            assert!(case(&[flag]).is_err(), "{flag}");
        }
        assert!(SimulateTestArgs::try_parse_from(["x"]).is_err());
        assert!(SimulateTestArgs::try_parse_from(["x", "--agents", "--multiturn"]).is_err());
    }
}
