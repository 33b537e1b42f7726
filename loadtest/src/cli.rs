//! The `moongate loadtest …` commands.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use moongate_runtime::{PeerTlsArgs, Supervisor};
use moongate_store_client::{KvClient, KvClientOptions, MetadataSource, StoreCredentials};
use url::Url;

use crate::engine::{
    EngineFault, EngineFaultPlan, KvEventOptions, SharedL3Store, SimEngine, SimEngineOptions, SimProtocol,
    SimRole, VllmConnector,
};
use crate::generate::{self, ArrivalProcess, LoadLimits, LoadTarget, LoadTargetApi, LoadtestReport};
use crate::live::{LiveComparisonArgs, live};
use crate::simulate::{ScalingArgs, SimulateArgs, scaling, simulate};

/// Simulated engines and load generation.
#[derive(Debug, Subcommand)]
pub enum LoadtestCommand {
    /// Run one simulated inference engine until it is stopped.
    Engine(Box<SimEngineArgs>),
    /// Send load to an OpenAI-compatible endpoint and measure it.
    Run(Box<LoadRunArgs>),
    /// Compare scheduling policies on a simulated fleet.
    Simulate(Box<SimulateArgs>),
    /// Compare ways to scale prefill and decode replicas over a simulated day.
    Scaling(ScalingArgs),
    /// Compare scheduling policies in real gateways with simulated engines on a faster clock, and compare the results
    /// with the simulator.
    Live(Box<LiveComparisonArgs>),
}

