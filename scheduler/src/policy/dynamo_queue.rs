//! NVIDIA Dynamo's KV router with its queue, shortest work first, and with knowledge of the shared store.

use super::dynamo::{Credits, least_cost, own_credit};
use super::{Input, Policy, PolicyName, Verdict, load, open_entries};
use crate::decision::Refusal;

/// Uncached tokens sent to an engine and not computed, above which it gets no more. Dynamo's queue is off without settings, and
/// its threshold is a share of `max_num_batched_tokens`; 4,096 is about the best of those that were tried on the Mooncake traces
/// (1,024 to 8,192; half of SGLang's 8,192 tokens per pass).
const BUSY_TOKENS: u64 = 4096;
/// With a shared store, Dynamo credits half of what it has (`shared_cache_type=hicache`). Host memory is worth 0.75 to Dynamo without
/// settings; as much as the device does better wherever most hits are in host memory, for such an engine computes none of it.
const CREDITS: Credits = Credits { host: 1.0, shared: 0.5 };

/// Holds requests while all engines are busy, and releases the one with the least uncached work per priority first (weighted
/// shortest processing time).
///
/// Nothing ages: under overload a long prompt waits as long as shorter ones come. An engine that fetches only what arrives while
/// a request waits there gets requests too late to fetch much.
#[derive(Debug)]
pub(super) struct DynamoQueue;

impl Policy for DynamoQueue {
    fn name(&self) -> PolicyName {
        PolicyName::DynamoQueue
    }

    /// Fixed on arrival, like Dynamo's: from the best cached prefix of any engine, without the shared store.
    fn rank(&self, input: &Input<'_>) -> f64 {
        let cached = |&ix: &_| own_credit(input, ix, CREDITS);
        let best = input.cluster.entries(input.request.model).iter().map(cached).fold(0.0, f64::max);
        let new = (f64::from(input.request.input_tokens) - best).max(1.0);
        new / (1.0 + f64::from(input.request.priority.max(0)))
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        let open = open_entries(input)?;
        if open.iter().all(|&ix| load(input, ix).pending_prefill_tokens > BUSY_TOKENS) {
            return Ok(Verdict::Hold { until: f64::INFINITY });
        }
        // All engines are candidates once one is free: a busy one may still be the best for this prompt.
        least_cost(input, self.name(), &open, CREDITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::scene::Scene;

    #[test]
    fn requests_are_held_while_all_are_busy() {
        let mut scene = Scene::new(2);
        for load in &mut scene.loads {
            load.pending_prefill_tokens = BUSY_TOKENS + 1;
        }
        assert_eq!(scene.verdict(&mut DynamoQueue), Ok(Verdict::Hold { until: f64::INFINITY }));
        scene.loads[1].pending_prefill_tokens = BUSY_TOKENS;
        assert_eq!(scene.send(&mut DynamoQueue), 1);
    }

    #[test]
    fn a_busy_engine_that_has_the_prompt_may_still_be_best() {
        let mut scene = Scene::new(2);
        scene.request.input_tokens = 50_000;
        scene.loads[0].pending_prefill_tokens = BUSY_TOKENS + 1;
        scene.cached(0, 40_000, 0, 0);
        assert_eq!(scene.send(&mut DynamoQueue), 0);
    }

    #[test]
    fn the_least_uncached_work_goes_first() {
        let mut scene = Scene::new(2);
        let cold = DynamoQueue.rank(&scene.input());
        scene.cached(1, 900, 0, 0);
        let warm = DynamoQueue.rank(&scene.input());
        scene.request.priority = 9;
        assert_eq!((cold, warm, DynamoQueue.rank(&scene.input())), (1000.0, 100.0, 10.0));
    }

    /// The known failure: waiting gives no right, so a long prompt starves behind a stream of short ones.
    #[test]
    fn nothing_ages() {
        let scene = Scene::new(1);
        let input = scene.input();
        let young = DynamoQueue.rank(&input);
        assert_eq!(young, DynamoQueue.rank(&Input { arrived: input.arrived - 1000.0, ..input }));
    }

    #[test]
    fn host_memory_counts_in_full() {
        let mut scene = Scene::new(2);
        scene.cached(0, 0, 500, 0);
        scene.cached(1, 450, 0, 0);
        assert_eq!(scene.send(&mut DynamoQueue), 0);
        assert_eq!(scene.decision(&mut DynamoQueue).booking.prefill_tokens, 500);
    }

    #[test]
    fn the_shared_store_earns_half() {
        let mut scene = Scene::new(2);
        scene.cached(0, 0, 0, 900);
        scene.cached(1, 440, 0, 0);
        assert_eq!(scene.send(&mut DynamoQueue), 0);
        scene.cached(1, 460, 0, 0);
        assert_eq!(scene.send(&mut DynamoQueue), 1);
    }
}
