//! One queue of prefill work per rank.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::cache::CachedTokens;
use super::stats::{SimGaugeGuard, SimStatsRecorder};
use super::timing::{Pacer, ScaledTiming};

/// Maximum number of queued prefills per rank; later ones wait for a slot.
const MAX_QUEUED_PREFILLS: usize = 65_536;

/// State of a prompt when its computation starts.
pub(crate) struct PrefillStart {
    pub(crate) tokens: usize,
    pub(crate) cached: CachedTokens,
    /// Count the prompt as running until dropped.
    pub(crate) gauges: Vec<SimGaugeGuard>,
}

type PrefillStarter = Box<dyn FnOnce() -> PrefillStart + Send>;

struct SimQueuedPrefill {
    number: u64,
    /// Whether its fetch has ended.
    ready: bool,
    on_start: PrefillStarter,
    /// Time model of this request, which a fault may slow down.
    timing: ScaledTiming,
    done: oneshot::Sender<CachedTokens>,
}

struct RunningPrefill {
    left: usize,
    /// Tokens already in the KV cache.
    context: usize,
    /// Seconds to load the host-cached part, during the first pass.
    load_s: f64,
    timing: ScaledTiming,
    started: bool,
    start_state: PrefillStart,
    done: oneshot::Sender<CachedTokens>,
}

impl SimQueuedPrefill {
    fn start(self) -> RunningPrefill {
        let Self { on_start, timing, done, .. } = self;
        let start_state = on_start();
        let context = start_state.cached.total();
        let from_host = start_state.cached.host + start_state.cached.storage;
        RunningPrefill {
            left: start_state.tokens.saturating_sub(context).max(1),
            context,
            load_s: timing.model.host_load_s(from_host),
            timing,
            started: false,
            start_state,
            done,
        }
    }
}

enum PrefillQueueMessage {
    Add(SimQueuedPrefill),
    Ready(u64),
    /// A caller no longer waits: [`PrefillBatch::admit`] removes its prompt.
    Wake,
}

/// Wakes the worker when a caller stops waiting: an idle worker would keep the prompt, and count it as waiting, until the
/// next one arrives.
struct WorkerWakeGuard<'q>(&'q mpsc::Sender<PrefillQueueMessage>);

impl Drop for WorkerWakeGuard<'_> {
    fn drop(&mut self) {
        // A full queue wakes the worker anyway.
        let _ = self.0.try_send(PrefillQueueMessage::Wake);
    }
}

/// Handle of one rank's prefill queue.
#[derive(Debug, Clone)]
pub(crate) struct PrefillQueue {
    messages: mpsc::Sender<PrefillQueueMessage>,
    next: Arc<AtomicU64>,
}

impl PrefillQueue {
    /// Creates the queue, and its worker future, which ends with `stop`.
    pub(crate) fn new(
        passes: PassLimits,
        stats: Arc<SimStatsRecorder>,
        stop: CancellationToken,
    ) -> (Self, impl Future<Output = ()>) {
        let (messages, receiver) = mpsc::channel(MAX_QUEUED_PREFILLS);
        let worker = async move {
            tokio::select! {
                () = run_worker(receiver, passes, stats) => {}
                () = stop.cancelled() => {}
            }
        };
        (Self { messages, next: Arc::default() }, worker)
    }

