//! The time model: one queue of prefill work per rank, and the pace of decoding.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::config::ServiceModel;
use super::stats::Stats;

/// Most prefill jobs that wait in one rank's queue; whoever comes later waits for a place.
const MAX_QUEUED_PREFILLS: usize = 65_536;
/// Below this a sleep would overshoot more than it lasts: the timer counts milliseconds.
const SHORTEST_SLEEP: Duration = Duration::from_micros(500);

/// A service model on a clock that runs `scale` times faster.
#[derive(Debug, Clone)]
pub(crate) struct Timing {
    model: ServiceModel,
    scale: f64,
}

impl Timing {
    pub(crate) fn new(model: ServiceModel, scale: f64) -> Self {
        Self { model, scale }
    }

    /// The same, `factor` times slower.
    pub(crate) fn slowed(&self, factor: f64) -> Self {
        let factor = if factor.is_finite() && factor > 0.0 { factor } else { 1.0 };
        Self { model: self.model.clone(), scale: self.scale / factor }
    }

    /// Seconds of the imitated engine as a duration of ours.
    pub(crate) fn scaled(&self, seconds: f64) -> Duration {
        Duration::try_from_secs_f64(seconds.max(0.0) / self.scale).unwrap_or(Duration::MAX)
    }

    fn prefill_s(&self, new: usize, context: usize) -> f64 {
        self.model.prefill_compute_s(new, context)
    }

    /// Time to hand a prompt's key-value cache from prefill to decode.
    pub(crate) fn transfer(&self, tokens: usize) -> Duration {
        self.scaled(self.model.transfer_s(tokens))
    }

    /// Time to read this many tokens from the shared store.
    pub(crate) fn storage_fetch(&self, tokens: usize) -> Duration {
        self.scaled(self.model.storage_fetch_s(tokens))
    }

    /// Seconds to load this many tokens from host memory.
    pub(crate) fn host_load_s(&self, tokens: usize) -> f64 {
        self.model.host_load_s(tokens)
    }

    /// Time of one decode step with this many sequences.
    pub(crate) fn decode_step(&self, sequences: u64) -> Duration {
        self.scaled(self.model.decode_step_s(sequences))
    }
}

/// Sleeps so that a sequence of waits takes their sum, however coarse the timer is.
#[derive(Debug)]
pub(crate) struct Pacer {
    due: Instant,
}

impl Pacer {
    pub(crate) fn start() -> Self {
        Self { due: Instant::now() }
    }

    pub(crate) async fn wait(&mut self, duration: Duration) {
        let now = Instant::now();
        // Lost time is made up for, up to a second; an idle phase is not.
        self.due = self.due.max(now.checked_sub(Duration::from_secs(1)).unwrap_or(now));
        self.due = self.due.checked_add(duration).unwrap_or(self.due);
        if self.due.saturating_duration_since(now) >= SHORTEST_SLEEP {
            tokio::time::sleep_until(self.due).await;
        }
    }
}

/// Sleeps unless the time is too short for the timer.
pub(crate) async fn pause(duration: Duration) {
    if duration >= SHORTEST_SLEEP {
        tokio::time::sleep(duration).await;
    }
}

/// One prompt to compute.
struct PrefillJob {
    /// Tokens left to compute.
    left: usize,
    /// Tokens before those.
    context: usize,
    /// Seconds to load the host-cached part, charged with the first pass.
    load_s: f64,
    /// Slowness of this request.
    timing: Timing,
    started: bool,
    done: oneshot::Sender<()>,
}

/// The queue of one rank's prefill work.
#[derive(Debug, Clone)]
pub(crate) struct PrefillQueue {
    jobs: mpsc::Sender<PrefillJob>,
}

impl PrefillQueue {
    /// The queue, and the work of its worker until `stop`.
    pub(crate) fn new(
        chunk_tokens: usize,
        stats: Arc<Stats>,
        stop: CancellationToken,
    ) -> (Self, impl Future<Output = ()>) {
        let (jobs, receiver) = mpsc::channel(MAX_QUEUED_PREFILLS);
        let worker = async move {
            tokio::select! {
                () = work(receiver, chunk_tokens, stats) => {}
                () = stop.cancelled() => {}
            }
        };
        (Self { jobs }, worker)
    }

    /// Waits in the queue and for the computation. Dropping the future takes the job out at the next pass.
    /// False if the engine has stopped.
    pub(crate) async fn compute(&self, timing: &Timing, new: usize, cached: usize, load_s: f64) -> bool {
        let (done, computed) = oneshot::channel();
        let timing = timing.clone();
        let job = PrefillJob { left: new.max(1), context: cached, load_s, timing, started: false, done };
        self.jobs.send(job).await.is_ok() && computed.await.is_ok()
    }
}

