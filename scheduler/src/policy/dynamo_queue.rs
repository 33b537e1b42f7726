//! NVIDIA Dynamo's KV router with its queue, shortest work first, and with knowledge of the shared store.

use super::dynamo::{CacheHitCredits, cache_credit, least_cost};
use super::{Policy, PolicyInput, PolicyName, PolicyVerdict, available_prefills, load};
use crate::decision::ScheduleRejection;

/// Uncached tokens sent to an engine and not computed, above which it gets no more. Dynamo's queue is off without settings, and
/// its threshold is a share of `max_num_batched_tokens`; 4,096 is about the best of those that were tried on the Mooncake traces
/// (1,024 to 8,192; half of SGLang's 8,192 tokens per pass).
const BUSY_TOKENS: u64 = 4096;
/// With a shared store, Dynamo credits half of what it has (`shared_cache_type=hicache`). Host memory is worth 0.75 to Dynamo without
/// settings; as much as the device does better wherever most hits are in host memory, for such an engine computes none of it.
const CREDITS: CacheHitCredits = CacheHitCredits { host: 1.0, shared: 0.5 };

/// Holds requests while all engines are busy, and releases the one with the least uncached work per priority first (weighted
/// shortest processing time).
///
/// Nothing ages: under overload a long prompt waits as long as shorter ones come. An engine that fetches only what arrives while
/// a request waits there gets requests too late to fetch much.
#[derive(Debug)]
pub(super) struct DynamoQueuePolicy;

impl Policy for DynamoQueuePolicy {
    fn name(&self) -> PolicyName {
        PolicyName::DynamoQueue
    }

    /// Fixed on arrival, like Dynamo's: from the best cached prefix of any engine, without the shared store.
    fn rank(&self, input: &PolicyInput<'_>) -> f64 {
        let cached = |&ix: &_| cache_credit(input, ix, CREDITS);
        let best = input.cluster.prefills(input.request.model).iter().map(cached).fold(0.0, f64::max);
        let new = (f64::from(input.request.input_tokens) - best).max(1.0);
        new / (1.0 + f64::from(input.request.priority.max(0)))
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let open = available_prefills(input)?;
        if open.iter().all(|&ix| load(input, ix).pending_prefill_tokens > BUSY_TOKENS) {
            return Ok(PolicyVerdict::Defer { until: f64::INFINITY });
        }
        // All engines are candidates once one is free: a busy one may still be the best for this prompt.
        least_cost(input, self.name(), &open, CREDITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::fixture::PolicyFixture;

    #[test]
    fn requests_are_held_while_all_are_busy() {
        let mut scene = PolicyFixture::new(2);
        for load in &mut scene.loads {
            load.pending_prefill_tokens = BUSY_TOKENS + 1;
        }
        assert_eq!(scene.verdict(&mut DynamoQueuePolicy), Ok(PolicyVerdict::Defer { until: f64::INFINITY }));
        scene.loads[1].pending_prefill_tokens = BUSY_TOKENS;
        assert_eq!(scene.send(&mut DynamoQueuePolicy), 1);
    }

    #[test]
    fn a_busy_engine_that_has_the_prompt_may_still_be_best() {
        let mut scene = PolicyFixture::new(2);
        scene.request.input_tokens = 50_000;
        scene.loads[0].pending_prefill_tokens = BUSY_TOKENS + 1;
        scene.set_cached(0, 40_000, 0, 0);
        assert_eq!(scene.send(&mut DynamoQueuePolicy), 0);
    }

    #[test]
    fn the_least_uncached_work_goes_first() {
        let mut scene = PolicyFixture::new(2);
        let cold = DynamoQueuePolicy.rank(&scene.input());
        scene.set_cached(1, 900, 0, 0);
        let warm = DynamoQueuePolicy.rank(&scene.input());
        scene.request.priority = 9;
        assert_eq!((cold, warm, DynamoQueuePolicy.rank(&scene.input())), (1000.0, 100.0, 10.0));
    }

    /// The known failure: waiting gives no right, so a long prompt starves behind a stream of short ones.
    #[test]
    fn nothing_ages() {
        let scene = PolicyFixture::new(1);
        let input = scene.input();
        let young = DynamoQueuePolicy.rank(&input);
        assert_eq!(young, DynamoQueuePolicy.rank(&PolicyInput { arrived: input.arrived - 1000.0, ..input }));
    }

    #[test]
    fn host_memory_counts_in_full() {
        let mut scene = PolicyFixture::new(2);
        scene.set_cached(0, 0, 500, 0);
        scene.set_cached(1, 450, 0, 0);
        assert_eq!(scene.send(&mut DynamoQueuePolicy), 0);
        assert_eq!(scene.decision(&mut DynamoQueuePolicy).reservation.prefill_tokens, 500);
    }

    #[test]
    fn the_shared_store_earns_half() {
        let mut scene = PolicyFixture::new(2);
        scene.set_cached(0, 0, 0, 900);
        scene.set_cached(1, 440, 0, 0);
        assert_eq!(scene.send(&mut DynamoQueuePolicy), 0);
        scene.set_cached(1, 460, 0, 0);
        assert_eq!(scene.send(&mut DynamoQueuePolicy), 1);
    }
}
