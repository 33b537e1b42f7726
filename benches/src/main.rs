//! What a gateway costs: CPU per request and per streamed chunk, added latency, memory.
//!
//! * `engine` – a mock engine that is much cheaper than any gateway, so that the gateway is what is measured.
//! * `load` – a load generator that also reads the gateway's CPU time and memory.
//! * `compare` – several gateways in interleaved rounds, as a table.
//! * `predict` – what it takes to predict the cache hits of a long prompt.

mod clock;
mod compare;
mod engine;
mod load;
mod predict;
mod procfs;
mod wire;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(
    name = "gateway-bench",
    about = "Measures what a gateway costs per request and per streamed chunk."
)]
struct GatewayBenchArgs {
    #[command(subcommand)]
    command: GatewayBenchCommand,
}

#[derive(Debug, Subcommand)]
enum GatewayBenchCommand {
    /// Runs mock engines until killed; prints their ports as one line of JSON.
    Engine(engine::MockEngineArgs),
    /// Sends load, and prints what it saw and what the process of --pid spent as one line of JSON.
    Load(load::BenchLoadArgs),
    /// Measures gateways one after another in interleaved rounds, and prints a Markdown table.
    Compare(compare::BenchCompareArgs),
    /// Measures how long the gateway takes from the body of a long conversation to its predicted cache hits.
    Predict(predict::BenchPredictArgs),
}

fn main() -> ExitCode {
    let cli = GatewayBenchArgs::parse();
    // One thread: the benchmark shares its core with the engines, and must not take the gateway's.
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