/// Arguments of `moongate loadtest engine`.
#[derive(Debug, Clone, Args)]
pub struct SimEngineArgs {
    /// Role of the engine in serving requests.
    #[arg(long, value_enum, default_value = "plain", env = "MOONGATE_LOADTEST_ROLE")]
    pub role: SimRole,
    /// Wire protocol of the engine.
    #[arg(long, value_enum, default_value = "sglang", env = "MOONGATE_LOADTEST_PROTOCOL")]
    pub protocol: SimProtocol,
    /// Address on which the engine listens.
    #[arg(long, default_value = "127.0.0.1:0", env = "MOONGATE_LOADTEST_LISTEN")]
    pub listen: SocketAddr,
    /// How vLLM engines transfer KV caches from prefill to decode.
    #[arg(long, value_enum, default_value = "nixl", env = "MOONGATE_LOADTEST_CONNECTOR")]
    pub connector: VllmConnector,
    /// Address of the bootstrap server (SGLang, Mooncake) or side channel (NIXL) of a prefill engine; default: a free
    /// port.
    #[arg(long, env = "MOONGATE_LOADTEST_BOOTSTRAP_LISTEN")]
    pub bootstrap_listen: Option<SocketAddr>,
    /// Host name that decode engines use to reach this engine's side channel (NIXL); default: the listen address.
    #[arg(long, env = "MOONGATE_LOADTEST_ADVERTISE_HOST")]
    pub advertise_host: Option<String>,
    /// Number of data-parallel ranks of the engine.
    #[arg(long, default_value_t = 1, env = "MOONGATE_LOADTEST_DP_SIZE")]
    pub dp_size: u32,
    /// Name under which the model is served.
    #[arg(long, default_value = "sim", env = "MOONGATE_LOADTEST_ENGINE_MODEL")]
    pub model: String,
    /// Tokens per page or block; default: 64 for SGLang, 16 for vLLM.
    #[arg(long, env = "MOONGATE_LOADTEST_PAGE_SIZE")]
    pub page_size: Option<usize>,
    /// Speed relative to the imitated engine.
    #[arg(long, default_value_t = 1.0, env = "MOONGATE_LOADTEST_TIME_SCALE")]
    pub time_scale: f64,
    /// Device cache per rank in tokens.
    #[arg(long, default_value_t = 360_000, env = "MOONGATE_LOADTEST_L1_TOKENS")]
    pub l1_tokens: usize,
    /// Host cache per rank in tokens; 0 disables it.
    #[arg(long, default_value_t = 0, env = "MOONGATE_LOADTEST_L2_TOKENS")]
    pub l2_tokens: usize,
    /// Simulated shared store in tokens; 0 disables it. This store is not shared with other processes.
    #[arg(long, default_value_t = 0, env = "MOONGATE_LOADTEST_L3_TOKENS")]
    pub l3_tokens: usize,
    /// Store pages in a real Mooncake store with this master instead of a simulated one. Object contents are verified.
    #[arg(
        long,
        value_name = "HOST:PORT",
        env = "MOONGATE_LOADTEST_STORE_MASTER",
        conflicts_with = "l3_tokens"
    )]
    pub store_master: Option<String>,
    /// How the store's nodes are found: P2PHANDSHAKE or the URL of a metadata server.
    #[arg(
        long,
        value_name = "WHERE",
        env = "MOONGATE_LOADTEST_STORE_METADATA",
        default_value = "P2PHANDSHAKE",
        requires = "store_master"
    )]
    pub store_metadata: MetadataSource,
    /// TLS for the connections to that store.
    #[command(flatten)]
    pub store_tls: PeerTlsArgs,
    /// Maximum prompt length in tokens.
    #[arg(long, default_value_t = 1_000_000, env = "MOONGATE_LOADTEST_CONTEXT_TOKENS")]
    pub context_tokens: usize,
    /// Maximum number of running requests per rank.
    #[arg(long, default_value_t = 256, env = "MOONGATE_LOADTEST_MAX_RUNNING")]
    pub max_running: usize,
    /// Maximum number of tokens per prefill pass.
    #[arg(long, default_value_t = 8_192, env = "MOONGATE_LOADTEST_CHUNK_TOKENS")]
    pub chunk_tokens: usize,
    /// Seconds that one leg of a pair waits for the other; default: 300 for SGLang, 480 for vLLM.
    #[arg(long, env = "MOONGATE_LOADTEST_BOOTSTRAP_TIMEOUT")]
    pub bootstrap_timeout: Option<f64>,
    /// Seconds after start during which the engine reports that it is not ready.
    #[arg(long, default_value_t = 0.0, env = "MOONGATE_LOADTEST_READY_AFTER")]
    pub ready_after: f64,
    /// Publish KV events on this address, such as 127.0.0.1:5557: one port per data-parallel rank, followed by one
    /// replay port per rank. Port 0 selects free ports. Default: no events.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_LOADTEST_KV_EVENTS")]
    pub kv_events: Option<SocketAddr>,
    /// Store responses, so that they can be retrieved and continued.
    #[arg(long, env = "MOONGATE_LOADTEST_RESPONSE_STORE")]
    pub response_store: bool,
    /// Seconds to load a LoRA adapter, in the time of the imitated engine.
    #[arg(long, default_value_t = 0.0, env = "MOONGATE_LOADTEST_ADAPTER_LOAD")]
    pub adapter_load: f64,
    /// Maximum number of loaded LoRA adapters of an SGLang engine; a further one evicts the least recently used.
    #[arg(long, env = "MOONGATE_LOADTEST_MAX_LOADED_LORAS")]
    pub max_loaded_loras: Option<usize>,
    /// Version that the engine reports, such as 0.5.6. Default: a version that the engine's protocol has.
    #[arg(long, value_name = "VERSION", env = "MOONGATE_LOADTEST_REPORTED_VERSION")]
    pub reported_version: Option<String>,
    /// Fault to inject from the start, as JSON, such as {"fault":"disconnect_mid_stream","tokens":3,"times":1}.
    #[arg(long, env = "MOONGATE_LOADTEST_FAULT")]
    pub fault: Option<String>,
}

