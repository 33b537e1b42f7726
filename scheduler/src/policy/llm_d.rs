//! llm-d's endpoint picker with its sample configuration for precise prefix caching.

use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, available_prefills, build_decision,
    least_loaded_decode, load, min_cost,
};
use crate::decision::{CandidateEngine, CostTerm, ScheduleRejection};
use crate::fleet::{InstanceIndex, InstanceLoad};

/// Weight of the share of the prompt's pages that an engine has (llm-d's `precise-prefix-cache-scorer` in
/// `epp-precise-prefix-cache-config.yaml`).
const PREFIX_WEIGHT: f64 = 2.0;
/// Weight of the free share of the KV cache (`kv-cache-utilization-scorer`, same file).
const FREE_WEIGHT: f64 = 1.0;
/// Weight of the waiting queue (`queue-scorer`, same file).
const QUEUE_WEIGHT: f64 = 1.0;
/// Weight of a block in host memory, where one on the device counts 1 (llm-d-kv-cache's backend weights).
const HOST_PAGE: f64 = 0.8;

/// Adds scores between 0 and 1 and takes the highest sum; ties are random.
///
/// The queue's score is relative to the shortest and the longest queue, so one waiting request can weigh as much as
/// five hundred. Queues come from the engines' latest reports, so every request until the next report goes to one
/// engine. Shares ignore the prompt's length, and the shared store is ignored.
#[derive(Debug)]
pub(super) struct LlmDPolicy;

impl Policy for LlmDPolicy {
    fn name(&self) -> PolicyName {
        PolicyName::LlmD
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let open = available_prefills(input)?;
        let queues = || open.iter().filter_map(|&ix| waiting_requests(&load(input, ix)));
        let (shortest, longest) = (queues().min().unwrap_or(0), queues().max().unwrap_or(0));
        let candidates: Vec<CandidateEngine> = open
            .iter()
            .map(|&instance| {
                let load = load(input, instance);
                let prefix = PREFIX_WEIGHT * prefix_score(input, instance);
                let queue = QUEUE_WEIGHT * queue_score(&load, shortest, longest);
                let free = FREE_WEIGHT * free_score(&load);
                let leading_term = if prefix > queue { CostTerm::Service } else { CostTerm::Backlog };
                // Difference to the best possible score.
                let cost = PREFIX_WEIGHT + QUEUE_WEIGHT + FREE_WEIGHT - prefix - queue - free;
                CandidateEngine { instance, cost, leading_term }
            })
            .collect();
        let entry = min_cost(candidates.iter().map(|c| (c.instance, c.cost)), input.entropy);
        let Some(entry) = entry else { return Err(ScheduleRejection::UnknownModel) };
        let decode = least_loaded_decode(input, entry);
        Ok(build_decision(
            input,
            self.name(),
            EngineChoice { reason: "highest score", entry, decode, candidates },
        ))
    }
}

fn prefix_score(input: &PolicyInput<'_>, ix: InstanceIndex) -> f64 {
    let hits = input.prediction.hits(ix);
    let pages = f64::from(hits.l1_tokens) + HOST_PAGE * f64::from(hits.l2_tokens);
    (pages / f64::from(input.request.input_tokens.max(1))).min(1.0)
}

fn waiting_requests(load: &InstanceLoad) -> Option<u32> {
    load.reported.map(|reported| reported.waiting)
}

/// 1 for the shortest queue, 0 for the longest and for an engine without a report.
fn queue_score(load: &InstanceLoad, shortest: u32, longest: u32) -> f64 {
    match waiting_requests(load) {
        None => 0.0,
        Some(_) if shortest == longest => 1.0,
        Some(waiting) => f64::from(longest - waiting) / f64::from(longest - shortest),
    }
}

fn free_score(load: &InstanceLoad) -> f64 {
    match load.reported {
        Some(reported) if reported.capacity_tokens > 0 => {
            (1.0 - reported.used_tokens as f64 / reported.capacity_tokens as f64).max(0.0)
        }
        Some(_) => 1.0,
        None => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::ReportedLoad;
    use crate::policy::fixture::PolicyFixture;

    fn reported(waiting: u32) -> Option<ReportedLoad> {
        Some(ReportedLoad { waiting, capacity_tokens: 100, ..ReportedLoad::default() })
    }

    fn fixture(waiting: &[u32]) -> PolicyFixture {
        let mut fixture = PolicyFixture::new(waiting.len());
        for (load, &waiting) in fixture.loads.iter_mut().zip(waiting) {
            load.reported = reported(waiting);
        }
        fixture
    }

    #[test]
    fn cached_share_has_twice_the_weight_of_the_queue() {
        let mut fixture = fixture(&[3, 0]);
        fixture.set_cached(0, 600, 0, 0);
        assert_eq!(fixture.send(&mut LlmDPolicy), 0);
        fixture.set_cached(0, 400, 0, 0);
        assert_eq!(fixture.send(&mut LlmDPolicy), 1);
        // 0.8 for a block in host memory: 2 x 0.56 against 1.
        fixture.set_cached(0, 0, 700, 0);
        assert_eq!(fixture.send(&mut LlmDPolicy), 0);
        fixture.set_cached(0, 0, 600, 0);
        assert_eq!(fixture.send(&mut LlmDPolicy), 1);
    }

    #[test]
    fn a_full_cache_is_avoided() {
        let mut fixture = fixture(&[0, 0]);
        fixture.loads[0].reported = Some(ReportedLoad { used_tokens: 90, ..reported(0).unwrap() });
        assert_eq!(fixture.send(&mut LlmDPolicy), 1);
    }

    /// Known failure: the queue's score is relative, so one waiting request outweighs a prompt that is cached by 40 %,
    /// and five hundred weigh no more than one.
    #[test]
    fn one_waiting_request_weighs_as_much_as_many() {
        for waiting in [1, 500] {
            let mut fixture = fixture(&[waiting, 0]);
            fixture.set_cached(0, 400, 0, 0);
            assert_eq!(fixture.send(&mut LlmDPolicy), 1);
            fixture.set_cached(0, 600, 0, 0);
            assert_eq!(fixture.send(&mut LlmDPolicy), 0);
        }
    }

    /// Known failure: requests sent since the last report do not count.
    #[test]
    fn own_dispatches_do_not_count() {
        let mut fixture = fixture(&[0, 1]);
        fixture.loads[0].in_flight = 100;
        fixture.loads[0].pending_prefill_tokens = 1_000_000;
        assert_eq!(fixture.send(&mut LlmDPolicy), 0);
    }

    #[test]
    fn shared_store_is_ignored_and_ties_are_random() {
        let mut fixture = fixture(&[0, 0, 0]);
        fixture.set_cached(0, 0, 0, 900);
        let draws = fixture.entry_counts(&mut LlmDPolicy);
        assert!(draws[..3].iter().all(|&times| times > 60), "{draws:?}");
    }

    #[test]
    fn engines_without_a_report_come_last() {
        let mut fixture = fixture(&[5, 9, 5]);
        fixture.loads[0].reported = None;
        assert_eq!(fixture.send(&mut LlmDPolicy), 2);
    }
}
