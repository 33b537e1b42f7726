//! The load generator against simulated engines.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use moongate_loadtest::engine::{EngineFault, SimEngine, SimEngineOptions, SimProtocol, SimRole};
use moongate_loadtest::generate::{
    ArrivalProcess, LoadLimits, LoadRun, LoadTarget, LoadTargetApi, LoadtestReport, generate,
};
use moongate_runtime::Supervisor;
use tokio_util::sync::CancellationToken;

use super::{LONG, client, start};

fn target(engine: &SimEngine, api: LoadTargetApi) -> LoadTarget {
    LoadTarget { client: client(), base_url: engine.url(), api, model: "sim".to_owned(), idle_timeout: LONG }
}

const ALL: LoadLimits = LoadLimits { duration: None, requests: None, in_flight: 64 };

async fn run(target: LoadTarget, arrivals: ArrivalProcess, limits: &LoadLimits) -> LoadtestReport {
    let supervisor = Supervisor::new();
    let run = LoadRun { target, arrivals, limits: limits.clone(), progress: false };
    let report = generate(run, &supervisor, &CancellationToken::new()).await.expect("a run");
    supervisor.shutdown(LONG).await.expect("nothing left");
    report
}

#[tokio::test]
async fn constant_rate_gives_plausible_results() {
    for (protocol, api) in
        [(SimProtocol::Sglang, LoadTargetApi::Chat), (SimProtocol::Vllm, LoadTargetApi::Completions)]
    {
        let engine = start(SimRole::Plain, protocol).await;
        let limits = LoadLimits { requests: Some(40), ..ALL };
        let report = run(target(&engine, api), ArrivalProcess::at_rate(200.0, 100, 8, 3), &limits).await;
        let json = report.to_json();
        assert!(report.is_clean(), "{json}");
        assert_eq!((report.sent, report.record.succeeded, report.record.completion_tokens), (40, 40, 320));
        assert!((4_000..4_400).contains(&report.record.prompt_tokens), "{json}");
        assert_eq!((report.record.ttft.len(), report.record.itl.len()), (40, 280));
        assert!(report.record.e2e.max() >= report.record.ttft.min());
        assert!(json["output_tokens_per_s"].as_f64().expect("a number") > 0.0);
        assert!(report.to_text().contains("40 succeeded, 0 failed"));
        assert_eq!(engine.stats().finished, 40);
    }
}

fn write_trace(rows: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.jsonl");
    let mut file = std::fs::File::create(&path).expect("a file");
    for row in rows {
        writeln!(file, "{row}").expect("written");
    }
    (folder, path)
}

#[tokio::test]
async fn trace_rows_with_a_shared_prefix_hit_the_cache() {
    let mut config = SimEngineOptions::new(SimRole::Plain, SimProtocol::Sglang).fast();
    config.page_size = 16;
    let engine = SimEngine::start(config).await.expect("an engine");
    let (_folder, path) = write_trace(&[
        r#"{"timestamp": 0, "input_length": 1200, "output_length": 4, "hash_ids": [1, 2, 3]}"#,
        r#"{"timestamp": 500, "input_length": 1500, "output_length": 4, "hash_ids": [1, 2, 9]}"#,
        r#"{"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]}"#,
    ]);
    let one_by_one = LoadLimits { in_flight: 1, ..ALL };
    let arrivals = ArrivalProcess::of_trace(&path, 10.0, 1, None).expect("a trace");
    let report = run(target(&engine, LoadTargetApi::Chat), arrivals, &one_by_one).await;
    assert!(report.is_clean(), "{}", report.to_json());
    // Two blocks of 512, minus the remainder of a page.
    assert!((1_008..=1_040).contains(&report.record.cached_tokens), "{}", report.record.cached_tokens);
    assert!(report.record.prefix_hit_rate() > 0.3);
}

#[tokio::test]
async fn the_recorded_conversation_replays() {
    let engine = SimEngine::start(SimEngineOptions {
        time_scale: 100_000.0,
        ..SimEngineOptions::new(SimRole::Plain, SimProtocol::Vllm)
    })
    .await
    .expect("an engine");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/conversation_1000.jsonl");
    let arrivals = ArrivalProcess::of_trace(&path, 50.0, 1, Some(30)).expect("the trace");
    let report = run(target(&engine, LoadTargetApi::Completions), arrivals, &ALL).await;
    assert!(report.is_clean(), "{}", report.to_json());
    // Every row starts with the same block.
    assert!(report.record.cached_tokens >= 512, "{}", report.to_json());
}

#[tokio::test]
async fn failures_are_counted_by_kind() {
    let engine = start(SimRole::Plain, SimProtocol::Sglang).await;
    for (fault, kind) in [
        (EngineFault::Status500, "status_500"),
        (EngineFault::SseError, "error_event"),
        (EngineFault::DisconnectMidStream { tokens: 2 }, "stream_interrupted"),
        (EngineFault::CloseBeforeFirstByte, "no_response"),
        (EngineFault::Refuse, "connect"),
    ] {
        engine.set_fault(fault);
        if fault == EngineFault::Refuse {
            let refused = async {
                while tokio::net::TcpStream::connect(engine.addr()).await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(LONG, refused).await.expect("it refuses");
        }
        let limits = LoadLimits { requests: Some(3), ..ALL };
        let report =
            run(target(&engine, LoadTargetApi::Chat), ArrivalProcess::at_rate(500.0, 10, 8, 1), &limits)
                .await;
        let kinds: Vec<&str> = report.record.failures.keys().map(String::as_str).collect();
        assert_eq!((report.record.failed(), kinds), (3, vec![kind]), "{fault:?} {}", report.to_json());
    }
}

#[tokio::test]
async fn a_stopped_run_gives_a_partial_summary() {
    let engine = start(SimRole::Plain, SimProtocol::Sglang).await;
    let (supervisor, stop) = (Supervisor::new(), CancellationToken::new());
    let run = LoadRun {
        target: target(&engine, LoadTargetApi::Chat),
        arrivals: ArrivalProcess::at_rate(100.0, 10, 2, 1),
        limits: ALL,
        progress: false,
    };
    let running = generate(run, &supervisor, &stop);
    let stopping = async {
        assert!(engine.wait_for(LONG, |stats| stats.finished >= 5).await);
        stop.cancel();
    };
    let (report, ()) = tokio::join!(running, stopping);
    let report = report.expect("a report");
    // A response that the engine has finished may not have reached the generator when it was stopped.
    assert!(report.stopped_early && (1..=10).contains(&report.record.succeeded) && report.is_clean());
    supervisor.shutdown(LONG).await.expect("nothing left");
}
