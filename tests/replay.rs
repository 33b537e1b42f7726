//! The first thousand requests of a production trace, through the gateway to simulated pairs.

mod world;

use std::time::Duration;

use serde_json::Value;

use world::process::MoongateProcess;

/// Prompts of 12 million tokens in all, and a third of a million events: minutes in a debug build on a busy machine.
const REPLAY_WITHIN: Duration = Duration::from_secs(600);

#[tokio::test(flavor = "multi_thread")]
async fn the_conversation_trace_replays_without_an_error() {
    let mut up = MoongateProcess::start(&[
        "up",
        "--listen=127.0.0.1:0",
        "--admin-listen=127.0.0.1:0",
        "--time-scale=100",
    ]);
    let line = up.wait_for_line("Moongate is up").await;
    let target = line.split_whitespace().last().unwrap_or_default().to_owned();
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/loadtest/traces/conversation_1000.jsonl");
    let args =
        ["loadtest", "run", "--target", &target, "--trace", trace, "--speed=5", "--json", "--no-progress"];
    let run = MoongateProcess::start(&args).wait_within(REPLAY_WITHIN).await;
    assert!(run.status.success(), "{run:?}");
    let summary: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((&summary["succeeded"], &summary["failed"]), (&1000.into(), &0.into()), "{summary:#}");
    let number =
        |value: &Value| value.as_f64().unwrap_or_else(|| panic!("a number is missing in {summary:#}"));
    // Every prompt of this trace is known to the token: the sum of its input lengths.
    assert!(number(&summary["input_tokens"]) > 11e6, "{summary:#}");
    let hit = number(&summary["prefix_hit"]);
    assert!(hit > 0.02 && hit < 0.40, "an infinite cache would reach 0.37 on the whole trace: {summary:#}");
    assert!(number(&summary["ttft"]["mean_s"]) > 0.0, "{summary:#}");
}
