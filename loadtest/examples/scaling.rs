//! `moongate loadtest scaling` without the rest of the program: builds quickly while a planner is being changed.
//!
//! `cargo run --release -p moongate-loadtest --example scaling -- --start 120`

use std::sync::atomic::AtomicBool;

use clap::Parser;
use moongate_loadtest::simulate::{ScalingArgs, scaling};

#[derive(Debug, Parser)]
struct ScalingExampleArgs {
    #[command(flatten)]
    args: ScalingArgs,
}

#[expect(clippy::print_stdout, reason = "an example talks to the person at the terminal")]
fn main() -> anyhow::Result<()> {
    print!("{}", scaling(&ScalingExampleArgs::parse().args, &AtomicBool::new(false))?);
    Ok(())
}
