//! What is lost when the engine is removed: the prompt tokens that it recently found in its own cache.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::context::SidecarContext;
use crate::http;

/// Interval of the samples. A conversation returns after tens of seconds, so that a shorter one would not be more exact.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(15);
/// Time after which a hit counts half. Prefixes that were unused for longer are mostly evicted before their next use.
const HALF_LIFE: Duration = Duration::from_secs(300);
/// Counters of prompt tokens found in the engine's cache: of vLLM, and of SGLang.
const CACHED_TOKENS: [&str; 2] = ["vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"];
/// Hits of SGLang in the store, which remains.
const IN_STORE: &str = "cache_source=\"storage";

/// Cache hits of the engine, of which older ones count less.
#[derive(Debug, Default)]
pub(crate) struct RecentCacheHits(Mutex<Option<CacheHitSample>>);

#[derive(Debug, Clone, Copy)]
struct CacheHitSample {
    at: Instant,
    /// The engine's counter.
    total: f64,
    /// Recent tokens at that time.
    recent: f64,
}

impl CacheHitSample {
    fn recent_at(&self, now: Instant) -> f64 {
        let age = now.duration_since(self.at).as_secs_f64();
        self.recent * (-age / HALF_LIFE.as_secs_f64()).exp2()
    }
}

impl RecentCacheHits {
    /// Records the engine's counter. A lower one is that of a restarted engine, whose cache is empty.
    fn record(&self, total: f64, now: Instant) {
        let mut last = self.0.lock();
        let recent = match &*last {
            Some(sample) if sample.total <= total => sample.recent_at(now) + total - sample.total,
            Some(_) => total,
            // Hits before the sidecar's start are of an unknown age.
            None => 0.0,
        };
        *last = Some(CacheHitSample { at: now, total, recent });
    }

    /// Recent prompt tokens from the engine's cache; `None` if the engine does not report them.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "clamped to what Kubernetes accepts as a deletion cost"
    )]
    fn cost(&self, now: Instant) -> Option<i32> {
        let recent = self.0.lock().as_ref()?.recent_at(now);
        Some(recent.clamp(0.0, f64::from(i32::MAX)) as i32)
    }
}

/// Samples the engine's metrics until `stop`.
pub(crate) async fn run(sidecar: Arc<SidecarContext>, stop: CancellationToken) {
    let mut states = sidecar.state.subscribe();
    let sampling = async {
        while states.wait_for(|state| state.local_engine.is_some()).await.is_ok() {
            sample(&sidecar).await;
            tokio::time::sleep(SAMPLE_INTERVAL).await;
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = sampling => {}
    }
}

/// Takes a sample, and returns the cost; `None` if the engine does not report its cache hits.
pub(crate) async fn sample(sidecar: &SidecarContext) -> Option<i32> {
    let url = sidecar.state.borrow().local_engine.as_ref().map(|engine| format!("{}/metrics", engine.url));
    if let Some(url) = url
        && let Some(total) = cached_tokens(&http::fetch_engine_metrics(sidecar, url).await)
    {
        sidecar.recent_cache_hits.record(total, Instant::now());
    }
    sidecar.recent_cache_hits.cost(Instant::now())
}

/// Sum of the counters over ranks and cache tiers in the engine.
fn cached_tokens(metrics: &str) -> Option<f64> {
    let sample = |line: &str| {
        let name_end = line.find(['{', ' '])?;
        let (name, rest) = line.split_at(name_end);
        if !CACHED_TOKENS.contains(&name) || rest.contains(IN_STORE) {
            return None;
        }
        rest.rsplit(' ').next()?.parse::<f64>().ok().filter(|value| value.is_finite())
    };
    metrics.lines().filter_map(sample).fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_in_the_engine_are_summed_without_those_in_the_store() {
        let sglang = "# TYPE sglang:cached_tokens_total counter\n\
            sglang:cached_tokens_total{cache_source=\"device\",model_name=\"a b\"} 4096.0\n\
            sglang:cached_tokens_total{cache_source=\"host\",model_name=\"a b\"} 4.0\n\
            sglang:cached_tokens_total{cache_source=\"storage\",model_name=\"a b\"} 2336.0\n";
        assert_eq!(cached_tokens(sglang), Some(4100.0));
        let vllm = "vllm:prefix_cache_hits_total{engine=\"0\"} 1e3\nvllm:prefix_cache_hits_total{engine=\"1\"} 5\n\
            vllm:prefix_cache_hits_created{engine=\"0\"} 1.7e9\nvllm:external_prefix_cache_hits_total{engine=\"0\"} 7\n";
        assert_eq!(cached_tokens(vllm), Some(1005.0));
        assert_eq!(cached_tokens("up 1\nvllm:prefix_cache_hits_total{engine=\"0\"} NaN\n"), None);
    }

    #[test]
    fn the_cost_is_of_recent_hits() {
        let (hits, start) = (RecentCacheHits::default(), Instant::now());
        assert_eq!(hits.cost(start), None, "not reported");
        hits.record(5000.0, start);
        assert_eq!(hits.cost(start), Some(0), "all before the sidecar's start");
        hits.record(6000.0, start);
        assert_eq!(hits.cost(start), Some(1000));
        assert_eq!(hits.cost(start + HALF_LIFE), Some(500));
        hits.record(6200.0, start + HALF_LIFE);
        assert_eq!(hits.cost(start + HALF_LIFE), Some(700));
        hits.record(30.0, start + 2 * HALF_LIFE);
        assert_eq!(hits.cost(start + 2 * HALF_LIFE), Some(30), "the engine has restarted");
        hits.record(1e15, start + 2 * HALF_LIFE);
        assert_eq!(hits.cost(start + 2 * HALF_LIFE), Some(i32::MAX));
    }
}