    /// Waits in the queue and for the computation. Other prompts overtake while `fetch` is pending. `begin` is called
    /// when the computation starts. Dropping the future removes the prompt. `None` if the engine has
    /// stopped.
    pub(crate) async fn compute(
        &self,
        timing: &ScaledTiming,
        fetch: Option<impl Future<Output = ()>>,
        on_start: impl FnOnce() -> PrefillStart + Send + 'static,
    ) -> Option<CachedTokens> {
        // Dropped after `computed`, so that the worker finds the prompt abandoned.
        let _wakes_worker = WorkerWakeGuard(&self.messages);
        let (done, computed) = oneshot::channel();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let ready = fetch.is_none();
        let waiting =
            SimQueuedPrefill { number, ready, on_start: Box::new(on_start), timing: timing.clone(), done };
        self.messages.send(PrefillQueueMessage::Add(waiting)).await.ok()?;
        if let Some(fetch) = fetch {
            fetch.await;
            self.messages.send(PrefillQueueMessage::Ready(number)).await.ok()?;
        }
        computed.await.ok()
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct PassLimits {
    /// Maximum number of tokens per pass.
    pub(crate) chunk_tokens: usize,
    /// Whether a pass takes tokens of several prompts.
    pub(crate) packed: bool,
}

/// Waiting and running prompts of one rank.
#[derive(Default)]
struct PrefillBatch {
    waiting: VecDeque<SimQueuedPrefill>,
    running: Vec<RunningPrefill>,
}

impl PrefillBatch {
    fn apply(&mut self, message: PrefillQueueMessage) {
        match message {
            PrefillQueueMessage::Add(waiting) => self.waiting.push_back(waiting),
            PrefillQueueMessage::Ready(number) => {
                if let Some(waiting) = self.waiting.iter_mut().find(|waiting| waiting.number == number) {
                    waiting.ready = true;
                }
            }
            PrefillQueueMessage::Wake => {}
        }
    }

    /// Starts ready prompts in order, as far as the pass has capacity.
    fn admit(&mut self, passes: PassLimits) {
        // Clients may have disconnected.
        self.running.retain(|running| !running.done.is_closed());
        self.waiting.retain(|waiting| !waiting.done.is_closed());
        loop {
            let used_tokens: usize = self.running.iter().map(|running| running.left).sum();
            let has_capacity =
                if passes.packed { used_tokens < passes.chunk_tokens } else { self.running.is_empty() };
            let next = self.waiting.iter().position(|waiting| waiting.ready).filter(|_| has_capacity);
            let Some(next) = next.and_then(|index| self.waiting.remove(index)) else { return };
            self.running.push(next.start());
        }
    }

    /// Takes up to `budget` tokens from the running prompts and returns the duration of the pass.
    fn run_pass(&mut self, mut budget: usize) -> PassDuration {
        let mut duration = Duration::ZERO;
        let mut busy_s = 0.0;
        let mut base = Duration::ZERO;
        let mut base_s = 0.0_f64;
        for job in &mut self.running {
            if budget == 0 {
                break;
            }
            let part = job.left.min(budget);
            let mut seconds = job.timing.prefill_s(part, job.context);
            if !job.started {
                job.started = true;
                // Layers are loaded while earlier ones are computed.
                seconds = seconds.max(job.load_s);
                // Paid once per pass, however many prompts start in it.
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
        PassDuration {
            duration: duration + base,
            busy_us: u64::try_from(busy.as_micros()).unwrap_or(u64::MAX),
        }
    }

    /// Completes the prompts that are entirely computed.
    fn notify_finished(&mut self) {
        for computed in self.running.extract_if(.., |running| running.left == 0) {
            let RunningPrefill { start_state, done, .. } = computed;
            drop(start_state.gauges);
            // The request may have been dropped in the meantime.
            let _ = done.send(start_state.cached);
        }
    }
}

async fn run_worker(
    mut receiver: mpsc::Receiver<PrefillQueueMessage>,
    passes: PassLimits,
    stats: Arc<SimStatsRecorder>,
) {
    let mut prompts = PrefillBatch::default();
    let mut pacer = Pacer::start();
    loop {
        while let Ok(message) = receiver.try_recv() {
            prompts.apply(message);
        }
        prompts.admit(passes);
        if prompts.running.is_empty() {
            let Some(message) = receiver.recv().await else { return };
            prompts.apply(message);
            pacer = Pacer::start();
            continue;
        }
        let pass = prompts.run_pass(passes.chunk_tokens);
        pacer.wait(pass.duration).await;
        stats.update(|stats| {
            stats.prefill_busy_us = stats.prefill_busy_us.saturating_add(pass.busy_us);
        });
        prompts.notify_finished();
    }
}

struct PassDuration {
    duration: Duration,
    busy_us: u64,
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::engine::EngineTimeModel;

    const PASSES: PassLimits = PassLimits { chunk_tokens: 8_192, packed: true };

    fn timing() -> ScaledTiming {
        ScaledTiming::new(EngineTimeModel::default(), 1.0)
    }

    fn prefill_start(tokens: usize, device: usize) -> PrefillStart {
        PrefillStart {
            tokens,
            cached: CachedTokens { device, ..CachedTokens::default() },
            gauges: Vec::new(),
        }
    }

    /// Waiting prompts, each with its tokens and its cached tokens on the device.
    fn waiting(sizes: &[(usize, usize)]) -> (PrefillBatch, Vec<oneshot::Receiver<CachedTokens>>) {
        let mut prompts = PrefillBatch::default();
        let mut receivers = Vec::new();
        for (number, &(tokens, device)) in (0..).zip(sizes) {
            let (done, receiver) = oneshot::channel();
            receivers.push(receiver);
            let on_start = Box::new(move || prefill_start(tokens, device));
            prompts.apply(PrefillQueueMessage::Add(SimQueuedPrefill {
                number,
                ready: true,
                on_start,
                timing: timing(),
                done,
            }));
        }
        (prompts, receivers)
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_queue_removes_an_abandoned_prompt() {
        let stats = Arc::new(SimStatsRecorder::new(1));
        let (queue, worker) = PrefillQueue::new(PASSES, Arc::clone(&stats), CancellationToken::new());
        let counted = Arc::new(());
        let held = Arc::clone(&counted);
        let timing = timing();
        let prompt = queue.compute(&timing, Some(std::future::pending()), move || {
            drop(held);
            prefill_start(100, 0)
        });
        tokio::select! {
            () = worker => unreachable!("it runs until it is stopped"),
            () = async {
                let gives_up = tokio::time::timeout(Duration::from_secs(1), prompt).await;
                assert!(gives_up.is_err(), "its fetch never ends");
                tokio::time::sleep(Duration::from_secs(1)).await;
                assert_eq!(Arc::strong_count(&counted), 1, "the prompt is still queued");
            } => {}
        }
    }

    #[test]
    fn chunks_of_a_long_prompt_sum_to_the_formula() {
        let (mut prompts, _receivers) = waiting(&[(25_000, 5_000)]);
        prompts.admit(PASSES);
        let mut total = Duration::ZERO;
        let mut passes = 0;
        while prompts.running[0].left > 0 {
            total += prompts.run_pass(8_192).duration;
            passes += 1;
        }
        let expected = 0.048 + 1.027e-4 * 20_000.0 + 7.19e-9 * 20_000.0 * (5_000.0 + 10_000.0);
        assert_eq!(passes, 3);
        assert!((total.as_secs_f64() - expected).abs() < 1e-6, "{total:?} instead of {expected}");
    }

    #[test]
    fn short_prompts_share_a_pass_and_its_base_cost() {
        let (mut prompts, _receivers) = waiting(&[(1_000, 0), (1_000, 0)]);
        prompts.admit(PASSES);
        let pass = prompts.run_pass(8_192);
        let expected = 0.048 + 2.0 * (1.027e-4 * 1_000.0 + 7.19e-9 * 1_000.0 * 500.0);
        assert!((pass.duration.as_secs_f64() - expected).abs() < 1e-6);
        assert!(prompts.running.iter().all(|job| job.left == 0));
    }

    #[test]
    fn unpacked_prompts_run_singly_in_order_of_readiness() {
        let passes = PassLimits { packed: false, ..PASSES };
        let (mut prompts, mut receivers) = waiting(&[(100, 0), (200, 0), (300, 0)]);
        prompts.waiting[0].ready = false;
        prompts.admit(passes);
        assert_eq!(prompts.running.iter().map(|job| job.left).collect::<Vec<_>>(), [200]);
        prompts.apply(PrefillQueueMessage::Ready(0));
        prompts.admit(passes);
        assert_eq!(prompts.running.len(), 1, "the running one is not joined");
        prompts.run_pass(8_192);
        prompts.notify_finished();
        assert!(receivers[1].try_recv().is_ok() && receivers[2].try_recv().is_err());
        prompts.admit(passes);
        assert_eq!(prompts.running[0].left, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn prompts_are_served_in_turn() {
        let stats = Arc::new(SimStatsRecorder::new(1));
        let passes = PassLimits { chunk_tokens: 1_000, packed: true };
        let (queue, worker) = PrefillQueue::new(passes, stats, CancellationToken::new());
        let timing = timing();
        let started_at = Instant::now();
        let no_fetch = None::<std::future::Ready<()>>;
        let client = async {
            let first = queue.compute(&timing, no_fetch.clone(), || prefill_start(1_000, 0));
            let second = queue.compute(&timing, no_fetch, || prefill_start(1_000, 0));
            tokio::join!(
                async {
                    first.await;
                    started_at.elapsed()
                },
                async {
                    second.await;
                    started_at.elapsed()
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

    #[tokio::test(start_paused = true)]
    async fn fetching_prompt_is_overtaken() {
        let stats = Arc::new(SimStatsRecorder::new(1));
        let (queue, worker) = PrefillQueue::new(PASSES, stats, CancellationToken::new());
        let timing = timing();
        let started_at = Instant::now();
        let fetch = Some(tokio::time::sleep(Duration::from_secs(9)));
        let client = async {
            let slow = queue.compute(&timing, fetch, || prefill_start(1_000, 0));
            let quick = async {
                queue.compute(&timing, None::<std::future::Ready<()>>, || prefill_start(1_000, 0)).await;
                started_at.elapsed()
            };
            tokio::join!(slow, quick).1
        };
        let quick = tokio::select! {
            quick = client => quick,
            () = worker => panic!("the worker ended"),
        };
        assert!(quick < Duration::from_secs(1) && started_at.elapsed() > Duration::from_secs(9), "{quick:?}");
    }
}
