//! The simulated engines of the load test with canned completions: a few microseconds of CPU per request.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use moongate_loadtest::engine::{
    CannedCompletions, KvEventOptions, SimEngine, SimEngineOptions, SimProtocol, SimRole,
};
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::task::JoinSet;

use crate::busy_poll::busy_poll;

/// Name of the model, its path and its tokenizer.
const MODEL: &str = "mock";
/// Maximum number of concurrent requests of an engine, as it reports them.
const MAX_RUNNING: usize = 8192;
/// Tokens in an engine's cache.
const CACHE_TOKENS: usize = 20_000_000;
/// Speed of prompts that are not canned, relative to the calibrated time model.
const TIME_SCALE: f64 = 1_000.0;

/// Command-line arguments of `gateway-bench engine`.
#[derive(Debug, Args)]
pub(crate) struct MockEngineArgs {
    /// Port on 127.0.0.1 of an engine that prefills and decodes; 0 selects any. Repeatable.
    #[arg(long, value_name = "PORT")]
    plain: Vec<u16>,

    /// Ports of a prefill engine and its bootstrap server. Repeatable.
    #[arg(long, value_name = "PORT,BOOTSTRAP_PORT", value_parser = parse_pair)]
    prefill: Vec<(u16, u16)>,

    /// Port of a decode engine. Repeatable.
    #[arg(long, value_name = "PORT")]
    decode: Vec<u16>,

    /// Time between two tokens of a stream; 0 sends at full speed. A request with the member "user":"itl-ms-N"
    /// overrides it.
    #[arg(long, value_name = "MS", default_value_t = 0)]
    itl_ms: u32,

    /// Never sleep, so that the gateway spends no CPU time on waking this process.
    #[arg(long)]
    busy_poll: bool,

    /// Exit without a signal after this time.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    max_seconds: u64,

    /// Exit when standard input is closed, so that the process never outlives the command that started it.
    #[arg(long)]
    exit_on_stdin_eof: bool,
}

pub(crate) async fn run(options: MockEngineArgs) -> anyhow::Result<()> {
    let guard = options.exit_on_stdin_eof.then(stdin_pipe).transpose()?;
    let inter_token_latency = Duration::from_millis(u64::from(options.itl_ms));
    let start = |role, port, bootstrap_port| {
        SimEngine::start(engine_options(role, port, bootstrap_port, inter_token_latency))
    };
    let (mut plain, mut prefill, mut decode) = (Vec::new(), Vec::new(), Vec::new());
    for port in options.plain {
        plain.push(start(SimRole::Plain, port, None).await?);
    }
    for (port, bootstrap_port) in options.prefill {
        prefill.push(start(SimRole::Prefill, port, Some(bootstrap_port)).await?);
    }
    for port in options.decode {
        decode.push(start(SimRole::Decode, port, None).await?);
    }
    ensure!(
        !(plain.is_empty() && prefill.is_empty() && decode.is_empty()),
        "no engine is configured; give --plain, --prefill or --decode"
    );
    let port = |engine: &SimEngine| engine.addr().port();
    let ports = |engines: &[SimEngine]| engines.iter().map(port).collect::<Vec<_>>();
    let pairs: Vec<_> = prefill
        .iter()
        .map(|engine| (port(engine), engine.bootstrap_addr().map(|address| address.port())))
        .collect();
    let listing = json!({"plain": ports(&plain), "prefill": pairs, "decode": ports(&decode)});
    writeln!(std::io::stdout(), "{listing}")?;
    // The task ends when the set is dropped.
    let mut tasks = JoinSet::new();
    if options.busy_poll {
        tasks.spawn(busy_poll());
    }
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs(options.max_seconds)) => Ok(()),
        () = async { if let Some(input) = guard { until_closed(input).await } }, if options.exit_on_stdin_eof => Ok(()),
        signal = tokio::signal::ctrl_c() => Ok(signal?),
    }
}

fn engine_options(
    role: SimRole,
    port: u16,
    bootstrap_port: Option<u16>,
    inter_token_latency: Duration,
) -> SimEngineOptions {
    let address = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    SimEngineOptions {
        listen: address(port),
        bootstrap_listen: bootstrap_port.map(address),
        model: MODEL.to_owned(),
        max_running: MAX_RUNNING,
        device_tokens: CACHE_TOKENS,
        time_scale: TIME_SCALE,
        kv_events: (role != SimRole::Decode).then(KvEventOptions::default),
        context_tokens: 1 << 20,
        canned: Some(CannedCompletions { inter_token_latency }),
        ..SimEngineOptions::new(role, SimProtocol::Sglang)
    }
}

fn parse_pair(text: &str) -> Result<(u16, u16), String> {
    let pair = text
        .split_once(',')
        .and_then(|(port, bootstrap)| Some((port.parse().ok()?, bootstrap.parse().ok()?)));
    pair.ok_or_else(|| format!("{text:?} is not two ports; write it as 9101,8998"))
}

async fn until_closed(mut input: pipe::Receiver) {
    let mut ignored = [0; 64];
    while matches!(input.read(&mut ignored).await, Ok(1..)) {}
}

/// Standard input, which must be a pipe.
fn stdin_pipe() -> anyhow::Result<pipe::Receiver> {
    let input = std::io::stdin().as_fd().try_clone_to_owned()?;
    pipe::Receiver::from_owned_fd(input).context("--exit-on-stdin-eof needs a pipe as standard input")
}
