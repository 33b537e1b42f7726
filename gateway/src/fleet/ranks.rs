//! Data-parallel ranks of engines in a fleet snapshot. Each has a queue and a KV cache of its own, so each is a member; what belongs to
//! the whole engine (connections, health, breaker) is in the endpoint that its ranks share.

use std::sync::Arc;

use moongate_scheduler::{InstanceIndex, InstanceLoad, ReportedLoad, SchedulableInstance};

use super::snapshot::{FleetMember, FleetSnapshot};

impl FleetSnapshot {
    /// Adds a member and a schedulable instance for each rank of an engine, one after the other.
    pub(super) fn add_ranks(
        &mut self,
        engine: &FleetMember,
        schedulable: &SchedulableInstance,
        instances: &mut Vec<SchedulableInstance>,
    ) {
        let count = engine.rank_count();
        for rank in 0..count {
            let id = &engine.name;
            let name: Arc<str> = if count == 1 { id.clone() } else { format!("{id}#{rank}").into() };
            let position = InstanceIndex(u32::try_from(self.members.len()).unwrap_or(u32::MAX));
            self.positions.insert(name.clone(), position);
            instances.push(SchedulableInstance { name: name.clone(), rank, ..schedulable.clone() });
            self.members.push(FleetMember { name, rank, ..engine.clone() });
        }
    }

    /// The usable engines, each by its first rank: for what is the same for all ranks.
    pub(crate) fn engines(&self) -> impl Iterator<Item = &FleetMember> + Clone {
        self.members.iter().filter(|member| member.rank == 0)
    }

    /// The usable engines, each with the load of all its ranks together. `loads` is in the cluster's order.
    pub(crate) fn engines_with_load<'a>(
        &'a self,
        loads: &'a [InstanceLoad],
    ) -> impl Iterator<Item = (&'a FleetMember, InstanceLoad)> {
        let engines = self.members.iter().enumerate().filter(|(_, member)| member.rank == 0);
        engines.filter_map(|(position, member)| {
            let ranks = loads.get(position..)?.iter().take(member.slots.len());
            Some((member, ranks.copied().reduce(sum)?))
        })
    }
}

/// The load of two ranks of an engine together, as far as it is used. A prompt is sent to the rank that is free first.
fn sum(one: InstanceLoad, other: InstanceLoad) -> InstanceLoad {
    InstanceLoad {
        in_flight: one.in_flight.saturating_add(other.in_flight),
        pending_prefills: one.pending_prefills.saturating_add(other.pending_prefills),
        pending_prefill_tokens: one.pending_prefill_tokens.saturating_add(other.pending_prefill_tokens),
        active_decode_tokens: one.active_decode_tokens.saturating_add(other.active_decode_tokens),
        external_sequences: one.external_sequences.saturating_add(other.external_sequences),
        prefill_wait: one.prefill_wait.min(other.prefill_wait),
        reported: one.reported.zip(other.reported).map(|(one, other)| ReportedLoad {
            running: one.running.saturating_add(other.running),
            waiting: one.waiting.saturating_add(other.waiting),
            waiting_uncached_tokens: one
                .waiting_uncached_tokens
                .saturating_add(other.waiting_uncached_tokens),
            used_tokens: one.used_tokens.saturating_add(other.used_tokens),
            capacity_tokens: one.capacity_tokens.saturating_add(other.capacity_tokens),
            age: one.age.max(other.age),
        }),
        ..one
    }
}

#[cfg(test)]
mod tests {
    use moongate_discovery::{EngineKind, EngineRole};

    use super::*;
    use crate::kv_index::KvIndex;
    use crate::test_fleet;

    fn fleet(previous: &FleetSnapshot, index: &Arc<KvIndex>, dp_size: u32) -> FleetSnapshot {
        let engine = |name, dp_size| test_fleet::engine(name, EngineRole::Plain, EngineKind::Vllm, dp_size);
        test_fleet::snapshot(vec![engine("one", 1), engine("many", dp_size)], previous, index)
    }

    #[test]
    fn each_rank_is_a_member_with_its_own_slot() {
        let index = KvIndex::new(10);
        let first = fleet(&FleetSnapshot::default(), &index, 2);
        let names: Vec<&str> = first.members.iter().map(|member| &*member.name).collect();
        assert_eq!(names, ["one", "many#0", "many#1"]);
        assert_eq!(first.engines().count(), 2);
        for (ix, (member, instance)) in (0..).zip(first.members.iter().zip(first.cluster.instances())) {
            assert_eq!((&member.name, member.rank), (&instance.name, instance.rank));
            assert_eq!(first.index_of(&member.name), Some(InstanceIndex(ix)));
        }
        let slots = |fleet: &FleetSnapshot| -> Vec<_> {
            fleet.members.iter().map(|member| member.slot().unwrap().slot()).collect()
        };
        let [_, zero, one] = slots(&first)[..] else { panic!("three slots") };
        assert_ne!(zero, one);
        assert!(Arc::ptr_eq(&first.members[1].endpoint, &first.members[2].endpoint));
        let second = fleet(&first, &index, 2);
        assert_eq!(slots(&second), slots(&first), "slots outlive snapshots");
        let third = fleet(&second, &index, 3);
        assert_eq!(slots(&third)[..3], slots(&first));
    }

    #[test]
    fn load_of_an_engine_is_that_of_its_ranks() {
        let fleet = fleet(&FleetSnapshot::default(), &KvIndex::new(10), 2);
        let load = |pending_prefills, prefill_wait| InstanceLoad {
            pending_prefills,
            prefill_wait,
            reported: Some(ReportedLoad { running: pending_prefills, ..ReportedLoad::default() }),
            ..InstanceLoad::default()
        };
        let loads = [load(1, 5.0), load(2, 3.0), load(4, 2.0)];
        let engines: Vec<_> = fleet.engines_with_load(&loads).collect();
        let summary = |position: usize| {
            let (member, load): &(&FleetMember, InstanceLoad) = &engines[position];
            (&*member.instance.id.0, load.pending_prefills, load.prefill_wait, load.reported.unwrap().running)
        };
        assert_eq!(summary(0), ("one", 1, 5.0, 1));
        assert_eq!(summary(1), ("many", 6, 2.0, 6));
    }
}
