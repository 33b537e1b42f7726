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
