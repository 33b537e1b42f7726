//! Arguments of `moongate loadtest live`, and the experiment that they define.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use moongate_scheduler::{PolicyName, SchedulerOptions};

use super::store::LiveStoreVariant;
use crate::engine::{KvEventOptions, SimEngineOptions, SimProtocol, SimRole};
use crate::generate::trace::read_trace;
use crate::simulate::{
    ArrivalTide, ExperimentLoad, PolicyExperiment, PolicyVariant, ReplayOptions, SimulatedWorkload,
    SimulationOptions, StoreRetention,
};

/// Maximum number of engines of each kind: all run in one process.
const MAX_ENGINES: usize = 64;

/// Arguments of `moongate loadtest live`.
#[derive(Debug, Clone, Args)]
pub struct LiveComparisonArgs {
    /// Trace to replay, with block ids: Mooncake or Qwen-Bailian JSON lines.
    #[arg(long, env = "MOONGATE_LOADTEST_TRACE")]
    pub trace: PathBuf,
    /// Policies to compare, separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "round_robin,cache_aware,dynamo_queue,predictive",
        env = "MOONGATE_LOADTEST_POLICY"
    )]
    pub policy: Vec<PolicyName>,
    /// Maximum number of trace rows to replay.
    #[arg(long, env = "MOONGATE_LOADTEST_REQUESTS")]
    pub requests: Option<usize>,
    /// Replay speed relative to the recording, in the engines' time.
    #[arg(long, default_value_t = 0.5, env = "MOONGATE_LOADTEST_SPEED")]
    pub speed: f64,
    /// Speed of the engines' clock relative to real time.
    ///
    /// The machine must keep up: check the schedule delay in the table. Delays of the real gateway and of sockets are
    /// scaled by the same factor.
    #[arg(long, default_value_t = 20.0, env = "MOONGATE_LOADTEST_TIME_SCALE")]
    pub time_scale: f64,
    /// Number of prefill engines to run.
    #[arg(long, default_value_t = 4, env = "MOONGATE_LOADTEST_PREFILL")]
    pub prefill: usize,
    /// Number of decode engines to run.
    #[arg(long, default_value_t = 2, env = "MOONGATE_LOADTEST_DECODE")]
    pub decode: usize,
    /// Device cache per engine in tokens.
    #[arg(long, default_value_t = 360_000, env = "MOONGATE_LOADTEST_L1_TOKENS")]
    pub l1_tokens: u64,
    /// Host cache per engine in tokens.
    #[arg(long, default_value_t = 1_662_000, env = "MOONGATE_LOADTEST_L2_TOKENS")]
    pub l2_tokens: u64,
    /// Shared store in tokens; 0 disables it.
    #[arg(long, default_value_t = 4_350_000, env = "MOONGATE_LOADTEST_L3_TOKENS")]
    pub l3_tokens: u64,
    /// Milliseconds of the engines' time between two load polls; 0 disables polling.
    #[arg(long, default_value_t = 500.0, env = "MOONGATE_LOADTEST_POLL_MS")]
    pub poll_ms: f64,
    /// Policies whose mean times to first token differ by less than this share in the simulator may be in any order.
    #[arg(long, default_value_t = 0.1, env = "MOONGATE_LOADTEST_MARGIN")]
    pub margin: f64,
    /// Real stores to compare, separated by commas: `lru` or `learned`, and `:SHARE` to send hints about this share of the requests.
    ///
    /// Every policy runs with every store, which is a master and a store node in processes of their own. Without this flag the
    /// store is simulated, and evicts the least recently used pages.
    #[arg(long, value_delimiter = ',', value_name = "RETENTION[:SHARE]", env = "MOONGATE_LOADTEST_STORE")]
    pub store: Vec<LiveStoreVariant>,
    /// Program that runs as gateway, master and store node; default: this program.
    #[arg(long, value_name = "FILE", env = "MOONGATE_LOADTEST_PROGRAM")]
    pub program: Option<PathBuf>,
}

/// Maximum jitter of an arrival in recorded seconds: the conversation trace has a resolution of 3 s.
const JITTER_S: f64 = 3.0;
/// Name of the served model.
pub(super) const MODEL: &str = "sim";
/// Tokens per event of a response: fewer events reduce the machine's load without changing the tokens' times.
const STREAM_INTERVAL: u32 = 32;

