//! Engines in place of a chosen one, for a proxy that retries by itself.

use std::cmp::Ordering;
use std::sync::Arc;

use moongate_discovery::EngineRole;
use moongate_scheduler::InstanceIndex;

use super::eligibility::{ChosenRoute, EligibilityTier, RouteConstraints};
use crate::fleet::FleetMember;
use crate::routed_request::RoutedRequest;

/// At most `most` workers other than the chosen one, in the order of the costs that the scheduler computed for its decision; those that it
/// did not price are last, the least busy first. None for a pair: both of its engines were chosen together. An engine's rank is that of
/// the chosen one, because it is sent in a header that all of them get.
pub(crate) fn fallback_workers(
    routed: &RoutedRequest,
    chosen: &ChosenRoute,
    most: usize,
) -> Vec<FleetMember> {
    let (Some(decision), None, Some(request)) = (&chosen.decision, &chosen.decode, &routed.request) else {
        return Vec::new();
    };
    let fleet = &decision.fleet;
    let candidates = &decision.decision.explanation.candidates;
    let cost = |ix: InstanceIndex| {
        let priced = candidates.iter().find(|candidate| candidate.instance == ix);
        priced.map_or(f64::INFINITY, |candidate| candidate.cost)
    };
    let constraints = RouteConstraints::new(routed, &[], EligibilityTier::Available, fleet);
    let members = InstanceIndex::all().zip(fleet.cluster.instances()).zip(&fleet.members);
    let mut workers: Vec<_> = members
        .filter(|((_, instance), member)| {
            member.instance.role == EngineRole::Plain
                && member.rank == chosen.prefill.rank
                && instance.is_eligible(request.model)
                && !Arc::ptr_eq(&member.endpoint, &chosen.prefill.endpoint)
                && constraints.allows(member, false)
        })
        .map(|((ix, _), member)| (cost(ix), member.endpoint.in_flight.count(), member))
        .collect();
    workers.sort_by(|left, right| match left.0.total_cmp(&right.0) {
        Ordering::Equal => left.1.cmp(&right.1),
        order => order,
    });
    workers.into_iter().take(most).map(|(_, _, member)| member.clone()).collect()
}

#[cfg(test)]
mod tests {
    use moongate_discovery::EngineKind;
    use moongate_scheduler::{
        CandidateEngine, CostTerm, DecisionExplanation, EngineRoute, LoadReservation, PolicyName,
        RequestProfile, RoutingDecision,
    };

    use super::*;
    use crate::decide::InFlightGuard;
    use crate::fleet::{FleetDecision, FleetSnapshot};
    use crate::kv_index::KvIndex;
    use crate::request_body::InferenceApi;
    use crate::routed_request::PickScope;
    use crate::test_fleet::{engine, snapshot};

    /// Four workers, of which `w0` is chosen, and the last is not priced.
    fn chosen() -> (RoutedRequest, ChosenRoute) {
        let engines =
            ["w0", "w1", "w2", "w3"].map(|name| engine(name, EngineRole::Plain, EngineKind::Vllm, 1));
        let fleet = Arc::new(snapshot(engines.into(), &FleetSnapshot::default(), &KvIndex::new(10)));
        let candidates = [1.0, 3.0, 2.0].into_iter().zip(0..).map(|(cost, ix)| CandidateEngine {
            instance: InstanceIndex(ix),
            cost,
            leading_term: CostTerm::None,
        });
        let explanation = DecisionExplanation {
            policy: PolicyName::LeastLoad,
            reason: "",
            candidates: candidates.collect(),
            terms: Vec::new(),
        };
        let decision = RoutingDecision {
            route: EngineRoute::Single { worker: InstanceIndex(0), rank: 0 },
            reservation: LoadReservation::default(),
            engine_priority: None,
            predicted_ttft: None,
            expected_ttft: 0.0,
            pending_tokens: 0,
            explanation,
        };
        let mut routed = RoutedRequest::of_body(InferenceApi::Completions, r#"{"prompt":"a"}"#);
        routed.request = Some(RequestProfile {
            model: fleet.model("m").unwrap(),
            input_tokens: 1,
            max_output_tokens: None,
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        });
        let prefill = fleet.members[0].clone();
        let in_flight = InFlightGuard::passthrough(prefill.endpoint.clone());
        let decision = Some(FleetDecision { decision: Arc::new(decision), fleet });
        (routed, ChosenRoute { prefill, decode: None, in_flight, decision })
    }

    fn names(routed: &RoutedRequest, chosen: &ChosenRoute, most: usize) -> Vec<String> {
        let workers = fallback_workers(routed, chosen, most);
        workers.iter().map(|worker| worker.name.to_string()).collect()
    }

    #[test]
    fn workers_follow_in_the_order_of_their_costs() {
        let (routed, mut chosen) = chosen();
        assert_eq!(names(&routed, &chosen, 9), ["w2", "w1", "w3"]);
        assert_eq!(names(&routed, &chosen, 1), ["w2"]);
        chosen.decode = Some(chosen.prefill.clone());
        assert!(names(&routed, &chosen, 9).is_empty(), "a pair");
    }

    #[test]
    fn only_available_workers_of_the_scope_follow() {
        let (mut routed, chosen) = chosen();
        let fleet = chosen.decision.as_ref().unwrap().fleet.clone();
        fleet.members[2].endpoint.set_healthy(false);
        assert_eq!(names(&routed, &chosen, 9), ["w1", "w3"]);
        routed.pick_scope = Some(PickScope::new(Some(vec!["w0:80".to_owned(), "w3:80".to_owned()])));
        assert_eq!(names(&routed, &chosen, 9), ["w3"]);
        routed.pick_scope = Some(PickScope::new(None));
        assert_eq!(names(&routed, &chosen, 9), ["w1", "w3"]);
    }
}
