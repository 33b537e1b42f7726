//! How a choice comes by its prompt's key-value cache: computed, computed and sent, or taken.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moongate_runtime::net::send_request;

use super::cache::{CachedTokens, Kept};
use super::events::Prefix;
use super::object_store::Objects;
use super::prefill_queue::Begun;
use super::rank::Fetching;
use super::rendezvous::{KvAsk, KvOffer, Missed};
use super::speech::{EngineError, Job, Take};
use super::stats::Gauge;
use super::store::Tier;
use super::tokens::PageChain;
use super::{Engine, Face};

/// SGLang leaves the shared store alone for fewer tokens than this.
const SGLANG_PREFETCH_THRESHOLD: usize = 256;

/// What is handed over of a computed prompt.
pub(crate) fn offer(chain: &PageChain, cached: CachedTokens) -> KvOffer {
    KvOffer { fingerprint: chain.fingerprint(), prompt_tokens: chain.len(), cached }
}

/// Computes a prompt behind what the caches hold of it.
pub(crate) async fn compute(
    engine: &Arc<Engine>,
    job: &Job,
    chain: &PageChain,
) -> Result<CachedTokens, EngineError> {
    let rank = engine.rank(job.rank);
    let waiting = Gauge::new(&engine.stats, 1, |stats, by| {
        stats.waiting = stats.waiting.saturating_add_signed(by);
    });
    let (own, fetch) = look_up(engine, job, chain).await;
    let expected = fetch.as_ref().map_or(0, |fetch| fetch.tokens);
    let arrived = Arc::new(AtomicUsize::new(0));
    let uncached = uncached(engine, chain.len() - own - expected);
    let begin = {
        let (engine, number, arrived) = (Arc::clone(engine), job.rank, Arc::clone(&arrived));
        let (pages, tokens) = (chain.pages().to_vec(), chain.len());
        move || {
            drop((waiting, uncached));
            let cached = {
                let mut cache = engine.rank(number).cache.lock();
                let found = cache.look_up(&pages, tokens);
                cache.with_fetched(found, &pages, tokens, arrived.load(Ordering::Relaxed))
            };
            Begun { tokens, cached, gauges: vec![running(&engine), used(&engine, tokens)] }
        }
    };
    let fetch = fetch.map(|fetch| async {
        arrived.store(fetch.run(engine, job, chain).await, Ordering::Relaxed);
    });
    let Some(cached) = rank.prefill.compute(&job.timing, fetch, begin).await else {
        return Err(EngineError::new("the engine is shutting down"));
    };
    engine.remember(job.rank, &Prefix { chain, tokens: &job.tokens, namespace: &job.namespace });
    engine.stats.change(|stats| {
        stats.prompt_tokens += chain.len() as u64;
        stats.cached_device_tokens += cached.device as u64;
        stats.cached_host_tokens += cached.host as u64;
        stats.cached_storage_tokens += cached.storage as u64;
    });
    Ok(cached)
}

fn uncached(engine: &Engine, tokens: usize) -> Gauge {
    Gauge::new(&engine.stats, tokens, |stats, by| {
        stats.waiting_uncached_tokens = stats.waiting_uncached_tokens.saturating_add_signed(by);
    })
}

/// Counts a choice that computes or generates.
pub(crate) fn running(engine: &Engine) -> Gauge {
    Gauge::new(&engine.stats, 1, |stats, by| {
        stats.running = stats.running.saturating_add_signed(by);
    })
}

/// Counts KV tokens in use.
pub(crate) fn used(engine: &Engine, tokens: usize) -> Gauge {
    Gauge::new(&engine.stats, tokens, |stats, by| {
        stats.used_tokens = stats.used_tokens.saturating_add_signed(by);
    })
}

/// What a prompt is to get from the shared store.
struct Fetch {
    /// Which of its pages.
    pages: Range<usize>,
    /// Their tokens.
    tokens: usize,
    /// Those tokens, counted as not cached until they are there.
    uncached: Gauge,
    fetching: Fetching,
    /// What is to be got, if the store is a real one.
    objects: Option<Objects>,
}

/// Tokens that the engine has of a prompt, and what the shared store has behind them, if that is worth a fetch.
async fn look_up(engine: &Arc<Engine>, job: &Job, chain: &PageChain) -> (usize, Option<Fetch>) {
    let threshold = match engine.config.face {
        Face::Sglang => SGLANG_PREFETCH_THRESHOLD,
        Face::Vllm => 0,
    };
    let (rank, page) = (engine.rank(job.rank), engine.config.page_size);
    let (own, wanted) = {
        let mut cache = rank.cache.lock();
        let own = cache.look_up(chain.pages(), chain.len()).total();
        (own, own / page..cache.usable(chain.pages(), chain.len()).len())
    };
    let missing = chain.len() - own;
    let Some(store) = engine.store().filter(|_| missing >= threshold) else { return (own, None) };
    let Some(fetching) = rank.fetch(missing) else { return (own, None) };
    let (there, objects) = match store {
        Tier::Simulated(store) => (store.lock().asked(&chain.pages()[wanted.clone()]), None),
        Tier::Objects(store) => {
            let prefix = Prefix { chain, tokens: &job.tokens, namespace: &job.namespace };
            let objects = Objects::of(&engine.config, &prefix);
            (store.asked(&objects, &wanted, &engine.stats).await, Some(objects))
        }
    };
    let tokens = there * page;
    let fetch = (there > 0 && tokens >= threshold).then(|| Fetch {
        pages: wanted.start..wanted.start + there,
        tokens,
        uncached: uncached(engine, tokens),
        fetching,
        objects,
    });
    (own, fetch)
}

