//! The first requests of a production trace, through the gateway to simulated pairs.

use std::time::Duration;

use serde_json::Value;

use crate::harness::process::MoongateProcess;

/// Requests sent: prompts of 3.5 million tokens in 88 s of the trace, half a minute of CPU time in a debug build.
const REQUESTS: usize = 250;
const REPLAY_TIMEOUT: Duration = Duration::from_secs(300);

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
    let requests = format!("--requests={REQUESTS}");
    let args = [
        "loadtest",
        "run",
        "--target",
        &target,
        "--trace",
        trace,
        &requests,
        "--speed=10",
        "--json",
        "--no-progress",
    ];
    let run = MoongateProcess::start(&args).wait_within(REPLAY_TIMEOUT).await;
    assert!(run.status.success(), "{run:?}");
    let summary: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((&summary["succeeded"], &summary["failed"]), (&REQUESTS.into(), &0.into()), "{summary:#}");
    let number =
        |value: &Value| value.as_f64().unwrap_or_else(|| panic!("a number is missing in {summary:#}"));
    // The chat template adds a few tokens to each prompt.
    let template_tokens = (number(&summary["input_tokens"]) - trace_tokens(trace)) / REQUESTS as f64;
    assert!((0.0..16.0).contains(&template_tokens), "{template_tokens} per request: {summary:#}");
    let hit = number(&summary["prefix_hit_rate"]);
    assert!(hit > 0.02 && hit < 0.08, "an infinite cache reaches 0.07 on these requests: {summary:#}");
    assert!(number(&summary["ttft"]["mean_s"]) > 0.0, "{summary:#}");
}

/// Sum of the input lengths of the requests that are sent.
fn trace_tokens(trace: &str) -> f64 {
    let lines = std::fs::read_to_string(trace).unwrap();
    let entries = lines.lines().take(REQUESTS).map(|line| serde_json::from_str::<Value>(line).unwrap());
    entries.map(|entry| entry["input_length"].as_f64().unwrap()).sum()
}
