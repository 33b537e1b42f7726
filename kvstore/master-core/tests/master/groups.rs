//! Groups are not in the model. These tests check that no group is partly evicted, that no space is leaked, and that state changes
//! rebuild the state.

use std::collections::{BTreeMap, BTreeSet};

use moongate_master_core::{MasterCoreOptions, RemoveCause, StateChange};
use proptest::prelude::*;

use crate::harness::{MIB, TestMasterCore, comparable_state, grouped, replayed};
use crate::model::KEYS;

#[derive(Clone, Debug)]
enum GroupStep {
    Put(usize, &'static str),
    Read(usize),
    Remove(usize),
    Wait(u64),
}

fn group_step() -> impl Strategy<Value = GroupStep> {
    let key = || 0..KEYS.len();
    prop_oneof![
        4 => (key(), prop_oneof![Just("x"), Just("y"), Just("")]).prop_map(|(key, group)| GroupStep::Put(key, group)),
        2 => key().prop_map(GroupStep::Read),
        1 => key().prop_map(GroupStep::Remove),
        1 => (0..20_000_u64).prop_map(GroupStep::Wait),
    ]
}

proptest! {
    #[test]
    fn groups_are_never_partly_evicted(steps in proptest::collection::vec(group_step(), 1..120)) {
        let settings = MasterCoreOptions { shards: 4, client_ttl_ms: 1 << 40, ..MasterCoreOptions::default() };
        let mut world = TestMasterCore::with_segments(settings.clone(), &[4 * MIB]);
        let mut groups: BTreeMap<&str, &str> = BTreeMap::new();
        for step in steps {
            let before = world.changes.len();
            match step {
                GroupStep::Put(key, group) => {
                    if world.put(KEYS[key], MIB / 2, &grouped(group)).is_ok() {
                        groups.insert(KEYS[key], group);
                    }
                }
                GroupStep::Read(key) => _ = world.exists(KEYS[key]),
                GroupStep::Remove(key) => _ = world.remove(KEYS[key]),
                GroupStep::Wait(ms) => world.tick(ms),
            }
            let emitted = world.changes[before..].iter();
            let evicted: BTreeSet<&str> = emitted
                .filter_map(|change| match change {
                    StateChange::Removed { key, cause: RemoveCause::Evicted, .. } => groups.get(&**key).copied(),
                    _ => None,
                })
                .filter(|group| !group.is_empty())
                .collect();
            for key in world.keys() {
                let group = groups[key.as_str()];
                let is_new = matches!(step, GroupStep::Put(index, _) if KEYS[index] == key);
                prop_assert!(is_new || !evicted.contains(group), "{key}");
            }
        }
        prop_assert_eq!(world.used(), world.keys().len() as u64 * (MIB / 2));
        prop_assert_eq!(comparable_state(&replayed(&settings, &world.changes, world.now)), comparable_state(&world.master));
    }
}
