//! Estimated times of one prompt on one engine.

use crate::cache_params::{EngineCacheParams, PrefetchBehavior};
use crate::fleet::{InstanceIndex, InstanceLoad, InstanceRole, NextPass, SchedulableInstance};
use crate::prediction::CacheHitPrediction;
use crate::seconds::Seconds;

/// Seconds until a fetch from the shared store delivers its first bytes: one round trip for the keys and one for the
/// first blocks.
pub(crate) const FETCH_LATENCY: Seconds = 0.002;

/// A prompt overtakes others that wait for their blocks if the engine would otherwise be idle for at least this share
/// of the prompt's computation. The overtaken prompts wait for the rest of it.
const MIN_IDLE_SHARE_TO_OVERTAKE: f64 = 0.25;

/// An engine with its load.
#[derive(Debug, Clone, Copy)]
pub struct EngineView<'a> {
    pub index: InstanceIndex,
    pub instance: &'a SchedulableInstance,
    pub load: &'a InstanceLoad,
}

/// What an engine computes before a prompt.
#[derive(Debug, Clone, Copy)]
pub struct PrefillBacklog {
    /// Seconds of earlier work.
    pub wait: Seconds,
    /// The last pass of that work, if it has not started.
    pub next_pass: NextPass,
}

impl PrefillBacklog {
    /// The engine's own work.
    #[must_use]
    pub fn of(load: &InstanceLoad) -> Self {
        Self { wait: load.prefill_wait, next_pass: load.next_pass }
    }
}

/// Times for one prompt on one engine, if it were sent now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillEstimate {
    /// Until the engine has finished earlier work.
    pub wait: Seconds,
    /// Until the blocks that it will use from the shared store are in its memory; 0 without such blocks.
    pub fetch: Seconds,
    /// Until the prompt must be sent to be computed that early: `wait`, less the work of a pass that it shares.
    pub pass_wait: Seconds,
    /// Until the engine has loaded the request's LoRA adapter; it gets the request only then.
    pub adapter_load: Seconds,
    /// Time to compute the uncached tokens; without the constant of a shared pass.
    pub service: Seconds,
    /// Whether it shares a pass with prompts before it.
    pub shares_pass: bool,
    /// The constant time of a pass.
    pub pass_constant: Seconds,
    /// Uncached tokens.
    pub new_tokens: u64,
    /// From the end of the computation to the first token.
    pub handover: Seconds,
    /// Tokens transferred to the decode in that time.
    pub handover_tokens: u64,
    /// Prompt tokens that the engine does not need to compute.
    pub cached_tokens: u32,
    /// The part of `cached_tokens` that comes from the shared store.
    pub fetched_tokens: u32,
    /// Nominal seconds to read one of those tokens from its location, by the engine's parameters.
    pub nominal_fetch_per_token: Seconds,
    /// Whether the engine computes the blocks that have not been read when the prompt's turn comes.
    pub truncates_fetch: bool,
}

