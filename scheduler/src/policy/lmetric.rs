//! LMetric: a product instead of a weighted sum (Zhang et al., OSDI 2026, arXiv 2603.15202).

use super::{
    Input, Policy, PolicyName, Verdict, conclude, least_loaded_decode, lightest, load, open_entries,
};
use crate::decision::{Candidate, Refusal, Term};

/// New prompt tokens that the engine would have to compute, this request's included, times the size of its batch: no weights to
/// tune.
///
/// A product is 0 as soon as one factor is: an engine without requests wins over one that has the whole prompt cached,
/// however long that is.
#[derive(Debug)]
pub(super) struct LMetric;

impl Policy for LMetric {
    fn name(&self) -> PolicyName {
        PolicyName::LMetric
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        let candidates: Vec<Candidate> = open_entries(input)?
            .into_iter()
            .map(|instance| {
                let load = load(input, instance);
                let hits = input.prediction.hits(instance);
                let own = hits.l1_tokens.saturating_add(hits.l2_tokens);
                let new = input.request.total_input_tokens().saturating_sub(u64::from(own));
                let leading_term =
                    if new > load.pending_prefill_tokens { Term::Service } else { Term::Backlog };
                let cost = (load.pending_prefill_tokens + new) as f64 * f64::from(load.in_flight);
                Candidate { instance, cost, leading_term }
            })
            .collect();
        let entry = lightest(candidates.iter().map(|c| (c.instance, c.cost)), input.entropy);
        let Some(entry) = entry else { return Err(Refusal::UnknownModel) };
        let decode = least_loaded_decode(input, entry);
        Ok(conclude(
            input,
            self.name(),
            "least product of new tokens and batch size",
            entry,
            decode,
            candidates,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::scene::Scene;

    #[test]
    fn the_product_decides() {
        let mut scene = Scene::new(2);
        scene.loads[0].in_flight = 4;
        scene.loads[1].in_flight = 2;
        // 4 x 1,000 against 2 x 1,000, then 4 x 400.
        assert_eq!(scene.send(&mut LMetric), 1);
        scene.cached(0, 500, 100, 0);
        assert_eq!(scene.send(&mut LMetric), 0);
        scene.loads[0].pending_prefill_tokens = 200;
        assert_eq!(scene.send(&mut LMetric), 1);
    }

    /// The known failure: without requests everything costs nothing, cached or not.
    #[test]
    fn an_idle_engine_beats_a_cached_prompt() {
        let mut scene = Scene::new(3);
        scene.loads[0].in_flight = 1;
        scene.cached(0, 990, 0, 0);
        scene.cached(1, 990, 0, 0);
        let draws = scene.draws(&mut LMetric);
        assert!(draws[0] == 0 && draws[1] > 60 && draws[2] > 60, "{draws:?}");
    }
}
