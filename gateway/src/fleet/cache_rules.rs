//! Cache parameters of an engine, for the scheduler.

use moongate_discovery::{EngineFacts, EngineKind, PrefetchPolicy};
use moongate_scheduler::{EngineCacheParams, PrefetchBehavior};

/// SGLang's limit for the policy `timeout`: 1 s, plus 0.25 s for every 1,024 tokens.
const TIMEOUT: PrefetchBehavior = PrefetchBehavior::Timeout { base_s: 1.0, per_1k_tokens_s: 0.25 };

/// Parameters that the engine reports; the others are the scheduler's defaults.
pub(super) fn cache_rules(facts: &EngineFacts) -> EngineCacheParams {
    let default = EngineCacheParams::default();
    let store = facts.store.as_ref();
    let reported = store.and_then(|store| store.prefetch_policy).map(|policy| match policy {
        PrefetchPolicy::BestEffort => PrefetchBehavior::BestEffort,
        PrefetchPolicy::WaitComplete => PrefetchBehavior::WaitComplete,
        PrefetchPolicy::Timeout => TIMEOUT,
    });
    // vLLM fetches all blocks of a prompt, however few, before it starts.
    let (prefetch, threshold) = match facts.engine {
        EngineKind::Sglang => (default.prefetch, default.prefetch_threshold),
        EngineKind::Vllm => (PrefetchBehavior::WaitComplete, 0),
    };
    EngineCacheParams {
        page_tokens: facts.page_size.unwrap_or(default.page_tokens),
        prefetch: reported.unwrap_or(prefetch),
        prefetch_threshold: store.and_then(|store| store.prefetch_threshold).unwrap_or(threshold),
        ..default
    }
}
