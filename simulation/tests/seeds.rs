//! Runs some seeds of the simulation, and checks that a seed always gives the same trace.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::process::Command;

#[track_caller]
fn simulate(flags: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_simulate")).args(flags).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn no_invariant_is_violated() {
    simulate(&["--seeds", "24"]);
}

#[test]
fn a_seed_gives_the_same_trace_in_every_process() {
    simulate(&["--seeds", "4", "--first", "1000", "--check-determinism"]);
}