impl PrefillEstimate {
    /// Estimates a prompt of `input_tokens` on an engine with this work before it.
    #[must_use]
    pub fn new(
        input_tokens: u64,
        prediction: &CacheHitPrediction,
        engine: EngineView<'_>,
        backlog: PrefillBacklog,
    ) -> Self {
        let EngineView { index, instance, load } = engine;
        let PrefillBacklog { wait, next_pass } = backlog;
        let (hits, rules) = (prediction.hits(index), &instance.cache);
        let own = hits.l1_tokens.saturating_add(hits.l2_tokens);
        let (fetched, fetch) = if hits.l3_tokens == 0 || hits.l3_tokens < rules.prefetch_threshold {
            (0, 0.0)
        } else {
            let per_token = prediction.network_distance(index) * load.fetch_per_token(rules);
            fetched(hits.l3_tokens, per_token, wait, load.fetch_wait, rules)
        };
        let cached = own.saturating_add(fetched);
        // An engine always computes the last token.
        let new = input_tokens.saturating_sub(u64::from(cached)).max(1);
        let shares_pass = fetched == 0 && new <= next_pass.room;
        let pass_constant = load.service.c0 * load.service.speed;
        let saved = if shares_pass { pass_constant } else { 0.0 };
        let compute = (load.service.seconds(new, u64::from(cached)) - saved).max(0.0);
        // Loading from host memory runs layer by layer, in parallel with the computation.
        let load_back = f64::from(hits.l2_tokens + fetched) * rules.kv_bytes_per_token / rules.l2_bytes_per_s;
        let service = compute.max(load_back);
        let overtakes = fetched == 0 && load.idle_for > MIN_IDLE_SHARE_TO_OVERTAKE * service;
        let wait = if overtakes { wait.min(wait - load.prefill_wait + load.idle_wait) } else { wait };
        // Each pass's part is transferred while the next one is computed, the reused prefix with the first part.
        let pass = u64::from(rules.max_prefill_tokens.max(1));
        let handover_tokens = match instance.role {
            InstanceRole::Decode => 0,
            _ if new <= pass => input_tokens,
            _ => (new - 1) % pass + 1,
        };
        Self {
            wait,
            pass_wait: if shares_pass { (wait - next_pass.work).max(0.0) } else { wait },
            fetch,
            adapter_load: 0.0,
            service,
            shares_pass,
            pass_constant,
            new_tokens: new,
            handover: handover_tokens as f64 * load.handover_per_token,
            handover_tokens,
            cached_tokens: cached,
            fetched_tokens: fetched,
            nominal_fetch_per_token: prediction.network_distance(index) * rules.fetch_per_token(),
            truncates_fetch: rules.prefetch != PrefetchBehavior::WaitComplete,
        }
    }

    /// The same prompt, sent after a load of this many seconds.
    #[must_use]
    pub(crate) fn after_load(self, adapter_load: Seconds) -> Self {
        Self { adapter_load, ..self }
    }

    /// Until the prompt can be computed, whatever the engine's backlog.
    #[must_use]
    pub(crate) fn ready(&self) -> Seconds {
        self.adapter_load + self.fetch
    }

    /// Seconds until the first token.
    #[must_use]
    pub fn ttft(&self) -> Seconds {
        self.wait.max(self.ready()) + self.service + self.handover
    }
}

