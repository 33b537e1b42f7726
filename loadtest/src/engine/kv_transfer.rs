//! How a choice gets its prompt's KV cache: computed, computed and sent, or pulled.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moongate_runtime::net::send_request;

use super::cache::{CachedTokens, PageOrigin};
use super::events::PromptPrefix;
use super::generation::{GenerationError, GenerationJob, KvPull};
use super::l3_store::L3Backend;
use super::object_store::PageObjects;
use super::prefill_queue::PrefillStart;
use super::rank::PrefetchPermit;
use super::rendezvous::{KvOffer, KvPullRequest, RendezvousError};
use super::stats::SimGaugeGuard;
use super::tokens::PageHashChain;
use super::{SimEngineState, SimProtocol};

/// SGLang does not fetch fewer tokens than this from the shared store.
const SGLANG_PREFETCH_THRESHOLD: usize = 256;

/// The offer of a computed prompt to decode engines.
pub(crate) fn kv_offer(chain: &PageHashChain, cached: CachedTokens) -> KvOffer {
    KvOffer { fingerprint: chain.fingerprint(), prompt_tokens: chain.len(), cached }
}

/// Computes a prompt, except the prefix that the caches contain.
pub(crate) async fn compute_prompt(
    engine: &Arc<SimEngineState>,
    job: &GenerationJob,
    chain: &PageHashChain,
) -> Result<CachedTokens, GenerationError> {
    let rank = engine.rank(job.rank);
    let waiting = SimGaugeGuard::new(&engine.stats, 1, |stats, by| {
        stats.waiting = stats.waiting.saturating_add_signed(by);
    });
    let (own, fetch) = lookup_prefix(engine, job, chain).await;
    let expected = fetch.as_ref().map_or(0, |fetch| fetch.tokens);
    let arrived = Arc::new(AtomicUsize::new(0));
    let uncached = uncached_gauge(engine, chain.len() - own - expected);
    let started = {
        let (engine, number, arrived) = (Arc::clone(engine), job.rank, Arc::clone(&arrived));
        let (pages, tokens) = (chain.pages().to_vec(), chain.len());
        move || {
            drop((waiting, uncached));
            let cached = {
                let mut cache = engine.rank(number).cache.lock();
                let found = cache.look_up(&pages, tokens);
                cache.attribute_fetched(found, &pages, tokens, arrived.load(Ordering::Relaxed))
            };
            PrefillStart {
                tokens,
                cached,
                gauges: vec![running_gauge(&engine), used_tokens_gauge(&engine, tokens)],
            }
        }
    };
    let fetch = fetch.map(|fetch| async {
        arrived.store(fetch.run(engine, job, chain).await, Ordering::Relaxed);
    });
    let Some(cached) = rank.prefill.compute(&job.timing, fetch, started).await else {
        return Err(GenerationError::new("the engine is shutting down"));
    };
    engine.insert_prefix(job.rank, &PromptPrefix { chain, tokens: &job.tokens, namespace: &job.namespace });
    engine.stats.update(|stats| {
        stats.prompt_tokens += chain.len() as u64;
        stats.cached_device_tokens += cached.device as u64;
        stats.cached_host_tokens += cached.host as u64;
        stats.cached_storage_tokens += cached.storage as u64;
    });
    Ok(cached)
}

fn uncached_gauge(engine: &SimEngineState, tokens: usize) -> SimGaugeGuard {
    SimGaugeGuard::new(&engine.stats, tokens, |stats, by| {
        stats.waiting_uncached_tokens = stats.waiting_uncached_tokens.saturating_add_signed(by);
    })
}

/// Counts a choice that computes or generates.
pub(crate) fn running_gauge(engine: &SimEngineState) -> SimGaugeGuard {
    SimGaugeGuard::new(&engine.stats, 1, |stats, by| {
        stats.running = stats.running.saturating_add_signed(by);
    })
}

