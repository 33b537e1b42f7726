//! Plots the published benchmark together with runs of it.
//!
//! `cargo run -p moongate-loadtest --example published -- RUNS.json FILE.svg`

use anyhow::Context as _;
use moongate_loadtest::simulate::{BenchmarkResult, published_plot};

fn main() -> anyhow::Result<()> {
    let mut files = std::env::args().skip(1);
    let (runs, drawing) = files.next().zip(files.next()).context("usage: published RUNS.json FILE.svg")?;
    let runs: Vec<BenchmarkResult> = serde_json::from_str(&std::fs::read_to_string(&runs)?)?;
    Ok(std::fs::write(drawing, published_plot(&runs))?)
}
