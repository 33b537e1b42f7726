//! Sends the simulator's arrivals over HTTP.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};
use moongate_retention::ReturnHint;
use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::args::{LiveComparisonArgs, MODEL};
use super::testbed::LiveTestbed;
use crate::engine::tokens::mix;
use crate::generate::{LoadTarget, LoadTargetApi};
use crate::simulate::{
    SimulatedOutcome, SimulatedWorkload, SimulationResult, SimulationSummary, WorkloadIndex, return_hints,
};

/// Maximum time without a byte.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);
/// Three-digit token ids keep bodies short.
const FIRST_TOKEN: u64 = 100;
const TOKEN_RANGE: u64 = 900;

/// Results of one policy's run.
#[derive(Debug, Clone, Copy)]
pub(super) struct LiveRunResult {
    /// In seconds of the engines.
    pub(super) summary: SimulationSummary,
    /// 99th percentile of the schedule delay, in seconds of the engines.
    pub(super) lateness: f64,
}

/// State shared by all requests.
struct LiveRun {
    target: LoadTarget,
    workload: Arc<SimulatedWorkload>,
    outcome: Mutex<SimulationResult>,
    lateness: Mutex<Vec<f64>>,
    started: Instant,
    scale: f64,
    /// Cancelled when the request has ended.
    finished: Vec<CancellationToken>,
    /// By request.
    hints: Vec<ReturnHint>,
}

impl LiveRun {
    /// Seconds of the engines since the start.
    fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64() * self.scale
    }

    /// The hint whether the prompt will be used again, if the client gives one.
    fn headers(&self, index: WorkloadIndex) -> HeaderMap {
        let hint = match self.hints[index.get()] {
            ReturnHint::Unknown => return HeaderMap::new(),
            ReturnHint::Never => HeaderValue::from_static("never"),
            ReturnHint::Expected => HeaderValue::from_static("soon"),
        };
        HeaderMap::from_iter([(HeaderName::from_static("x-moongate-return"), hint)])
    }

    /// Sends a request when it is due and its predecessor in the conversation has ended.
    async fn send(&self, index: WorkloadIndex) {
        let request = self.workload.request(index);
        let due = Duration::try_from_secs_f64(request.due_s / self.scale).unwrap_or_default();
        tokio::time::sleep_until((self.started + due).into()).await;
        let mut scheduled = request.due_s;
        if let Some(before) = request.predecessor {
            let waits = !self.finished[before.get()].is_cancelled();
            self.finished[before.get()].cancelled().await;
            if waits {
                scheduled = self.now();
            }
        }
        let body = body(&self.workload, index);
        let arrived = self.now();
        self.lateness.lock().push(arrived - scheduled);
        self.outcome.lock().record_arrival(arrived, index);
        let result = self.target.post("completions", body, self.headers(index)).await;
        let ended = self.now();
        let mut outcome = self.outcome.lock();
        match result {
            Ok(measurement) => {
                let first = measurement.ttft.unwrap_or(measurement.e2e).as_secs_f64() * self.scale;
                outcome.record_live_first_token(
                    arrived + first,
                    index,
                    u32::try_from(measurement.cached_tokens).unwrap_or(u32::MAX),
                );
                outcome.record_end(ended, index, SimulatedOutcome::Served);
            }
            Err(failure) => {
                tracing::warn!(number = index.get(), ?failure, "a request failed");
                outcome.record_end(ended, index, SimulatedOutcome::Failed);
            }
        }
        drop(outcome);
        self.finished[index.get()].cancel();
    }
}

/// Replays the load with hints about the share `hinted` of its requests.
pub(super) async fn replay_workload(
    fleet: &LiveTestbed,
    args: &LiveComparisonArgs,
    workload: &Arc<SimulatedWorkload>,
    hinted: f64,
    supervisor: &Supervisor,
) -> anyhow::Result<LiveRunResult> {
    let client =
        moongate_runtime::plain_http_client().pool_max_idle_per_host(1_024).tcp_nodelay(true).build()?;
    let run = Arc::new(LiveRun {
        target: LoadTarget {
            client,
            base_url: fleet.url.clone(),
            api: LoadTargetApi::Completions,
            model: MODEL.to_owned(),
            idle_timeout: IDLE_TIMEOUT,
        },
        workload: Arc::clone(workload),
        outcome: Mutex::new(SimulationResult::new(&args.settings(), workload)),
        lateness: Mutex::default(),
        started: Instant::now(),
        scale: args.time_scale,
        finished: workload.requests.iter().map(|_| CancellationToken::new()).collect(),
        hints: return_hints(workload, hinted, 1),
    });
    let tasks = TaskTracker::new();
    for index in (0..workload.requests.len()).map(WorkloadIndex::new) {
        let run = Arc::clone(&run);
        supervisor.spawn("live-request", tasks.track_future(async move { run.send(index).await }));
    }
    tasks.close();
    tasks.wait().await;
    let summary = run.outcome.lock().summary();
    let mut lateness = std::mem::take(&mut *run.lateness.lock());
    lateness.sort_by(f64::total_cmp);
    Ok(LiveRunResult { summary, lateness: crate::simulate::quantile(&lateness, 0.99) })
}

/// A completion request whose prompt has the tokens of its blocks.
fn body(workload: &SimulatedWorkload, index: WorkloadIndex) -> Vec<u8> {
    let request = workload.request(index);
    let mut text = String::with_capacity(4 * request.input_tokens as usize + 200);
    let _ = write!(
        text,
        r#"{{"model":"{MODEL}","max_tokens":{},"stream":true,"stream_options":{{"include_usage":true}},"ignore_eos":true,"prompt":["#,
        request.output_tokens.max(1)
    );
    let mut left = u64::from(request.input_tokens);
    for &block in workload.blocks(index) {
        let tokens = left.min(u64::from(workload.block_tokens));
        for index in 0..tokens {
            let _ = write!(text, "{},", FIRST_TOKEN + mix(u64::from(block), index) % TOKEN_RANGE);
        }
        left -= tokens;
    }
    // Removes the last comma.
    text.pop();
    text.push_str("]}");
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::trace::parse_trace;

    #[test]
    fn prompts_have_the_lengths_and_prefixes_of_the_trace() {
        let row = |ids: &str, length: u32| {
            format!(r#"{{"timestamp":0,"input_length":{length},"output_length":3,"hash_ids":{ids}}}"#)
        };
        let rows = [row("[1,2]", 1_000), row("[1,3]", 700)];
        let rows = parse_trace(rows.iter().map(String::as_str)).expect("a trace");
        let workload = SimulatedWorkload::of_rows(&rows, true);
        let prompt = |number| -> Vec<u64> {
            let body: serde_json::Value =
                serde_json::from_slice(&body(&workload, WorkloadIndex::new(number))).expect("JSON");
            body["prompt"].as_array().expect("ids").iter().filter_map(serde_json::Value::as_u64).collect()
        };
        let (first, second) = (prompt(0), prompt(1));
        assert_eq!((first.len(), second.len()), (1_000, 700));
        assert_eq!(first[..512], second[..512]);
        assert_ne!(first[512..600], second[512..600]);
    }
}