/// Arguments of `moongate loadtest run`.
#[derive(Debug, Clone, Args)]
#[command(group = clap::ArgGroup::new("arrivals").required(true).args(["trace", "rate"]))]
pub struct LoadRunArgs {
    /// URL of the endpoint, such as http://127.0.0.1:8000.
    #[arg(long, env = "MOONGATE_LOADTEST_TARGET")]
    pub target: Url,
    /// Trace to replay: Mooncake or Qwen-Bailian JSON lines, a dataset of aiperf with sessions, or an Azure CSV.
    #[arg(long, env = "MOONGATE_LOADTEST_TRACE")]
    pub trace: Option<PathBuf>,
    /// Mean requests per second, with Poisson arrivals.
    #[arg(long, env = "MOONGATE_LOADTEST_RATE")]
    pub rate: Option<f64>,
    /// Stop sending after this many seconds.
    #[arg(long, env = "MOONGATE_LOADTEST_DURATION")]
    pub duration: Option<f64>,
    /// Stop sending after this many requests.
    #[arg(long, env = "MOONGATE_LOADTEST_REQUESTS")]
    pub requests: Option<u64>,
    /// Replay a trace this many times faster.
    #[arg(long, default_value_t = 1.0, env = "MOONGATE_LOADTEST_SPEED")]
    pub speed: f64,
    /// Tokens per prompt, with --rate.
    #[arg(long, default_value_t = 1_024, env = "MOONGATE_LOADTEST_INPUT_TOKENS")]
    pub input_tokens: usize,
    /// Tokens per response, with --rate.
    #[arg(long, default_value_t = 128, env = "MOONGATE_LOADTEST_OUTPUT_TOKENS")]
    pub output_tokens: u32,
    /// Maximum number of requests in flight; later ones wait, which counts as schedule delay.
    #[arg(long, default_value_t = generate::DEFAULT_IN_FLIGHT, env = "MOONGATE_LOADTEST_CONCURRENCY_LIMIT")]
    pub concurrency_limit: usize,
    /// Model to request; default: the first one that the target lists.
    #[arg(long, env = "MOONGATE_LOADTEST_MODEL")]
    pub model: Option<String>,
    /// API to which requests are sent.
    #[arg(long, value_enum, default_value = "chat", env = "MOONGATE_LOADTEST_API")]
    pub api: LoadTargetApi,
    /// Seed of arrivals and prompts.
    #[arg(long, default_value_t = 1, env = "MOONGATE_LOADTEST_SEED")]
    pub seed: u64,
    /// Fail a request after this many seconds without a byte.
    #[arg(long, default_value_t = 600.0, env = "MOONGATE_LOADTEST_IDLE_TIMEOUT")]
    pub idle_timeout: f64,
    /// Print one JSON object instead of a table.
    #[arg(long, env = "MOONGATE_LOADTEST_JSON")]
    pub json: bool,
    /// Do not show a progress bar.
    #[arg(long, env = "MOONGATE_LOADTEST_NO_PROGRESS")]
    pub no_progress: bool,
}

