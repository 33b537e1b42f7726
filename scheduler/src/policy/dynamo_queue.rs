//! NVIDIA Dynamo's KV router with its queue, shortest work first, and with the shared store.

use super::dynamo::{CacheHitCredits, cache_credit, least_cost};
use super::{Policy, PolicyInput, PolicyName, PolicyVerdict, available_prefills, load};
use crate::decision::ScheduleRejection;

/// Uncached tokens sent to an engine and not computed, above which it gets no more. Dynamo's queue is off by default,
/// and its threshold is a share of `max_num_batched_tokens`; 4,096 is about the best of the tested values on the
/// Mooncake traces (1,024 to 8,192; half of SGLang's 8,192 tokens per pass).
const BUSY_TOKENS: u64 = 4096;
/// With a shared store, Dynamo credits half of a stored token (`shared_cache_type=hicache`). Its default credit for
/// host memory is 0.75; full credit performs better wherever most hits are in host memory, because such an engine
/// computes none of it.
const CREDITS: CacheHitCredits = CacheHitCredits { host: 1.0, shared: 0.5 };

/// Queues requests while all engines are busy, and dispatches the one with the least uncached work per priority first
/// (weighted shortest processing time).
///
/// There is no ageing: under overload a long prompt waits as long as shorter ones arrive. An engine that fetches only
/// while a request waits in its own queue gets requests too late to fetch much.
#[derive(Debug)]
pub(super) struct DynamoQueuePolicy;

impl Policy for DynamoQueuePolicy {
    fn name(&self) -> PolicyName {
        PolicyName::DynamoQueue
    }

    /// Fixed on arrival, as in Dynamo: from the best cached prefix of any engine, without the shared store.
    fn rank(&self, input: &PolicyInput<'_>) -> f64 {
        let cached = |&ix: &_| cache_credit(input, ix, CREDITS);
        let best = input.cluster.prefills(input.request.model).iter().map(cached).fold(0.0, f64::max);
        let new = (f64::from(input.request.input_tokens) - best).max(1.0);
        new / (1.0 + f64::from(input.request.priority.max(0)))
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let open = available_prefills(input)?;
        if open.iter().all(|&ix| load(input, ix).pending_prefill_tokens > BUSY_TOKENS) {
            return Ok(PolicyVerdict::Defer { until: f64::INFINITY, held: None });
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
    fn requests_are_queued_while_all_engines_are_busy() {
        let mut fixture = PolicyFixture::new(2);
        for load in &mut fixture.loads {
            load.pending_prefill_tokens = BUSY_TOKENS + 1;
        }
        assert_eq!(
            fixture.verdict(&mut DynamoQueuePolicy),
            Ok(PolicyVerdict::Defer { until: f64::INFINITY, held: None })
        );
        fixture.loads[1].pending_prefill_tokens = BUSY_TOKENS;
        assert_eq!(fixture.send(&mut DynamoQueuePolicy), 1);
    }

    #[test]
    fn a_busy_engine_that_has_the_prompt_may_still_be_best() {
        let mut fixture = PolicyFixture::new(2);
        fixture.request.input_tokens = 50_000;
        fixture.loads[0].pending_prefill_tokens = BUSY_TOKENS + 1;
        fixture.set_cached(0, 40_000, 0, 0);
        assert_eq!(fixture.send(&mut DynamoQueuePolicy), 0);
    }

    #[test]
    fn the_least_uncached_work_goes_first() {
        let mut fixture = PolicyFixture::new(2);
        let cold = DynamoQueuePolicy.rank(&fixture.input());
        fixture.set_cached(1, 900, 0, 0);
        let warm = DynamoQueuePolicy.rank(&fixture.input());
        fixture.request.priority = 9;
        assert_eq!((cold, warm, DynamoQueuePolicy.rank(&fixture.input())), (1000.0, 100.0, 10.0));
    }

    /// Known failure: waiting gives no priority, so a long prompt starves behind a stream of short ones.
    #[test]
    fn requests_do_not_age() {
        let fixture = PolicyFixture::new(1);
        let input = fixture.input();
        let young = DynamoQueuePolicy.rank(&input);
        assert_eq!(young, DynamoQueuePolicy.rank(&PolicyInput { arrived: input.arrived - 1000.0, ..input }));
    }

    #[test]
    fn host_memory_counts_in_full() {
        let mut fixture = PolicyFixture::new(2);
        fixture.set_cached(0, 0, 500, 0);
        fixture.set_cached(1, 450, 0, 0);
        assert_eq!(fixture.send(&mut DynamoQueuePolicy), 0);
        assert_eq!(fixture.decision(&mut DynamoQueuePolicy).reservation.prefill_tokens, 500);
    }

    #[test]
    fn shared_store_gets_half_credit() {
        let mut fixture = PolicyFixture::new(2);
        fixture.set_cached(0, 0, 0, 900);
        fixture.set_cached(1, 440, 0, 0);
        assert_eq!(fixture.send(&mut DynamoQueuePolicy), 0);
        fixture.set_cached(1, 460, 0, 0);
        assert_eq!(fixture.send(&mut DynamoQueuePolicy), 1);
    }
}