/// Counts KV tokens in use.
pub(crate) fn used_tokens_gauge(engine: &SimEngineState, tokens: usize) -> SimGaugeGuard {
    SimGaugeGuard::new(&engine.stats, tokens, |stats, by| {
        stats.used_tokens = stats.used_tokens.saturating_add_signed(by);
    })
}

/// A planned fetch from the shared store.
struct PrefixFetch {
    /// Range of the prompt's pages.
    pages: Range<usize>,
    /// Number of tokens in these pages.
    tokens: usize,
    /// Counts those tokens as uncached until they are fetched.
    uncached: SimGaugeGuard,
    fetching: PrefetchPermit,
    /// Objects to get, if the store is a real one.
    objects: Option<PageObjects>,
}

/// Looks up the engine's cached tokens of a prompt, and the following pages in the shared store, if they are worth a
/// fetch.
async fn lookup_prefix(
    engine: &Arc<SimEngineState>,
    job: &GenerationJob,
    chain: &PageHashChain,
) -> (usize, Option<PrefixFetch>) {
    let threshold = match engine.options.protocol {
        SimProtocol::Sglang => SGLANG_PREFETCH_THRESHOLD,
        SimProtocol::Vllm => 0,
    };
    let (rank, page) = (engine.rank(job.rank), engine.options.page_size);
    let (own, range) = {
        let mut cache = rank.cache.lock();
        let own = cache.look_up(chain.pages(), chain.len()).total();
        (own, own / page..cache.usable(chain.pages(), chain.len()).len())
    };
    let missing = chain.len() - own;
    let Some(store) = engine.l3_backend().filter(|_| missing >= threshold) else { return (own, None) };
    let Some(fetching) = rank.try_reserve_fetch(missing) else { return (own, None) };
    let (found, objects) = match store {
        L3Backend::Simulated(store) => (store.lock().lookup(&chain.pages()[range.clone()]), None),
        L3Backend::Objects(store) => {
            let prefix = PromptPrefix { chain, tokens: &job.tokens, namespace: &job.namespace };
            let objects = PageObjects::of(&engine.options, &prefix);
            (store.lookup(&objects, &range, &engine.stats).await, Some(objects))
        }
    };
    let tokens = found * page;
    let fetch = (found > 0 && tokens >= threshold).then(|| PrefixFetch {
        pages: range.start..range.start + found,
        tokens,
        uncached: uncached_gauge(engine, tokens),
        fetching,
        objects,
    });
    (own, fetch)
}

impl PrefixFetch {
    /// Returns how many tokens were fetched.
    async fn run(
        mut self,
        engine: &Arc<SimEngineState>,
        job: &GenerationJob,
        chain: &PageHashChain,
    ) -> usize {
        let rank = engine.rank(job.rank);
        // One read at a time, because all reads share the network card.
        let card = rank.nic_lock.lock().await;
        let pause = super::timing::sleep_if_measurable(job.timing.storage_fetch(self.tokens));
        if let (Some(objects), Some(L3Backend::Objects(store))) = (&self.objects, engine.l3_backend()) {
            let (right, ()) = tokio::join!(store.get(objects, &self.pages, &engine.stats), pause);
            self.pages.end = self.pages.start + right;
        } else {
            pause.await;
        }
        drop(card);
        let prefix = PromptPrefix { chain, tokens: &job.tokens, namespace: &job.namespace };
        let tokens = self.pages.len() * engine.options.page_size;
        // An engine without a host level stores fetched pages on the device.
        rank.insert(&prefix, &PageOrigin::Fetched(self.pages));
        drop((self.uncached, self.fetching));
        tokens
    }
}