impl Fetch {
    /// Answers how many tokens have come.
    async fn run(mut self, engine: &Arc<Engine>, job: &Job, chain: &PageChain) -> usize {
        let rank = engine.rank(job.rank);
        // One read at a time: they share the network card.
        let card = rank.network_card.lock().await;
        let pause = super::service::pause(job.timing.storage_fetch(self.tokens));
        if let (Some(objects), Some(Tier::Objects(store))) = (&self.objects, engine.store()) {
            let (right, ()) = tokio::join!(store.get(objects, &self.pages, &engine.stats), pause);
            self.pages.end = self.pages.start + right;
        } else {
            pause.await;
        }
        drop(card);
        let prefix = Prefix { chain, tokens: &job.tokens, namespace: &job.namespace };
        let tokens = self.pages.len() * engine.config.page_size;
        // An engine without a host level has them on the device with the rest.
        rank.keep(&prefix, &Kept::Fetched(self.pages));
        drop((self.uncached, self.fetching));
        tokens
    }
}

/// SGLang's prefill: nothing starts before the decode engine has come, nothing is answered before it has all.
pub(crate) async fn send(
    engine: &Arc<Engine>,
    job: &Job,
    chain: &PageChain,
    key: &str,
) -> Result<CachedTokens, EngineError> {
    let timeout = engine.config.pair_timeout();
    let place = engine.places.keep(key, job.rank).map_err(|missed| missed_error(missed, timeout))?;
    {
        let _bootstrapping = Gauge::new(&engine.stats, 1, |stats, by| {
            stats.bootstrapping = stats.bootstrapping.saturating_add_signed(by);
        });
        place.decode_came(timeout).await.map_err(|missed| missed_error(missed, timeout))?;
    }
    let cached = compute(engine, job, chain).await?;
    place.offer(offer(chain, cached));
    let _transferring = transferring(engine);
    place.taken(timeout).await.map_err(|missed| missed_error(missed, timeout))?;
    engine.stats.change(|stats| stats.kv_sent += 1);
    Ok(cached)
}

fn transferring(engine: &Engine) -> Gauge {
    Gauge::new(&engine.stats, 1, |stats, by| {
        stats.transferring = stats.transferring.saturating_add_signed(by);
    })
}

fn missed_error(missed: Missed, timeout: Duration) -> EngineError {
    EngineError::new(match missed {
        Missed::TimedOut => format!("Request timed out after {:.1}s in KVPoll.Bootstrapping", timeout.as_secs_f64()),
        Missed::Conflict => "KVTransferError: follow_bootstrap_room conflict: the decode engine expects the KV cache at another data-parallel rank".to_owned(),
        Missed::Unknown | Missed::Full => "Internal server error".to_owned(),
    })
}

/// Asks the prefill engine for a key-value cache and waits for it.
pub(crate) async fn take(engine: &Arc<Engine>, from: &Take) -> Result<KvOffer, EngineError> {
    let timeout = engine.config.pair_timeout();
    let _transferring = transferring(engine);
    let asking = ask_until(engine, from);
    tokio::time::timeout(timeout, asking).await.unwrap_or_else(|_| {
        Err(EngineError::new(format!(
            "KVTransferError: Request {} timed out after {:.1}s in KVPoll.WaitingForInput",
            from.key,
            timeout.as_secs_f64()
        )))
    })
}

async fn ask_until(engine: &Arc<Engine>, from: &Take) -> Result<KvOffer, EngineError> {
    let url = format!("{}/_sim/kv", from.server);
    let ask =
        KvAsk { key: from.key.clone(), rank: from.rank, engine_id: from.engine_id.clone(), wait: from.wait };
    let begin = tokio::time::Instant::now();
    let (patience, timeout) = (engine.config.handshake_timeout, engine.config.pair_timeout());
    loop {
        let request = engine.client.post(&url).json(&ask).timeout(timeout);
        let error = match send_request(request).await {
            Ok(answer) if answer.status().is_success() => match answer.json::<KvOffer>().await {
                Ok(offer) => return Ok(offer),
                Err(error) => error,
            },
            Ok(answer) => {
                // vLLM tells nothing but this, and quickly.
                super::service::pause(engine.timing.scaled(0.15)).await;
                let status = answer.status();
                let message = if from.patient {
                    format!("KVTransferError: {status}")
                } else {
                    "Internal server error".to_owned()
                };
                return Err(EngineError::new(message));
            }
            Err(error) => error,
        };
        if !from.patient {
            return Err(EngineError::new("Internal server error"));
        }
        if !error.is_connect() {
            return Err(EngineError::new(format!(
                "KVTransferError: Lost connection with prefill instance {}",
                from.server
            )));
        }
        if begin.elapsed() >= patience {
            return Err(EngineError::new(format!(
                "Decode handshake failed for request {}: Could not fetch prefill parallel info from bootstrap server {} after 15 attempts",
                from.key, from.server
            )));
        }
        tokio::time::sleep((patience / 14).max(Duration::from_millis(1))).await;
    }
}
