//! Timing of requests: closed and open loop.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use moongate_loadtest::engine::monotonic_ns;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::client::{BenchConnection, ResponseTimings};
use super::prompts::PromptGenerator;
use super::report::{ExchangeTally, MeasurementWindow};

/// A request that takes longer counts as an error.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of concurrent requests in the open loop; one more ends the run, because the gateway does not keep up.
const MAX_IN_FLIGHT: usize = 4096;
/// Without a pause, a request that fails at once would be repeated at full speed.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(20);

/// Plan shared by all connections.
#[derive(Debug)]
pub(super) struct BenchLoadPlan {
    pub(super) port: u16,
    /// Number of events of a complete stream; `None` for JSON.
    pub(super) events: Option<u64>,
    pub(super) prompts: PromptGenerator,
    pub(super) window: MeasurementWindow,
    pub(super) ramp: Duration,
    /// Maximum random pause before a request. Without it, paced streams keep the relative timing with which they
    /// started. How many of their tokens arrive together, which determines most of their cost, would then be random for
    /// a whole run.
    pub(super) max_pause: Duration,
}

impl BenchLoadPlan {
    /// Sends one request; returns whether it succeeded.
    async fn send_once(
        &self,
        client: &mut BenchConnection,
        rng: &mut fastrand::Rng,
        request: &mut Vec<u8>,
        tally: &mut ExchangeTally,
    ) -> bool {
        self.prompts.write(rng, request);
        let mut seen = ResponseTimings::default();
        let sent = monotonic_ns();
        let exchange = client.exchange(request, self.events.is_some(), &mut seen);
        let outcome = match timeout(REQUEST_TIMEOUT, exchange).await {
            Ok(Ok(())) if self.events.is_some_and(|events| events != seen.events) => {
                Err(format!("{} events instead of {}", seen.events, self.events.unwrap_or(0)))
            }
            Ok(outcome) => outcome.map_err(|error| format!("{error:#}")),
            Err(_) => Err(format!("no complete response within {REQUEST_TIMEOUT:?}")),
        };
        tally.count(&self.window, sent, monotonic_ns(), seen, outcome)
    }
}

/// Each connection sends its next request when the previous one is complete.
pub(super) async fn closed_loop(
    plan: &Arc<BenchLoadPlan>,
    connections: u32,
) -> anyhow::Result<ExchangeTally> {
    let mut workers = JoinSet::new();
    for worker in 0..connections {
        let plan = plan.clone();
        workers.spawn(async move {
            sleep(plan.ramp * worker / connections).await;
            let mut client = BenchConnection::new(plan.port);
            let mut rng = fastrand::Rng::with_seed(monotonic_ns() ^ (u64::from(worker) << 48));
            let (mut request, mut tally) = (Vec::new(), ExchangeTally::default());
            while monotonic_ns() < plan.window.end_ns {
                if !plan.max_pause.is_zero() {
                    sleep(plan.max_pause.mul_f64(rng.f64())).await;
                }
                if !plan.send_once(&mut client, &mut rng, &mut request, &mut tally).await {
                    client = BenchConnection::new(plan.port);
                    sleep(PAUSE_AFTER_ERROR).await;
                }
            }
            tally
        });
    }
    let mut all = ExchangeTally::default();
    while let Some(tally) = workers.join_next().await {
        all.add(tally.context("a connection's task failed")?);
    }
    Ok(all)
}

/// Sends requests at equal intervals, each on an idle connection or a new one.
pub(super) async fn open_loop(plan: &Arc<BenchLoadPlan>, rps: u32) -> anyhow::Result<ExchangeTally> {
    let free: Arc<Mutex<Vec<BenchConnection>>> = Arc::default();
    let mut requests = JoinSet::new();
    let mut all = ExchangeTally::default();
    let mut tick = interval(Duration::from_secs(1) / rps);
    tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut rng = fastrand::Rng::with_seed(monotonic_ns());
    while monotonic_ns() < plan.window.end_ns {
        tokio::select! {
            _ = tick.tick() => {}
            Some(tally) = requests.join_next() => {
                all.add(tally.context("a request's task failed")?);
                continue;
            }
        }
        ensure!(
            requests.len() < MAX_IN_FLIGHT,
            "{MAX_IN_FLIGHT} requests are unanswered at {rps} requests per second"
        );
        let (plan, free, mut rng) = (plan.clone(), free.clone(), rng.fork());
        requests.spawn(async move {
            let idle = free.lock().pop();
            let mut client = idle.unwrap_or_else(|| BenchConnection::new(plan.port));
            let mut tally = ExchangeTally::default();
            if plan.send_once(&mut client, &mut rng, &mut Vec::new(), &mut tally).await {
                free.lock().push(client);
            }
            tally
        });
    }
    let deadline = Instant::now() + REQUEST_TIMEOUT + Duration::from_secs(1);
    while let Ok(Some(tally)) = tokio::time::timeout_at(deadline, requests.join_next()).await {
        all.add(tally.context("a request's task failed")?);
    }
    Ok(all)
}
