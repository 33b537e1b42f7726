//! The load generator: closed loop (`--conc`) or open loop (`--rps`), responses as JSON or as a stream.
//!
//! It is not the load test's, whose HTTP client takes two to three times the CPU time of this one: the load generator
//! would limit a fast gateway, and a gateway that waits for it spends CPU time on waking up.

mod client;
mod computed;
mod drive;
mod prompts;
mod report;

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::busy_poll::busy_poll;
use crate::procfs;
use computed::PredictedEngines;
use drive::BenchLoadPlan;
use prompts::PromptGenerator;
use report::{CpuTimes, MeasurementWindow};

/// Command-line arguments of `gateway-bench load`.
#[derive(Debug, Args)]
pub(crate) struct BenchLoadArgs {
    /// Port of 127.0.0.1 to which requests are sent.
    #[arg(long, value_name = "PORT")]
    port: u16,

    /// Closed loop: number of connections, each with one request at a time.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=8192))]
    conc: u32,

    /// Open loop: requests per second, sent whether or not earlier ones have completed. Replaces --conc.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rps: Option<u32>,

    /// Request streamed responses instead of JSON.
    #[arg(long)]
    stream: bool,

    /// Tokens per response. Mock engines send one event per token.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_tokens: u32,

    /// Time between two tokens requested from mock engines; also the maximum random pause before each request.
    #[arg(long, value_name = "MS")]
    itl_ms: Option<u32>,

    /// Size of a request's body.
    #[arg(long, value_name = "BYTES", default_value_t = 200)]
    body_bytes: usize,

    /// Part of each prompt, at its end, that is in no other.
    #[arg(long, value_name = "PERCENT", default_value_t = 25, value_parser = clap::value_parser!(u8).range(..=100))]
    unique_percent: u8,

    /// Warm-up before measuring starts; closed-loop connections start evenly over its first half.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5)]
    warmup: f64,

    /// Measured time of the run in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    duration: f64,

    /// Never sleep, so that the gateway spends no CPU time on waking this process.
    #[arg(long)]
    busy_poll: bool,

    /// Process whose CPU time and memory are reported, including its descendants.
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,

    /// Port of the gateway's admin listener: the prompts' common prefixes are computed before the run, and other prompts during it.
    #[arg(long, value_name = "PORT", requires = "prefill")]
    admin: Option<u16>,

    /// Port of a prefill engine that computes them. Repeatable.
    #[arg(long, value_name = "PORT", requires = "admin")]
    prefill: Vec<u16>,

    /// Process of the mock engines, whose CPU time is not counted as load of other processes.
    #[arg(long, value_name = "PID")]
    engine_pid: Option<u32>,
}

pub(crate) async fn run(options: BenchLoadArgs) -> anyhow::Result<()> {
    let seconds = |seconds: f64, name: &str| {
        ensure!((0.0..=3600.0).contains(&seconds), "--{name} {seconds} is not within 0 and 3600 seconds");
        Ok(Duration::from_secs_f64(seconds))
    };
    let (warmup, duration) = (seconds(options.warmup, "warmup")?, seconds(options.duration, "duration")?);
    ensure!(!duration.is_zero(), "--duration is 0: nothing would be measured");
    let tail = prompts::tail(options.max_tokens, options.stream, options.itl_ms);
    let prompts = PromptGenerator::new(options.body_bytes, options.unique_percent.into(), &tail)?;
    let predicted = options.admin.map(|admin| PredictedEngines { admin, prefills: options.prefill.clone() });
    if let Some(engines) = &predicted {
        engines.compute_prefixes(&prompts).await.context("computing the prompts' prefixes")?;
    }
    let plan = Arc::new(BenchLoadPlan {
        port: options.port,
        // A truncated stream has fewer events than all tokens, usage and [DONE].
        events: options.stream.then_some(u64::from(options.max_tokens) + 2),
        prompts,
        window: MeasurementWindow::new(warmup, duration),
        ramp: warmup / 2,
        max_pause: Duration::from_millis(options.itl_ms.unwrap_or(0).into()),
    });
    // The task ends when the set is dropped.
    let mut tasks = JoinSet::new();
    if options.busy_poll {
        tasks.spawn(busy_poll());
    }
    if let Some(engines) = predicted {
        tasks.spawn(async move {
            if let Err(error) = engines.compute_others().await {
                let _unwritable = writeln!(std::io::stderr(), "no further KV events: {error:#}");
            }
        });
    }
    let rss_before = options.pid.map(procfs::rss_kib).transpose().context("--pid")?;
    let began = Instant::now();
    let watched = MeasuredProcesses { gateway: options.pid, engine: options.engine_pid };
    let measured = async {
        sleep_until(began + warmup).await;
        let before = watched.read()?;
        sleep_until(began + warmup + duration).await;
        anyhow::Ok(watched.read()?.since(&before))
    };
    let (tally, usage) = tokio::join!(
        async {
            match options.rps {
                Some(rps) => drive::open_loop(&plan, rps).await,
                None => drive::closed_loop(&plan, options.conc).await,
            }
        },
        measured
    );
    let rss_after = options.pid.map(procfs::rss_kib).transpose().context("--pid")?;
    let report = report::report(tally?, &usage?, duration, (rss_before, rss_after));
    writeln!(std::io::stdout(), "{report}")?;
    Ok(())
}

/// Processes whose CPU time is read at both ends of the window.
struct MeasuredProcesses {
    gateway: Option<u32>,
    engine: Option<u32>,
}

impl MeasuredProcesses {
    fn read(&self) -> anyhow::Result<CpuTimes> {
        let cpu = |pid: Option<u32>| pid.map(procfs::cpu_ns).transpose();
        Ok(CpuTimes {
            gateway_ns: cpu(self.gateway)?,
            engine_ns: cpu(self.engine)?,
            load_generator_ns: procfs::cpu_ns(std::process::id())?,
            machine_ns: procfs::machine_busy_ns()?,
        })
    }
}
