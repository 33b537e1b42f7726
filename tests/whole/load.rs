//! Clients with conversations, each of which sends its next turn when it has the answer to the last.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moongate_loadtest::generate::prompt::unique_prompt;
use moongate_loadtest::generate::{LoadTarget, LoadTargetApi, RequestFailure, RequestMeasurement};
use parking_lot::Mutex;
use reqwest::header::HeaderMap;
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// So many keep eight prefills at 40 % of what they can compute, and seven at 45 % while one of them is away.
const CLIENTS: u64 = 46;
/// Turns of a conversation, after which its client begins the next.
const TURNS: u64 = 6;
/// Tokens that a turn adds.
const TURN_TOKENS: usize = 1024;
const ANSWER_TOKENS: u32 = 16;
/// Between an answer and the next turn, on average. People do not answer in step: clients that did would find a time at which none is in
/// another's way, and keep it until something disturbs them.
const PAUSE: Duration = Duration::from_secs(2);
/// No pause is longer than so many average ones.
const LONGEST_PAUSE: f64 = 5.0;

/// One request that has ended.
pub(crate) struct RequestSample {
    begun: Instant,
    outcome: Result<RequestMeasurement, RequestFailure>,
}

/// Clients at work.
pub(crate) struct ConversationLoad {
    samples: Arc<Mutex<Vec<RequestSample>>>,
    stop: Arc<AtomicBool>,
    clients: JoinSet<()>,
}

/// What was seen in a span of time.
#[derive(Debug, Clone)]
pub(crate) struct LoadSummary {
    pub(crate) requests: usize,
    pub(crate) failures: Vec<RequestFailure>,
    /// Share of prompt tokens that came from a cache.
    pub(crate) cached: f64,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) duration: Duration,
}

impl ConversationLoad {
    pub(crate) fn start(base: &str, model: &str) -> Self {
        let (samples, stop) = (Arc::<Mutex<Vec<RequestSample>>>::default(), Arc::<AtomicBool>::default());
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let target = LoadTarget {
                client: reqwest::Client::builder().no_proxy().build().unwrap(),
                base_url: base.to_owned(),
                api: LoadTargetApi::Chat,
                model: model.to_owned(),
                idle_timeout: Duration::from_secs(120),
            };
            clients.spawn(converse(target, number, Arc::clone(&samples), Arc::clone(&stop)));
        }
        Self { samples, stop, clients }
    }

    /// Waits until so many more requests have ended.
    pub(crate) async fn wait_for_requests(&self, count: usize) {
        let wanted = self.samples.lock().len() + count;
        while self.samples.lock().len() < wanted {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What was seen of the requests that began in this time.
    pub(crate) fn summary(&self, from: Instant, to: Instant) -> LoadSummary {
        let samples = self.samples.lock();
        let within = samples.iter().filter(|sample| (from..to).contains(&sample.begun));
        let (mut first, mut failures, mut cached, mut tokens) = (Vec::new(), Vec::new(), 0, 0);
        for sample in within {
            match &sample.outcome {
                Ok(outcome) => {
                    first.push(outcome.ttft.unwrap());
                    cached += outcome.cached_tokens;
                    tokens += outcome.prompt_tokens;
                }
                Err(failure) => failures.push(failure.clone()),
            }
        }
        first.sort();
        let at = |share: f64| first.get((first.len() as f64 * share) as usize).copied().unwrap_or_default();
        let cached = cached as f64 / tokens as f64;
        let requests = first.len() + failures.len();
        LoadSummary { requests, failures, cached, p50: at(0.5), p99: at(0.99), duration: to - from }
    }

    /// Lets every client end its request.
    pub(crate) async fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended.unwrap();
        }
    }
}

async fn converse(
    target: LoadTarget,
    client: u64,
    samples: Arc<Mutex<Vec<RequestSample>>>,
    stop: Arc<AtomicBool>,
) {
    for conversation in 0.. {
        // Some have begun earlier than others, so that there are as many first turns as last ones at any time.
        let turns = if conversation == 0 { TURNS - client % TURNS } else { TURNS };
        let mut messages: Vec<Value> = Vec::new();
        for turn in 0..turns {
            let seed = (client * 1_000_000 + conversation) * TURNS + turn;
            tokio::time::sleep(pause(seed)).await;
            if stop.load(Ordering::Relaxed) {
                return;
            }
            messages.push(json!({ "role": "user", "content": unique_prompt(TURN_TOKENS, seed) }));
            let body = json!({ "model": target.model, "messages": messages, "max_tokens": ANSWER_TOKENS,
                "stream": true, "stream_options": { "include_usage": true }, "temperature": 0 });
            let begun = Instant::now();
            let outcome =
                target.post("chat/completions", body.to_string().into_bytes(), HeaderMap::new()).await;
            samples.lock().push(RequestSample { begun, outcome });
            messages.push(json!({ "role": "assistant", "content": "yes" }));
        }
    }
}

/// Exponentially distributed, as times between people's messages are. Multiples of the golden ratio stand for chance, so that every run
/// has the same.
fn pause(seed: u64) -> Duration {
    let chance = (seed as f64 * 0.618_033_988_749_895).fract();
    PAUSE.mul_f64((-(1.0 - chance).ln()).min(LONGEST_PAUSE))
}
