//! Requests on engines that the scheduler does not know: those on paths that are passed through, and embeddings.

use moongate_scheduler::InstanceLoad;

use crate::fleet::FleetSnapshot;

/// The number of such requests on each engine. The ranks of an engine share their connections, so each has those of all.
pub(super) fn unscheduled_requests(fleet: &FleetSnapshot, loads: &[InstanceLoad]) -> Vec<u32> {
    let mut unscheduled = Vec::with_capacity(loads.len());
    for (member, load) in fleet.engines_with_load(loads) {
        let count = member.endpoint.in_flight.count().saturating_sub(load.in_flight);
        unscheduled.extend(std::iter::repeat_n(count, member.rank_count() as usize));
    }
    unscheduled
}

#[cfg(test)]
mod tests {
    use moongate_discovery::{EngineKind, EngineRole};

    use super::*;
    use crate::fleet::EngineInFlightGuard;
    use crate::kv_index::KvIndex;
    use crate::test_fleet::{engine, snapshot};

    #[test]
    fn what_was_sent_without_the_scheduler_counts_on_every_rank() {
        let engines = [("one", 1), ("many", 2)];
        let engines = engines.map(|(name, ranks)| engine(name, EngineRole::Plain, EngineKind::Vllm, ranks));
        let fleet = snapshot(engines.to_vec(), &FleetSnapshot::default(), &KvIndex::new(100));
        let scheduled = InstanceLoad { in_flight: 1, ..InstanceLoad::default() };
        let idle = InstanceLoad::default();
        let position = |name: &str| fleet.members.iter().position(|member| &*member.name == name).unwrap();
        let many = position("many#0");
        let guard = || EngineInFlightGuard::new(fleet.members[many].endpoint.clone());
        let guards = [guard(), guard(), guard()];
        let mut loads = [idle; 3];
        loads[many + 1] = scheduled;
        let mut expected = [0; 3];
        expected[many..many + 2].fill(2);
        assert_eq!(unscheduled_requests(&fleet, &loads), expected);
        drop(guards);
        assert_eq!(unscheduled_requests(&fleet, &loads), [0; 3]);
    }
}
