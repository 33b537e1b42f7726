//! `moongate kv bench`: measures throughput and latency of puts and gets.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressDrawTarget};
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, KvError, PutOptions, PutOutcome};
use serde_json::json;

use super::KvStoreArgs;
use super::size::{format_size, parse};

/// Arguments of `moongate kv bench`.
#[derive(Clone, Debug, Args)]
pub(super) struct KvBenchArgs {
    /// Object sizes to measure, each in turn.
    #[arg(
        long,
        value_name = "SIZE,…",
        env = "MOONGATE_KV_BENCH_SIZES",
        value_delimiter = ',',
        default_value = "64KiB,1MiB,4MiB,16MiB",
        value_parser = parse
    )]
    sizes: Vec<usize>,

    /// Numbers of threads to measure; each thread has its own connections.
    #[arg(
        long,
        value_name = "N,…",
        env = "MOONGATE_KV_BENCH_THREADS",
        value_delimiter = ',',
        default_value = "1,2"
    )]
    threads: Vec<usize>,

    /// Bytes to put and then get for each size and number of threads. They must fit into the store.
    #[arg(long, value_name = "SIZE", env = "MOONGATE_KV_BENCH_BYTES", default_value = "256MiB", value_parser = parse)]
    bytes: usize,

    /// Number of gets of each object.
    #[arg(long, value_name = "N", env = "MOONGATE_KV_BENCH_READS", default_value_t = 2)]
    reads: usize,

    /// Number of replicas of each object.
    #[arg(long, value_name = "N", env = "MOONGATE_KV_BENCH_REPLICAS", default_value_t = 1)]
    replicas: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum KvBenchOperation {
    Put,
    Get,
}

/// The work that all threads share.
#[derive(Clone)]
struct KvBenchWorkload {
    operation: KvBenchOperation,
    prefix: String,
    size: usize,
    /// Total number of calls; gets beyond the number of objects read the same ones again.
    calls: usize,
    objects: usize,
    replicas: u64,
}

/// Latencies of all calls in microseconds, and the total time in seconds.
struct KvBenchResult {
    calls: Histogram<u64>,
    seconds: f64,
}

pub(super) async fn run(
    command: KvBenchArgs,
    store: &KvStoreArgs,
    supervisor: &Supervisor,
) -> anyhow::Result<ExitCode> {
    let (master, options, json) = (store.master()?, store.options(supervisor)?, store.json);
    // The benchmark starts its own threads and runtimes.
    let measured = tokio::task::spawn_blocking(move || measure(&command, &master, &options, json)).await;
    measured.context("the benchmark thread failed")??;
    Ok(ExitCode::SUCCESS)
}