impl LiveComparisonArgs {
    /// Converts the arguments to the simulator's experiment.
    ///
    /// # Errors
    /// A setting is out of range, or the trace cannot be read.
    pub(super) fn experiment(&self, store: Option<LiveStoreVariant>) -> anyhow::Result<PolicyExperiment> {
        for (flag, value) in [("--speed", self.speed), ("--time-scale", self.time_scale)] {
            anyhow::ensure!(value.is_finite() && value > 0.0, "{flag} {value}: give a number above 0");
        }
        for (flag, value) in [("--poll-ms", self.poll_ms), ("--margin", self.margin)] {
            anyhow::ensure!(value.is_finite() && value >= 0.0, "{flag} {value}: give a number, 0 or more");
        }
        let prefill = self.prefill;
        anyhow::ensure!(
            (1..=MAX_ENGINES).contains(&prefill),
            "--prefill {prefill}: give 1 to {MAX_ENGINES} engines"
        );
        anyhow::ensure!(
            (1..=MAX_ENGINES).contains(&self.decode),
            "--decode {}: give 1 to {MAX_ENGINES} engines",
            self.decode
        );
        anyhow::ensure!(
            self.l2_tokens > 0,
            "--l2-tokens 0: the shared store is reached through the host cache only"
        );
        anyhow::ensure!(
            store.is_none() || self.l3_tokens > 0,
            "--l3-tokens 0: a real store needs space; give its size in tokens, or omit --store"
        );
        let rows = read_trace(&self.trace, self.requests)?;
        anyhow::ensure!(
            rows.iter().all(|row| !row.blocks.is_empty()),
            "the trace names no blocks: nothing in it can be cached"
        );
        let replay = ReplayOptions {
            speed: self.speed,
            jitter_s: JITTER_S,
            output_scale: 1.0,
            tide: ArrivalTide::CONSTANT,
            seed: 0,
        };
        Ok(PolicyExperiment {
            settings: SimulationOptions {
                retention: store.map_or(StoreRetention::Lru, |store| store.retention),
                return_hints: store.map_or(0.0, |store| store.return_hints),
                ..self.settings()
            },
            scheduling: SchedulerOptions::default(),
            load: ExperimentLoad::Open(SimulatedWorkload::of_rows(&rows, true), replay),
            variants: self.policy.iter().map(|&policy| PolicyVariant::from(policy)).collect(),
            seeds: 1..=1,
        })
    }

    /// Workload of the simulator's first seed.
    pub(super) fn workload(&self, case: &PolicyExperiment) -> SimulatedWorkload {
        case.load.workload(1)
    }

    /// Options of the simulated fleet.
    pub(super) fn settings(&self) -> SimulationOptions {
        SimulationOptions {
            prefill: self.prefill,
            decode: self.decode,
            l1_tokens: self.l1_tokens,
            l2_tokens: self.l2_tokens,
            l3_tokens: self.l3_tokens,
            poll_s: self.poll_ms / 1_000.0,
            ..SimulationOptions::eight_plus_four()
        }
    }

    /// A live engine of the same kind. Pages are as large as the trace's blocks.
    pub(super) fn engine(&self, role: SimRole, page_tokens: usize) -> SimEngineOptions {
        let settings = self.settings();
        let tokens = |tokens: u64| usize::try_from(tokens).unwrap_or(usize::MAX);
        SimEngineOptions {
            model: MODEL.to_owned(),
            page_size: page_tokens,
            time_scale: self.time_scale,
            service: settings.service,
            packed: settings.packed,
            stream_interval: STREAM_INTERVAL,
            device_tokens: tokens(settings.l1_tokens),
            host_tokens: tokens(settings.l2_tokens),
            use_storage: settings.l3_tokens > 0,
            // An engine also uses a batch slot for a prompt that is being computed on another engine.
            max_running: 1 << 16,
            // Only prefill engines have caches to publish.
            kv_events: (role == SimRole::Prefill).then(KvEventOptions::default),
            ..SimEngineOptions::new(role, SimProtocol::Sglang)
        }
    }

    /// Converts seconds of the engines' time to real time.
    pub(super) fn scaled(&self, seconds: f64) -> Duration {
        Duration::try_from_secs_f64(seconds.max(0.0) / self.time_scale).unwrap_or(Duration::MAX)
    }
}
