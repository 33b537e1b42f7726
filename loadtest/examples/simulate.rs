//! `moongate loadtest simulate` without the rest of the program: builds quickly while a policy is being tuned.
//!
//! `cargo run --release -p moongate-loadtest --example simulate -- --trace FILE --policy NAME,NAME`

use std::sync::atomic::AtomicBool;

use clap::Parser;
use moongate_loadtest::simulate::{SimulateArgs, simulate};

#[derive(Debug, Parser)]
struct SimulateExampleArgs {
    #[command(flatten)]
    args: SimulateArgs,
}

#[expect(clippy::print_stdout, reason = "an example talks to the person at the terminal")]
fn main() -> anyhow::Result<()> {
    print!("{}", simulate(&SimulateExampleArgs::parse().args, &AtomicBool::new(false))?);
    Ok(())
}