fn measure(command: &KvBenchArgs, master: &str, options: &KvClientOptions, json: bool) -> anyhow::Result<()> {
    let id = fastrand::u64(..);
    let mut out = io::stdout();
    if !json {
        writeln!(out, "what      size threads      GB/s    calls/s    p50 ms    p90 ms    p99 ms    max ms")?;
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    if io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::stderr());
    }
    for &size in &command.sizes {
        for &threads in &command.threads {
            let objects = (command.bytes / size).max(threads).max(1);
            let prefix = format!("moongate-bench-{id:016x}-{size}-{threads}");
            let mut work = KvBenchWorkload {
                operation: KvBenchOperation::Put,
                prefix,
                size,
                calls: objects,
                objects,
                replicas: command.replicas,
            };
            let outcome = (|| {
                for operation in [KvBenchOperation::Put, KvBenchOperation::Get] {
                    work.operation = operation;
                    work.calls = if operation == KvBenchOperation::Put {
                        objects
                    } else {
                        objects * command.reads.max(1)
                    };
                    bar.set_message(format!("{} of {}", work.calls, format_size(size as u64)));
                    let result = all_threads(&work, threads, master, options)?;
                    print_result(&mut out, &work, threads, &result, json)?;
                }
                anyhow::Ok(())
            })();
            remove_objects(&work, master, options)?;
            outcome?;
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Runs the workload on `threads` threads.
fn all_threads(
    work: &KvBenchWorkload,
    threads: usize,
    master: &str,
    options: &KvClientOptions,
) -> anyhow::Result<KvBenchResult> {
    let next = Arc::new(AtomicUsize::new(0));
    let started_at = Instant::now();
    let thread = |_| {
        let (work, next, master, options) =
            (work.clone(), Arc::clone(&next), master.to_owned(), options.clone());
        std::thread::spawn(move || one_thread(&work, &next, &master, options))
    };
    let started: Vec<_> = (0..threads.max(1)).map(thread).collect();
    let mut calls = Histogram::new(3)?;
    for thread in started {
        let Ok(result) = thread.join() else { bail!("a benchmark thread panicked") };
        calls.add(result?)?;
    }
    Ok(KvBenchResult { calls, seconds: started_at.elapsed().as_secs_f64() })
}

fn one_thread(
    work: &KvBenchWorkload,
    next: &AtomicUsize,
    master: &str,
    mut options: KvClientOptions,
) -> anyhow::Result<Histogram<u64>> {
    options.master.connections = 1;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut calls = Histogram::new(3)?;
    let mut buffer: Vec<u8> = (0..work.size).map(|index| index as u8).collect();
    runtime.block_on(async {
        let client = KvClient::new(master, options, &Supervisor::new())?;
        let put = PutOptions { replicas: work.replicas, ..PutOptions::default() };
        loop {
            let call = next.fetch_add(1, Ordering::Relaxed);
            if call >= work.calls {
                return Ok(calls);
            }
            let (key, call_started) = (format!("{}-{}", work.prefix, call % work.objects), Instant::now());
            match work.operation {
                KvBenchOperation::Put => {
                    if client.put(&key, &buffer, &put).await? == PutOutcome::AlreadyExists {
                        bail!("the object {key:?} exists already");
                    }
                }
                KvBenchOperation::Get => {
                    client.get_into(&key, &mut buffer).await.map_err(explain_error)?;
                }
            }
            calls.record(u64::try_from(call_started.elapsed().as_micros()).unwrap_or(u64::MAX))?;
        }
    })
}

fn explain_error(error: KvError) -> anyhow::Error {
    let missing = matches!(error, KvError::NotFound { .. });
    let error = anyhow::Error::from(error);
    if missing {
        error.context("the store evicted objects of this benchmark; add store memory, or lower --bytes")
    } else {
        error
    }
}

fn remove_objects(work: &KvBenchWorkload, master: &str, options: &KvClientOptions) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = KvClient::new(master, options.clone(), &Supervisor::new())?;
        client.remove_matching(&format!("^{}-", work.prefix), true).await?;
        Ok(())
    })
}

fn print_result(
    out: &mut impl io::Write,
    work: &KvBenchWorkload,
    threads: usize,
    result: &KvBenchResult,
    json: bool,
) -> io::Result<()> {
    let what = if work.operation == KvBenchOperation::Put { "put" } else { "get" };
    let speed = (work.size * work.calls) as f64 / result.seconds / 1e9;
    let rate = work.calls as f64 / result.seconds;
    let [p50, p90, p99, max] = [0.5, 0.9, 0.99, 1.0].map(|q| result.calls.value_at_quantile(q) as f64 / 1e3);
    if json {
        let line = json!({
            "what": what, "bytes": work.size, "threads": threads, "calls": work.calls, "gb_per_s": speed,
            "calls_per_s": rate, "p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "max_ms": max,
        });
        return writeln!(out, "{line}");
    }
    let size = format_size(work.size as u64);
    writeln!(
        out,
        "{what} {size:>10} {threads:>7} {speed:>9.3} {rate:>10.0} {p50:>9.3} {p90:>9.3} {p99:>9.3} {max:>9.3}"
    )
}
