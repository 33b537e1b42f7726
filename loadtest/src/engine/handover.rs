//! How a choice comes by its prompt's key-value cache: computed, computed and sent, or taken.

use std::sync::Arc;
use std::time::Duration;

use super::cache::CachedTokens;
use super::events::Prefix;
use super::rendezvous::{KvAsk, KvOffer, Missed};
use super::speech::{EngineError, Job, Take};
use super::stats::Gauge;
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
    let threshold = match engine.config.face {
        Face::Sglang => SGLANG_PREFETCH_THRESHOLD,
        Face::Vllm => 0,
    };
    let store = engine.store().map(|store| (store, threshold));
    let cached = rank.cache.lock().lookup(chain.pages(), chain.len(), store);
    let new = chain.len() - cached.total();
    let waiting = Gauge::new(&engine.stats, 1, |stats, by| {
        stats.waiting = stats.waiting.saturating_add_signed(by);
    });
    let uncached = Gauge::new(&engine.stats, new, |stats, by| {
        stats.waiting_uncached_tokens = stats.waiting_uncached_tokens.saturating_add_signed(by);
    });
    if cached.storage > 0 {
        // One read at a time: they share the network card.
        let _card = rank.network_card.lock().await;
        super::service::pause(job.timing.storage_fetch(cached.storage)).await;
    }
    let load_s = if cached.host > 0 { job.timing.host_load_s(cached.host) } else { 0.0 };
    if !rank.prefill.compute(&job.timing, new, cached.total(), load_s).await {
        return Err(EngineError::new("the engine is shutting down"));
    }
    drop((waiting, uncached));
    engine.remember(job.rank, &Prefix { chain, tokens: &job.tokens, namespace: &job.namespace });
    engine.stats.change(|stats| {
        stats.prompt_tokens += chain.len() as u64;
        stats.cached_device_tokens += cached.device as u64;
        stats.cached_host_tokens += cached.host as u64;
        stats.cached_storage_tokens += cached.storage as u64;
    });
    Ok(cached)
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
    let patience = engine.config.handshake_timeout;
    loop {
        let error = match engine.client.post(&url).json(&ask).send().await {
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