/// How many of `offered` tokens are fetched if the prompt's turn comes after `wait`, and when they are in the engine's
/// memory.
fn fetched(
    offered: u32,
    per_token: Seconds,
    wait: Seconds,
    queue: Seconds,
    rules: &EngineCacheParams,
) -> (u32, Seconds) {
    let begin = queue + FETCH_LATENCY;
    let complete = begin + f64::from(offered) * per_token;
    let given_up = match rules.prefetch {
        PrefetchBehavior::WaitComplete => return (offered, complete),
        PrefetchBehavior::BestEffort => wait,
        PrefetchBehavior::Timeout { base_s, per_1k_tokens_s } => {
            wait.max(base_s + per_1k_tokens_s * f64::from(offered) / 1024.0)
        }
    };
    if complete <= given_up {
        return (offered, complete);
    }
    let page = f64::from(rules.page_tokens.max(1));
    let tokens = ((given_up - begin).max(0.0) / per_token / page).floor() * page;
    // Less than `offered`, because the fetch is not complete.
    (tokens as u32, given_up)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{InstanceRole, LocationIds, PairingDomain};
    use crate::prediction::TierHits;
    use crate::prefill_time::PrefillTimeModel;

    /// 1,000 tokens per second from the store, a token a millisecond to compute.
    fn rules(prefetch: PrefetchBehavior) -> EngineCacheParams {
        EngineCacheParams {
            prefetch,
            page_tokens: 100,
            prefetch_threshold: 256,
            l3_bytes_per_s: 1000.0,
            l2_bytes_per_s: 1e9,
            kv_bytes_per_token: 1.0,
            ..EngineCacheParams::default()
        }
    }

    fn instance(rules: EngineCacheParams) -> SchedulableInstance {
        SchedulableInstance {
            name: "engine".into(),
            role: InstanceRole::Prefill,
            models: Vec::new(),
            loadable: Vec::new(),
            domain: PairingDomain(0),
            rank: 0,
            location: LocationIds { zone: Some(1), rack: Some(1), node: Some(1), ..LocationIds::default() },
            cache: rules,
            local_prefill: false,
        }
    }

    fn after(wait: f64) -> PrefillBacklog {
        PrefillBacklog { wait, next_pass: NextPass::default() }
    }

    fn estimate(prefetch: PrefetchBehavior, l3_tokens: u32, wait: f64) -> PrefillEstimate {
        let service = PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 };
        let load = InstanceLoad { service, ..InstanceLoad::default() };
        let hits = TierHits { l3_tokens, ..TierHits::default() };
        let prediction = CacheHitPrediction { per_instance: vec![hits], ..CacheHitPrediction::default() };
        let instance = instance(rules(prefetch));
        let engine = EngineView { index: InstanceIndex(0), instance: &instance, load: &load };
        PrefillEstimate::new(1000, &prediction, engine, after(wait))
    }

    #[test]
    fn near_blocks_are_fetched_sooner() {
        let hits = TierHits { l3_tokens: 1000, ..TierHits::default() };
        let prediction = CacheHitPrediction {
            per_instance: vec![hits; 2],
            network_distance: vec![0.5, 4.0],
            ..CacheHitPrediction::default()
        };
        let instance = instance(rules(PrefetchBehavior::WaitComplete));
        let load = InstanceLoad::default();
        let fetch = |index| {
            let engine = EngineView { index: InstanceIndex(index), instance: &instance, load: &load };
            PrefillEstimate::new(1000, &prediction, engine, after(0.0)).fetch
        };
        assert!(
            (fetch(0) - FETCH_LATENCY - 0.5).abs() < 1e-9 && (fetch(1) - FETCH_LATENCY - 4.0).abs() < 1e-9
        );
    }

    #[test]
    fn best_effort_counts_what_arrives_while_queueing() {
        let idle = estimate(PrefetchBehavior::BestEffort, 900, 0.0);
        assert_eq!((idle.fetched_tokens, idle.ttft()), (0, 1.0));
        let some = estimate(PrefetchBehavior::BestEffort, 900, 0.5);
        assert_eq!(some.fetched_tokens, 400);
        assert!((some.ttft() - 1.1).abs() < 1e-9);
        assert_eq!(estimate(PrefetchBehavior::BestEffort, 900, 2.0).fetched_tokens, 900);
    }

    #[test]
    fn wait_complete_waits() {
        let idle = estimate(PrefetchBehavior::WaitComplete, 900, 0.0);
        assert_eq!(idle.fetched_tokens, 900);
        assert!((idle.ttft() - (FETCH_LATENCY + 0.9 + 0.1)).abs() < 1e-9);
    }

    #[test]
    fn timeout_limits_the_wait() {
        let timeout = PrefetchBehavior::Timeout { base_s: 0.3, per_1k_tokens_s: 0.0 };
        assert_eq!(estimate(timeout, 900, 0.0).fetched_tokens, 200);
        assert!((estimate(timeout, 900, 0.0).ttft() - 1.1).abs() < 1e-9);
        assert_eq!(estimate(timeout, 900, 0.6).fetched_tokens, 500);
    }

    #[test]
    fn few_tokens_are_not_fetched() {
        assert_eq!(estimate(PrefetchBehavior::WaitComplete, 255, 0.0).cached_tokens, 0);
        assert_eq!(estimate(PrefetchBehavior::WaitComplete, 256, 0.0).cached_tokens, 256);
    }

    #[test]
    fn reused_prefix_is_handed_over_with_the_first_pass() {
        let rules = EngineCacheParams { max_prefill_tokens: 1_000, ..rules(PrefetchBehavior::WaitComplete) };
        let instance = instance(rules);
        let tokens = |input_tokens, l1_tokens| {
            let hits = TierHits { l1_tokens, ..TierHits::default() };
            let prediction = CacheHitPrediction { per_instance: vec![hits], ..CacheHitPrediction::default() };
            let load = InstanceLoad::default();
            let engine = EngineView { index: InstanceIndex(0), instance: &instance, load: &load };
            PrefillEstimate::new(input_tokens, &prediction, engine, after(0.0)).handover_tokens
        };
        assert_eq!((tokens(900, 0), tokens(50_900, 50_000), tokens(51_000, 50_000)), (900, 50_900, 51_000));
        assert_eq!((tokens(2_000, 0), tokens(2_300, 0), tokens(52_300, 50_000)), (1_000, 300, 300));
    }

    #[test]
    fn at_least_one_token_is_computed() {
        assert!(estimate(PrefetchBehavior::WaitComplete, 1000, 0.0).service >= 0.001);
    }
}