async fn work(mut receiver: mpsc::Receiver<PrefillJob>, chunk_tokens: usize, stats: Arc<Stats>) {
    let mut queue = VecDeque::new();
    let mut pacer = Pacer::start();
    loop {
        if queue.is_empty() {
            let Some(job) = receiver.recv().await else { return };
            queue.push_back(job);
            pacer = Pacer::start();
        }
        while let Ok(job) = receiver.try_recv() {
            queue.push_back(job);
        }
        queue.retain(|job: &PrefillJob| !job.done.is_closed());
        let pass = pass_of(&mut queue, chunk_tokens);
        pacer.wait(pass.duration).await;
        stats.change(|stats| {
            stats.prefill_busy_us = stats.prefill_busy_us.saturating_add(pass.busy_us);
        });
        while queue.front().is_some_and(|job| job.left == 0) {
            if let Some(job) = queue.pop_front() {
                // The request may have gone meanwhile.
                let _ = job.done.send(());
            }
        }
    }
}

struct Pass {
    duration: Duration,
    busy_us: u64,
}

/// Takes up to `budget` tokens from the front of the queue and says how long they take together.
fn pass_of(queue: &mut VecDeque<PrefillJob>, mut budget: usize) -> Pass {
    let mut duration = Duration::ZERO;
    let mut busy_s = 0.0;
    let mut base = Duration::ZERO;
    let mut base_s = 0.0_f64;
    for job in queue.iter_mut() {
        if budget == 0 {
            break;
        }
        let part = job.left.min(budget);
        let mut seconds = job.timing.prefill_s(part, job.context);
        if !job.started {
            job.started = true;
            seconds += job.load_s;
            // Paid once per pass, however many prompts begin in it.
            base = base.max(job.timing.scaled(job.timing.model.prefill_base_s));
            base_s = base_s.max(job.timing.model.prefill_base_s);
        }
        duration += job.timing.scaled(seconds);
        busy_s += seconds;
        job.left -= part;
        job.context += part;
        budget -= part;
    }
    let busy = Duration::try_from_secs_f64(busy_s + base_s).unwrap_or_default();
    Pass { duration: duration + base, busy_us: u64::try_from(busy.as_micros()).unwrap_or(u64::MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(left: usize, context: usize) -> (PrefillJob, oneshot::Receiver<()>) {
        let (done, receiver) = oneshot::channel();
        let timing = Timing::new(ServiceModel::default(), 1.0);
        (PrefillJob { left, context, load_s: 0.0, timing, started: false, done }, receiver)
    }

    #[test]
    fn chunks_of_a_long_prompt_sum_to_the_formula() {
        let (long, _receiver) = job(20_000, 5_000);
        let mut queue = VecDeque::from([long]);
        let mut total = Duration::ZERO;
        let mut passes = 0;
        while queue[0].left > 0 {
            total += pass_of(&mut queue, 8_192).duration;
            passes += 1;
        }
        let expected = 0.048 + 1.027e-4 * 20_000.0 + 7.19e-9 * 20_000.0 * (5_000.0 + 10_000.0);
        assert_eq!(passes, 3);
        assert!((total.as_secs_f64() - expected).abs() < 1e-6, "{total:?} instead of {expected}");
    }

    #[test]
    fn short_prompts_share_a_pass_and_its_base_cost() {
        let (one, _keep) = job(1_000, 0);
        let (two, _keep_too) = job(1_000, 0);
        let mut queue = VecDeque::from([one, two]);
        let pass = pass_of(&mut queue, 8_192);
        let expected = 0.048 + 2.0 * (1.027e-4 * 1_000.0 + 7.19e-9 * 1_000.0 * 500.0);
        assert!((pass.duration.as_secs_f64() - expected).abs() < 1e-6);
        assert!(queue.iter().all(|job| job.left == 0));
    }

    #[tokio::test(start_paused = true)]
    async fn prompts_are_served_in_turn() {
        let stats = Arc::new(Stats::new(1));
        let (queue, worker) = PrefillQueue::new(1_000, stats, CancellationToken::new());
        let timing = Timing::new(ServiceModel::default(), 1.0);
        let begin = Instant::now();
        let client = async {
            let first = queue.compute(&timing, 1_000, 0, 0.0);
            let second = queue.compute(&timing, 1_000, 0, 0.0);
            tokio::join!(
                async {
                    first.await;
                    begin.elapsed()
                },
                async {
                    second.await;
                    begin.elapsed()
                }
            )
        };
        let (first, second) = tokio::select! {
            times = client => times,
            () = worker => panic!("the worker ended"),
        };
        let one = 0.048 + 0.1027 + 7.19e-9 * 500_000.0;
        assert!((first.as_secs_f64() - one).abs() < 0.005, "{first:?}");
        assert!((second.as_secs_f64() - 2.0 * one).abs() < 0.005, "{second:?}");
    }
}
