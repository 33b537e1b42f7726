//! `moongate loadtest live` without the rest of the program: builds quickly while engines are being tuned. The gateway
//! is a separate program.
//!
//! `cargo run --release -p moongate-loadtest --example live -- --program target/release/moongate --trace FILE`

use std::process::ExitCode;

use clap::Parser;
use moongate_loadtest::live::{LiveComparisonArgs, live};
use moongate_runtime::Supervisor;

#[derive(Debug, Parser)]
struct LiveExampleArgs {
    #[command(flatten)]
    args: LiveComparisonArgs,
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example talks to the person at the terminal")]
async fn main() -> anyhow::Result<ExitCode> {
    let (table, agrees) = live(&LiveExampleArgs::parse().args, &Supervisor::new()).await?;
    println!("{table}");
    Ok(if agrees { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