/// SGLang's prefill: starts only after the decode engine has connected, and responds after it has received everything.
pub(crate) async fn serve_to_decode(
    engine: &Arc<SimEngineState>,
    job: &GenerationJob,
    chain: &PageHashChain,
    key: &str,
) -> Result<CachedTokens, GenerationError> {
    let timeout = engine.options.pair_timeout();
    let entry = engine
        .rendezvous
        .register_prefill(key, job.rank)
        .map_err(|error| rendezvous_failure(error, timeout))?;
    {
        let _bootstrapping = SimGaugeGuard::new(&engine.stats, 1, |stats, by| {
            stats.bootstrapping = stats.bootstrapping.saturating_add_signed(by);
        });
        entry.decode_arrived(timeout).await.map_err(|error| rendezvous_failure(error, timeout))?;
    }
    let cached = compute_prompt(engine, job, chain).await?;
    entry.publish(kv_offer(chain, cached));
    let _transferring = transferring_gauge(engine);
    entry.pulled(timeout).await.map_err(|error| rendezvous_failure(error, timeout))?;
    engine.stats.update(|stats| stats.kv_sent += 1);
    Ok(cached)
}

fn transferring_gauge(engine: &SimEngineState) -> SimGaugeGuard {
    SimGaugeGuard::new(&engine.stats, 1, |stats, by| {
        stats.transferring = stats.transferring.saturating_add_signed(by);
    })
}

fn rendezvous_failure(error: RendezvousError, timeout: Duration) -> GenerationError {
    GenerationError::new(match error {
        RendezvousError::TimedOut => format!("Request timed out after {:.1}s in KVPoll.Bootstrapping", timeout.as_secs_f64()),
        RendezvousError::Conflict => "KVTransferError: follow_bootstrap_room conflict: the decode engine expects the KV cache at another data-parallel rank".to_owned(),
        RendezvousError::Unknown | RendezvousError::Full => "Internal server error".to_owned(),
    })
}

/// Requests a KV cache from the prefill engine and waits for it.
pub(crate) async fn pull_from_prefill(
    engine: &Arc<SimEngineState>,
    from: &KvPull,
) -> Result<KvOffer, GenerationError> {
    let timeout = engine.options.pair_timeout();
    let _transferring = transferring_gauge(engine);
    let asking = pull_until_ready(engine, from);
    tokio::time::timeout(timeout, asking).await.unwrap_or_else(|_| {
        Err(GenerationError::new(format!(
            "KVTransferError: Request {} timed out after {:.1}s in KVPoll.WaitingForInput",
            from.key,
            timeout.as_secs_f64()
        )))
    })
}

async fn pull_until_ready(engine: &Arc<SimEngineState>, from: &KvPull) -> Result<KvOffer, GenerationError> {
    let url = format!("{}/_sim/kv", from.server);
    let pull_request = KvPullRequest {
        key: from.key.clone(),
        rank: from.rank,
        engine_id: from.engine_id.clone(),
        wait: from.wait,
    };
    let started = tokio::time::Instant::now();
    let (patience, timeout) = (engine.options.handshake_timeout, engine.options.pair_timeout());
    loop {
        let request = engine.client.post(&url).json(&pull_request).timeout(timeout);
        let error = match send_request(request).await {
            Ok(response) if response.status().is_success() => match response.json::<KvOffer>().await {
                Ok(offer) => return Ok(offer),
                Err(error) => error,
            },
            Ok(response) => {
                // vLLM reports only this error, within a short time.
                super::timing::sleep_if_measurable(engine.timing.scaled(0.15)).await;
                let status = response.status();
                let message = if from.retries_connect {
                    format!("KVTransferError: {status}")
                } else {
                    "Internal server error".to_owned()
                };
                return Err(GenerationError::new(message));
            }
            Err(error) => error,
        };
        if !from.retries_connect {
            return Err(GenerationError::new("Internal server error"));
        }
        if !error.is_connect() {
            return Err(GenerationError::new(format!(
                "KVTransferError: Lost connection with prefill instance {}",
                from.server
            )));
        }
        if started.elapsed() >= patience {
            return Err(GenerationError::new(format!(
                "Decode handshake failed for request {}: Could not fetch prefill parallel info from bootstrap server {} after 15 attempts",
                from.key, from.server
            )));
        }
        tokio::time::sleep((patience / 14).max(Duration::from_millis(1))).await;
    }
}