/// Runs a command. It ends early when the supervisor's token is cancelled.
///
/// # Errors
/// A setting is invalid, an address cannot be bound, or a file cannot be read.
pub async fn run(command: LoadtestCommand, supervisor: &Supervisor) -> anyhow::Result<ExitCode> {
    match command {
        LoadtestCommand::Engine(args) => run_engine(*args, supervisor).await,
        LoadtestCommand::Run(args) => run_load(*args, supervisor).await,
        LoadtestCommand::Simulate(args) => {
            run_simulation(move |stop| simulate(&args, stop), supervisor).await
        }
        LoadtestCommand::Scaling(args) => run_simulation(move |stop| scaling(&args, stop), supervisor).await,
        LoadtestCommand::Live(args) => {
            let (table, agrees) = live(&args, supervisor).await?;
            write_stdout(&table);
            Ok(if agrees { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

fn seconds(value: f64, flag: &str) -> anyhow::Result<Duration> {
    Duration::try_from_secs_f64(value)
        .with_context(|| format!("{flag} {value}: give a number of seconds, 0 or more"))
}

impl SimEngineArgs {
    /// Converts the arguments to the engine's settings.
    ///
    /// # Errors
    /// A number of seconds is negative or too large.
    pub fn options(&self) -> anyhow::Result<SimEngineOptions> {
        let mut config = SimEngineOptions::new(self.role, self.protocol);
        config.connector = self.connector;
        config.listen = self.listen;
        config.bootstrap_listen = self.bootstrap_listen;
        config.advertise_host.clone_from(&self.advertise_host);
        config.dp_size = self.dp_size;
        config.model.clone_from(&self.model);
        config.page_size = self.page_size.unwrap_or(config.page_size);
        config.time_scale = self.time_scale;
        config.device_tokens = self.l1_tokens;
        config.host_tokens = self.l2_tokens;
        config.use_storage = self.l3_tokens > 0 || self.store_master.is_some();
        config.context_tokens = self.context_tokens;
        config.max_running = self.max_running;
        config.service.chunk_tokens = self.chunk_tokens;
        config.bootstrap_timeout =
            self.bootstrap_timeout.map(|timeout| seconds(timeout, "--bootstrap-timeout")).transpose()?;
        config.ready_after = seconds(self.ready_after, "--ready-after")?;
        config.response_store = self.response_store;
        config.reported_version.clone_from(&self.reported_version);
        config.service.adapter_load_s = seconds(self.adapter_load, "--adapter-load")?.as_secs_f64();
        config.max_loaded_adapters = self.max_loaded_loras;
        config.kv_events =
            self.kv_events.map(|listen| KvEventOptions { listen, ..KvEventOptions::default() });
        Ok(config)
    }

    fn l3_store(&self, supervisor: &Supervisor) -> anyhow::Result<SharedL3Store> {
        let Some(master) = &self.store_master else { return Ok(SharedL3Store::new(self.l3_tokens)) };
        let tls = self.store_tls.load()?;
        if let Some(tls) = &tls {
            tls.reload_on_change(supervisor);
        }
        let authentication = tls.map(StoreCredentials::new);
        let options = KvClientOptions {
            metadata: self.store_metadata.clone(),
            authentication,
            ..KvClientOptions::default()
        };
        Ok(SharedL3Store::with_mooncake(KvClient::new(master, options, supervisor)?))
    }
}

async fn run_engine(args: SimEngineArgs, supervisor: &Supervisor) -> anyhow::Result<ExitCode> {
    let fault: EngineFaultPlan = match &args.fault {
        Some(json) => serde_json::from_str(json).context("--fault is not a valid fault in JSON")?,
        None => EngineFault::None.into(),
    };
    let engine = SimEngine::start_with_store(args.options()?, &args.l3_store(supervisor)?).await?;
    engine.set_fault(fault);
    let bootstrap =
        engine.bootstrap_addr().map(|address| format!(" bootstrap={address}")).unwrap_or_default();
    write_stdout(&format!("simulated engine ready listen={}{bootstrap}\n", engine.addr()));
    supervisor.token().cancelled().await;
    engine.stop().await;
    Ok(ExitCode::SUCCESS)
}

async fn run_load(args: LoadRunArgs, supervisor: &Supervisor) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        args.speed.is_finite() && args.speed > 0.0,
        "--speed {}: give a number above 0",
        args.speed
    );
    let arrivals = match (&args.trace, args.rate) {
        (Some(path), _) => {
            let limit = args.requests.map(|requests| usize::try_from(requests).unwrap_or(usize::MAX));
            ArrivalProcess::of_trace(path, args.speed, args.seed, limit)?
        }
        (None, Some(rate)) => {
            anyhow::ensure!(
                rate.is_finite() && rate > 0.0,
                "--rate {rate}: give requests per second, above 0"
            );
            anyhow::ensure!(args.input_tokens > 0, "--input-tokens must be at least 1");
            ArrivalProcess::at_rate(rate, args.input_tokens, args.output_tokens.max(1), args.seed)
        }
        (None, None) => anyhow::bail!("give --trace FILE or --rate R"),
    };
    let limits = LoadLimits {
        duration: args.duration.map(|duration| seconds(duration, "--duration")).transpose()?,
        requests: args.requests,
        in_flight: args.concurrency_limit,
    };
    let endless = args.trace.is_none() && limits.duration.is_none() && limits.requests.is_none();
    anyhow::ensure!(!endless, "--rate never ends: add --duration SECONDS or --requests N");
    let base = args.target.as_str().trim_end_matches('/');
    let base = base.strip_suffix("/v1").unwrap_or(base).to_owned();
    let client = reqwest::Client::builder()
        .tls_certs_only([])
        .pool_max_idle_per_host(1_024)
        .tcp_nodelay(true)
        .build()?;
    let model = match args.model {
        Some(model) => model,
        None => first_model(&client, &base).await?,
    };
    let target = LoadTarget {
        client,
        base_url: base,
        api: args.api,
        model,
        idle_timeout: seconds(args.idle_timeout, "--idle-timeout")?,
    };
    let stop = supervisor.token();
    let run = generate::LoadRun { target, arrivals, limits, progress: !args.no_progress };
    let report = generate::generate(run, supervisor, &stop).await?;
    write_stdout(&format_report(&report, args.json));
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_simulation(
    simulation: impl FnOnce(&AtomicBool) -> anyhow::Result<String> + Send + 'static,
    supervisor: &Supervisor,
) -> anyhow::Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    let stop_flag = Arc::clone(&stop);
    let mut run = tokio::task::spawn_blocking(move || simulation(&stop_flag));
    let stopped = supervisor.token();
    let text = tokio::select! {
        text = &mut run => text??,
        () = stopped.cancelled() => {
            stop.store(true, Ordering::Relaxed);
            run.await??
        }
    };
    write_stdout(&text);
    Ok(ExitCode::SUCCESS)
}

/// The first model in the target's model list.
async fn first_model(client: &reqwest::Client, base: &str) -> anyhow::Result<String> {
    let url = format!("{base}/v1/models");
    let fetch_models =
        async { client.get(&url).send().await?.error_for_status()?.json::<serde_json::Value>().await };
    let models = fetch_models.await.with_context(|| format!("cannot list models from {url}; set --model"))?;
    let first = models["data"][0]["id"].as_str();
    first.map(str::to_owned).with_context(|| format!("{url} lists no model; set --model"))
}

fn format_report(report: &LoadtestReport, json: bool) -> String {
    if json { format!("{}\n", report.to_json()) } else { report.to_text() }
}

fn write_stdout(text: &str) {
    use std::io::Write as _;
    let mut stdout = std::io::stdout().lock();
    // A closed pipe means that the reader needs no more output.
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser};

    #[derive(Debug, Parser)]
    struct LoadtestTestArgs {
        #[command(subcommand)]
        command: LoadtestCommand,
    }

    #[test]
    fn the_command_line_is_consistent() {
        LoadtestTestArgs::command().debug_assert();
        assert!(LoadtestTestArgs::try_parse_from(["x", "run", "--target", "http://h:1"]).is_err());
        assert!(
            LoadtestTestArgs::try_parse_from([
                "x",
                "run",
                "--target",
                "http://h:1",
                "--rate",
                "2",
                "--trace",
                "f"
            ])
            .is_err()
        );
        let parsed = LoadtestTestArgs::try_parse_from([
            "x",
            "engine",
            "--role",
            "decode",
            "--protocol",
            "vllm",
            "--connector",
            "store",
        ]);
        let Ok(LoadtestTestArgs { command: LoadtestCommand::Engine(args) }) = parsed else {
            panic!("{parsed:?}")
        };
        let config = args.options().expect("valid");
        assert_eq!(
            (config.role, config.protocol, config.page_size),
            (SimRole::Decode, SimProtocol::Vllm, 16)
        );
    }
}
