//! Policies rank in a real gateway with simulated engines on compressed time as in the simulator.
#![expect(clippy::print_stdout, reason = "a measurement reports its numbers")]

use std::time::Duration;

use crate::harness::process::MoongateProcess;

/// Time limit, longer than the longest of these runs on a busy machine.
const LIMIT: Duration = Duration::from_secs(1_200);
/// The first five minutes of Mooncake's conversation trace.
const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/loadtest/traces/conversation_1000.jsonl");

/// Fails unless the order is the simulator's.
async fn assert_simulator_ranking(flags: &[&str]) {
    let ended = MoongateProcess::start(&[&["loadtest", "live"], flags].concat()).wait_within(LIMIT).await;
    println!("{}", ended.stdout);
    assert!(ended.status.success(), "{}\n{}", ended.stdout, ended.stderr);
}

/// With one policy there is no ranking: this checks that every request is answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_real_gateway_serves_the_load_on_compressed_time() {
    assert_simulator_ranking(&[
        "--trace",
        RECORDED,
        "--requests=30",
        "--time-scale=10",
        "--policy=predictive",
    ])
    .await;
}

/// Engines, gateway, master and store node are real processes or talk to them; clients give hints.
#[tokio::test(flavor = "multi_thread")]
async fn a_real_store_serves_the_load_on_compressed_time() {
    assert_simulator_ranking(&[
        "--trace",
        RECORDED,
        "--requests=30",
        "--time-scale=10",
        "--policy=predictive",
        "--store=learned:0.5",
    ])
    .await;
}

/// Needs an idle machine for some minutes, and a release build.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes of a quiet machine"]
async fn policies_rank_as_in_the_simulator() {
    let trace = std::env::var("MOONGATE_LOADTEST_TRACE").unwrap_or_else(|_| RECORDED.to_owned());
    assert_simulator_ranking(&["--trace", &trace, "--requests=1000"]).await;
}
