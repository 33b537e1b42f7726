//! Mooncake's Conductor: predicted time to first token, with a transfer where another cache is much better (Algorithm 1 of the
//! FAST 2025 paper).

use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, available_prefills, build_decision,
    least_loaded_decode, load,
};
use crate::decision::{CandidateEngine, CostTerm, ScheduleRejection};
use crate::fleet::InstanceIndex;
use crate::seconds::Seconds;

/// A prefix is transferred to an engine when the best cached prefix is more than this many times longer than the
/// engine's own (`kvcache_balancing_threshold`). Mooncake adjusts it by hand; 1 transfers whenever it is longer.
const BALANCING_THRESHOLD: f64 = 1.0;

/// Selects the engine with the least transfer + queue + computation. A request whose target even that engine would miss
/// is rejected.
///
/// It considers only this request's time and not the blocks that its copies evict, and rejection by a fixed target
/// affects long prompts first. Transfers come from the shared store: no engine here fetches from another engine.
#[derive(Debug)]
pub(super) struct ConductorPolicy;

/// Terms of Algorithm 1 for one engine.
#[derive(Debug, Clone, Copy)]
struct ConductorCost {
    transfer: Seconds,
    queue: Seconds,
    prefill: Seconds,
}

impl Policy for ConductorPolicy {
    fn name(&self) -> PolicyName {
        PolicyName::Conductor
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let open = available_prefills(input)?;
        let best_prefix = open.iter().map(|&ix| input.prediction.cached_tokens(ix)).max().unwrap_or(0);
        let candidates: Vec<CandidateEngine> = open
            .into_iter()
            .map(|instance| {
                let terms = cost(input, instance, best_prefix);
                CandidateEngine { instance, cost: terms.ttft(), leading_term: terms.leading() }
            })
            .collect();
        // Only a shorter time replaces an earlier engine.
        let best =
            candidates.iter().copied().reduce(|best, next| if next.cost < best.cost { next } else { best });
        let Some(best) = best else { return Err(ScheduleRejection::UnknownModel) };
        if let Some(target) = input.request.ttft_target
            && best.cost > target
        {
            return Err(ScheduleRejection::Overloaded { retry_after: best.cost - target });
        }
        let decode = least_loaded_decode(input, best.instance);
        let verdict = build_decision(
            input,
            self.name(),
            EngineChoice {
                reason: "least predicted time to first token",
                entry: best.instance,
                decode,
                candidates,
            },
        );
        Ok(match verdict {
            PolicyVerdict::Send(mut decision) => {
                decision.predicted_ttft = Some(best.cost);
                PolicyVerdict::Send(decision)
            }
            hold => hold,
        })
    }
}

fn cost(input: &PolicyInput<'_>, instance: InstanceIndex, best_prefix: u32) -> ConductorCost {
    let load = load(input, instance);
    let hits = input.prediction.hits(instance);
    let own = hits.l1_tokens.saturating_add(hits.l2_tokens);
    let transferred =
        if f64::from(best_prefix) > BALANCING_THRESHOLD * f64::from(own) { hits.l3_tokens } else { 0 };
    let transfer = match input.cluster.get(instance) {
        Some(engine) if transferred > 0 => {
            load.fetch_wait + f64::from(transferred) * load.fetch_per_token(&engine.cache)
        }
        _ => 0.0,
    };
    let prefix = u64::from(own.saturating_add(transferred));
    let new = input.request.total_input_tokens().saturating_sub(prefix).max(1);
    ConductorCost { transfer, queue: load.prefill_wait, prefill: load.service.seconds(new, prefix) }
}

impl ConductorCost {
    fn ttft(&self) -> Seconds {
        self.transfer + self.queue + self.prefill
    }

    fn leading(&self) -> CostTerm {
        if self.queue >= self.transfer.max(self.prefill) {
            CostTerm::Backlog
        } else if self.transfer > self.prefill {
            CostTerm::Fetch
        } else {
            CostTerm::Service
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::fixture::PolicyFixture;
    use crate::prefill_time::PrefillTimeModel;

    /// A millisecond per token to compute.
    fn fixture(prefills: usize) -> PolicyFixture {
        let mut fixture = PolicyFixture::new(prefills);
        for load in &mut fixture.loads {
            load.service = PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 };
        }
        fixture
    }

    #[test]
    fn queue_and_computation_add_up() {
        let mut fixture = fixture(2);
        fixture.set_cached(0, 300, 300, 0);
        fixture.loads[0].prefill_wait = 0.5;
        let decision = fixture.decision(&mut ConductorPolicy);
        assert_eq!((decision.route.prefill_instance().as_usize(), decision.predicted_ttft), (0, Some(0.9)));
        fixture.loads[0].prefill_wait = 0.7;
        assert_eq!(fixture.send(&mut ConductorPolicy), 1);
    }

    #[test]
    fn first_of_equal_engines_is_chosen() {
        assert_eq!(fixture(3).entry_counts(&mut ConductorPolicy)[0], 300);
    }

    #[test]
    fn a_longer_prefix_elsewhere_is_transferred() {
        let mut fixture = fixture(2);
        fixture.set_cached(0, 900, 0, 0);
        fixture.set_cached(1, 0, 0, 900);
        fixture.loads[0].prefill_wait = 2.0;
        let decision = fixture.decision(&mut ConductorPolicy);
        assert_eq!(decision.route.prefill_instance().as_usize(), 1);
        // 900 tokens of 192,512 B at 20 GB/s, and 100 to compute.
        assert!((decision.predicted_ttft.unwrap() - 0.108_663).abs() < 1e-6, "{decision:?}");
        // A queue at the link raises its cost.
        fixture.loads[1].fetch_wait = 2.0;
        assert_eq!(fixture.send(&mut ConductorPolicy), 0);
    }

    #[test]
    fn an_engine_with_the_best_prefix_transfers_nothing() {
        let mut fixture = fixture(1);
        fixture.set_cached(0, 900, 0, 0);
        fixture.loads[0].fetch_wait = 100.0;
        assert!(fixture.decision(&mut ConductorPolicy).predicted_ttft.unwrap() < 1.0);
    }

    /// Known failure: a constant target rejects long prompts, however idle the fleet.
    #[test]
    fn constant_target_rejects_long_prompts() {
        let mut fixture = fixture(2);
        fixture.request.ttft_target = Some(10.0);
        assert!(fixture.verdict(&mut ConductorPolicy).is_ok());
        fixture.request.input_tokens = 45_000;
        assert_eq!(
            fixture.verdict(&mut ConductorPolicy),
            Err(ScheduleRejection::Overloaded { retry_after: 35.0 })
        );
    }
}
