//! Benchmarks of a gateway: CPU per request and per streamed chunk, added latency, memory.
//!
//! * `engine` – the load test's simulated engines with canned completions: much cheaper than any gateway, so that the
//!   gateway dominates the result.
//! * `load` – a load generator that also reads the gateway's CPU time and memory.
//! * `compare` – several gateways in interleaved rounds, as a table.
//! * `predict` – the time to predict the cache hits of a long prompt.

mod busy_poll;
mod compare;
mod engine;
mod load;
mod ports;
mod predict;
mod procfs;
mod text;
mod wire;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(
    name = "gateway-bench",
    about = "Measures the cost of a gateway per request and per streamed chunk."
)]
struct GatewayBenchArgs {
    #[command(subcommand)]
    command: GatewayBenchCommand,
}

#[derive(Debug, Subcommand)]
enum GatewayBenchCommand {
    /// Run mock engines until killed; prints their ports as one line of JSON.
    Engine(engine::MockEngineArgs),
    /// Send load; prints the measurements and the resource use of --pid as one line of JSON.
    Load(load::BenchLoadArgs),
    /// Measure gateways in interleaved rounds; prints a Markdown table.
    Compare(compare::BenchCompareArgs),
    /// Measure the time from the body of a long conversation to its predicted cache hits.
    Predict(predict::BenchPredictArgs),
}

fn main() -> ExitCode {
    let cli = GatewayBenchArgs::parse();
    // A single thread: the benchmark shares its core with the engines, and must not use the gateway's.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&anyhow::Error::from(error)),
    };
    let outcome = match cli.command {
        GatewayBenchCommand::Engine(options) => runtime.block_on(engine::run(options)),
        GatewayBenchCommand::Load(options) => runtime.block_on(load::run(options)),
        GatewayBenchCommand::Compare(options) => runtime.block_on(compare::run(options)),
        GatewayBenchCommand::Predict(options) => runtime.block_on(predict::run(options)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

#[expect(clippy::print_stderr, reason = "a command that talks to a person")]
fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("gateway-bench: {error:#}");
    ExitCode::FAILURE
}
