//! LMetric: a product instead of a weighted sum (Zhang et al., OSDI 2026, arXiv 2603.15202).

use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, active_requests, available_prefills,
    build_decision, least_loaded_decode, load, min_cost,
};
use crate::decision::{CandidateEngine, CostTerm, ScheduleRejection};

/// Prompt tokens that the engine would have to compute times its batch size, both with this request included: no
/// weights to tune.
///
/// An engine that caches almost all of a popular prompt keeps its requests until the ratio of batch sizes exceeds the
/// ratio of uncached tokens.
#[derive(Debug)]
pub(super) struct LMetricPolicy;

impl Policy for LMetricPolicy {
    fn name(&self) -> PolicyName {
        PolicyName::LMetric
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let candidates: Vec<CandidateEngine> = available_prefills(input)?
            .into_iter()
            .map(|instance| {
                let load = load(input, instance);
                let hits = input.prediction.hits(instance);
                let own = hits.l1_tokens.saturating_add(hits.l2_tokens);
                let new = input.request.total_input_tokens().saturating_sub(u64::from(own));
                let leading_term =
                    if new > load.pending_prefill_tokens { CostTerm::Service } else { CostTerm::Backlog };
                let cost = (load.pending_prefill_tokens + new) as f64
                    * f64::from(active_requests(input, instance) + 1);
                CandidateEngine { instance, cost, leading_term }
            })
            .collect();
        let entry = min_cost(candidates.iter().map(|c| (c.instance, c.cost)), input.entropy);
        let Some(entry) = entry else { return Err(ScheduleRejection::UnknownModel) };
        let decode = least_loaded_decode(input, entry);
        Ok(build_decision(
            input,
            self.name(),
            EngineChoice { reason: "least product of new tokens and batch size", entry, decode, candidates },
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::fixture::PolicyFixture;

    #[test]
    fn lowest_product_is_chosen() {
        let mut fixture = PolicyFixture::new(2);
        fixture.set_pending_prefills(0, 3);
        fixture.set_pending_prefills(1, 1);
        // 1,000 x 4 against 1,000 x 2, then 400 x 4 and 600 x 4.
        assert_eq!(fixture.send(&mut LMetricPolicy), 1);
        fixture.set_cached(0, 500, 100, 0);
        assert_eq!(fixture.send(&mut LMetricPolicy), 0);
        fixture.loads[0].pending_prefill_tokens = 200;
        assert_eq!(fixture.send(&mut LMetricPolicy), 1);
    }

    #[test]
    fn an_idle_engine_without_the_prompt_costs_its_computation() {
        let mut fixture = PolicyFixture::new(3);
        fixture.set_cached(1, 990, 0, 0);
        assert_eq!(fixture.entry_counts(&mut LMetricPolicy)[1], 300);
    }

    /// Known failure: an engine that caches a popular prompt keeps its requests, however many wait there already.
    #[test]
    fn popular_prompt_stays_on_its_engine() {
        let mut fixture = PolicyFixture::new(2);
        fixture.set_cached(0, 990, 0, 0);
        fixture.set_pending_prefills(0, 90);
        assert_eq!(fixture.send(&mut LMetricPolicy), 0);
        fixture.set_pending_prefills(0, 110);
        assert_eq!(fixture.send(&mut LMetricPolicy), 1);
    }
}
