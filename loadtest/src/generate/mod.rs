//! The load generator: an open loop, so a slow server gets no fewer requests.

pub mod arrival;
pub mod client;
pub mod measurements;
pub mod prompt;
pub mod report;
mod session_trace;
pub mod trace;

use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::arrival::{Arrival, ArrivalProcess};
pub use self::client::{LoadTarget, LoadTargetApi};
pub use self::measurements::{LoadMeasurements, RequestFailure, RequestMeasurement};
pub use self::report::LoadtestReport;

/// Default maximum number of requests in flight.
pub const DEFAULT_IN_FLIGHT: usize = 16_384;

/// Limits on a run's duration, requests and concurrency.
#[derive(Debug, Clone)]
pub struct LoadLimits {
    /// No request is sent after this time.
    pub duration: Option<Duration>,
    pub requests: Option<u64>,
    /// Maximum number of requests in flight; later ones wait, which counts as schedule delay.
    pub in_flight: usize,
}

/// A run of the load generator.
#[derive(Debug)]
pub struct LoadRun {
    pub target: LoadTarget,
    pub arrivals: ArrivalProcess,
    pub limits: LoadLimits,
    /// Whether a progress bar is drawn.
    pub progress: bool,
}

/// Sends the arrivals to the target and measures, until they end or `stop` is cancelled.
///
/// # Errors
/// The histograms cannot be created.
pub async fn generate(
    run: LoadRun,
    supervisor: &Supervisor,
    stop: &CancellationToken,
) -> anyhow::Result<LoadtestReport> {
    let LoadRun { target, arrivals, limits, progress } = run;
    let record = Arc::new(Mutex::new(LoadMeasurements::new()?));
    let target = Arc::new(target);
    let slots = Arc::new(Semaphore::new(limits.in_flight.clamp(1, Semaphore::MAX_PERMITS)));
    let bar = progress_bar(arrivals.total().or(limits.requests), progress);
    // Cancelled when the run is stopped early: requests in flight are dropped.
    let give_up = stop.child_token();
    let tasks = TaskTracker::new();
    let started = Instant::now();
    let mut sent = 0;
    for arrival in arrivals {
        if limits.requests.is_some_and(|max_requests| sent >= max_requests)
            || limits.duration.is_some_and(|duration| arrival.at >= duration)
        {
            break;
        }
        let due = started.checked_add(arrival.at).unwrap_or(started);
        let slot = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            slot = acquire_slot_at(due, &slots) => slot,
        };
        let Some(slot) = slot else { break };
        record.lock().lateness.saturating_record(measurements::microseconds(due.elapsed()).max(1));
        sent += 1;
        let (target, record, bar, give_up) =
            (Arc::clone(&target), Arc::clone(&record), bar.clone(), give_up.clone());
        let request = async move {
            let prompt = arrival.prompt();
            let result = tokio::select! {
                biased;
                () = give_up.cancelled() => None,
                result = target.send(&prompt, arrival.output_tokens) => Some(result),
            };
            if let Some(result) = result {
                record.lock().add(result);
            }
            bar.inc(1);
            drop(slot);
        };
        supervisor.spawn("loadtest-request", tasks.track_future(request));
    }
    tasks.close();
    tasks.wait().await;
    bar.finish_and_clear();
    let elapsed = started.elapsed();
    let record = std::mem::replace(&mut *record.lock(), LoadMeasurements::new()?);
    Ok(LoadtestReport { record, sent, elapsed, stopped_early: stop.is_cancelled() })
}

async fn acquire_slot_at(due: Instant, slots: &Arc<Semaphore>) -> Option<tokio::sync::OwnedSemaphorePermit> {
    tokio::time::sleep_until(due.into()).await;
    Arc::clone(slots).acquire_owned().await.ok()
}

fn progress_bar(total: Option<u64>, visible: bool) -> ProgressBar {
    // indicatif draws nothing when stderr is not a terminal.
    let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let template = match total {
        Some(_) => "{elapsed_precise} {wide_bar} {pos}/{len} {per_sec} {eta}",
        None => "{elapsed_precise} {spinner} {pos} completed {per_sec}",
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(total, target).with_style(style)
}
