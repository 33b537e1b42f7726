//! Random commands, compared with the model.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{SegmentStatus, Uuid};
use moongate_master_core::{ClientObjectKey, MasterCoreOptions, SnapshotCursor, StateChange};
use proptest::prelude::*;

use crate::harness::{
    MIB, TENANT, TestMasterCore, TestReplicateConfig, WRITER, comparable_state, endpoints, hard_pinned, id,
    replayed, segment, snapshot, soft_pinned,
};
use crate::model::{KEYS, MasterModel, ModelObject, ModelPendingVersion, ModelStep, RELEASE_MS, name, step};

/// Both, and what a snapshot in pieces has told.
struct ModelComparison {
    world: TestMasterCore,
    model: MasterModel,
    emitted_count: usize,
    settings: MasterCoreOptions,
    snapshot: Option<SnapshotCursor>,
    pieces: Vec<StateChange<'static>>,
    since: usize,
}

impl ModelComparison {
    fn new() -> Self {
        let settings = MasterCoreOptions {
            shards: 4,
            client_ttl_ms: 1 << 40,
            ramp_ms: 0,
            high_watermark: 1.0,
            // Then nothing is protected from eviction because it was written a moment ago, which the model does not have.
            eviction_ratio: 0.0,
            ..MasterCoreOptions::default()
        };
        let world = TestMasterCore::with_segments(settings.clone(), &[2 * MIB, 2 * MIB, MIB]);
        let emitted_count = world.facts.len();
        Self {
            world,
            model: MasterModel::default(),
            emitted_count,
            settings,
            snapshot: None,
            pieces: Vec::new(),
            since: 0,
        }
    }

    fn config(kind: usize) -> TestReplicateConfig {
        match kind {
            0 => TestReplicateConfig { replica_num: 2, ..TestReplicateConfig::default() },
            1 => soft_pinned(20_000),
            2 => hard_pinned(),
            _ => TestReplicateConfig::default(),
        }
    }

    fn start(
        &mut self,
        key: &'static str,
        size: u64,
        kind: usize,
        upsert: bool,
    ) -> Result<(), TestCaseError> {
        let config = Self::config(kind);
        let expected = self.model.start(key, size, upsert, self.world.now);
        let TestMasterCore { master, now, facts } = &mut self.world;
        let answer = if upsert {
            master.upsert_start(*now, WRITER, TENANT, key, size, &config, facts)
        } else {
            master.put_start(*now, WRITER, TENANT, key, size, &config, facts)
        };
        let now = *now;
        self.apply_changes()?;
        if expected.is_ok() && answer == Err(ErrorCode::NO_AVAILABLE_HANDLE) {
            // Only if nothing is left that could go and would make enough room by itself. What several make together need not lie side by side.
            let may_go = |it: &ModelObject| {
                let is_heard = it.nodes.iter().any(|node| !self.model.silent.contains(node));
                let is_idle = it.transfer.is_none() && it.pending.is_none();
                let is_free = it.written && !it.hard_pin && is_idle && it.stamp <= now;
                is_free && is_heard && it.size >= size
            };
            let left: Vec<_> =
                self.model.objects.iter().filter(|(it, object)| **it != key && may_go(object)).collect();
            let fits = self.world.master.segments_detail().segments.iter().any(|it| {
                it.size_bytes >= size && it.status == "OK" && !self.world.master.is_silent(it.segment_id)
            });
            prop_assert!(left.is_empty() || !fits, "{left:?}");
            return Ok(());
        }
        prop_assert_eq!(answer.as_ref().map(|_| ()).map_err(|error| *error), expected);
        let Ok(replicas) = answer else { return Ok(()) };
        let nodes: BTreeSet<String> = endpoints(&replicas).into_iter().collect();
        prop_assert_eq!(nodes.len(), replicas.len());
        let hard_pin = config.with_hard_pin;
        if let Some(present) = self.model.objects.get_mut(key).filter(|it| it.written) {
            present.abandon_pending();
            present.pending = Some(ModelPendingVersion { size, nodes, stamp: now, hard_pin });
            return Ok(());
        }
        let object = ModelObject {
            size,
            nodes,
            written: false,
            stamp: now,
            hard_pin,
            transfer: None,
            pending: None,
            superseded: false,
        };
        self.model.objects.insert(key, object);
        Ok(())
    }

    /// Takes over what the master told, and checks that it may be so.
    fn apply_changes(&mut self) -> Result<(), TestCaseError> {
        for fact in self.world.facts[self.emitted_count..].iter() {
            match fact {
                StateChange::Removed { key, cause, .. } => {
                    let is_right = self.model.remove_lost(key, *cause, self.world.now);
                    prop_assert!(is_right, "{key} {cause:?}");
                }
                StateChange::SegmentUnmounted { segment: gone, .. } => {
                    let gone = name(gone.first);
                    self.model.silent.remove(&gone);
                    for object in self.model.objects.values_mut() {
                        let was_there = object.nodes.remove(&gone);
                        let was_target = object.transfer.is_some_and(|(_, to)| name(to) == gone);
                        if was_there || was_target {
                            object.transfer = None;
                        }
                        if let Some(pending) = &mut object.pending {
                            pending.nodes.remove(&gone);
                            if pending.nodes.is_empty() {
                                object.abandon_pending();
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        self.emitted_count = self.world.facts.len();
        Ok(())
    }

    fn transfer(&mut self, key: &'static str, to: u64, moves: bool) -> Result<(), TestCaseError> {
        let target = name(to);
        let TestMasterCore { master, now, facts } = &mut self.world;
        let work = ClientObjectKey { client: WRITER, tenant: TENANT, key };
        let source = self.model.readable(key).ok().and_then(|object| {
            object.nodes.iter().find(|node| !self.model.silent.contains(*node) && **node != target).cloned()
        });
        let Some(source) = source else { return Ok(()) };
        let answer = if moves {
            master.move_start(*now, work, &source, &target, facts).map(|it| it.target.is_some())
        } else {
            master.copy_start(*now, work, &source, &[&target], None, facts).map(|it| !it.targets.is_empty())
        };
        let Some(object) = self.model.objects.get_mut(key) else { return Ok(()) };
        if object.pending.is_some() {
            let is_refused =
                matches!(answer, Err(ErrorCode::REPLICA_IS_NOT_READY | ErrorCode::SEGMENT_NOT_FOUND));
            prop_assert!(is_refused, "{answer:?}");
            return Ok(());
        }
        if object.transfer.is_some() {
            // The target is looked for first.
            let is_refused =
                matches!(answer, Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK | ErrorCode::SEGMENT_NOT_FOUND));
            prop_assert!(is_refused, "{answer:?}");
            return Ok(());
        }
        match answer {
            Ok(is_new) => {
                prop_assert_eq!(is_new, !object.nodes.contains(&target));
                object.transfer = Some((moves, to));
            }
            Err(error) => prop_assert!(
                matches!(error, ErrorCode::NO_AVAILABLE_HANDLE | ErrorCode::SEGMENT_NOT_FOUND),
                "{error}"
            ),
        }
        // The source of a move is not told apart by name in the model.
        if moves && object.transfer.is_some() && object.nodes.len() > 1 {
            master.move_revoke(*now, work, facts).unwrap();
            object.transfer = None;
        }
        Ok(())
    }

    fn end_transfer(&mut self, key: &'static str, done: bool) -> Result<(), TestCaseError> {
        let TestMasterCore { master, now, facts } = &mut self.world;
        let work = ClientObjectKey { client: WRITER, tenant: TENANT, key };
        let Some(object) = self.model.objects.get_mut(key) else { return Ok(()) };
        let Some((moves, to)) = object.transfer.take() else {
            prop_assert_eq!(
                master.copy_end(*now, work, None, facts),
                Err(ErrorCode::OBJECT_NO_REPLICATION_TASK)
            );
            return Ok(());
        };
        let ended = match (moves, done) {
            (true, true) => master.move_end(*now, work, facts),
            (true, false) => master.move_revoke(*now, work, facts),
            (false, true) => master.copy_end(*now, work, None, facts),
            (false, false) => master.copy_revoke(*now, work, None, facts),
        };
        prop_assert_eq!(ended, Ok(()));
        if done {
            let target = name(to);
            if moves {
                object.nodes.retain(|node| *node == target);
            }
            object.nodes.insert(target);
        }
        Ok(())
    }

    fn run(&mut self, step: &ModelStep) -> Result<(), TestCaseError> {
        match step.clone() {
            ModelStep::Start { key, size, kind, upsert } => self.start(KEYS[key], size, kind, upsert)?,
            ModelStep::End { key } => {
                let key = KEYS[key];
                let object = self.model.objects.get_mut(key).ok_or(ErrorCode::OBJECT_NOT_FOUND);
                let expected = object.and_then(|object| object.end(self.world.now));
                prop_assert_eq!(self.world.end(key), expected);
            }
            ModelStep::Revoke { key } => {
                let key = KEYS[key];
                let expected = match self.model.objects.get_mut(key) {
                    None => Err(ErrorCode::OBJECT_NOT_FOUND),
                    Some(object) if object.pending.is_some() => {
                        object.pending = None;
                        Ok(())
                    }
                    Some(object) if object.superseded => Err(ErrorCode::ILLEGAL_CLIENT),
                    Some(object) if object.written => Err(ErrorCode::INVALID_WRITE),
                    Some(_) => Ok(()),
                };
                prop_assert_eq!(self.world.revoke(key), expected);
            }
            ModelStep::Exist { key } => self.exist(&[key], |world, keys| vec![world.exists(keys[0])])?,
            ModelStep::BatchExist { keys } => self.exist(&keys, |world, keys| {
                let mut found = Vec::new();
                world.master.batch_exist(world.now, TENANT, keys, &mut found);
                found
            })?,
            ModelStep::Replicas { key } => {
                let key = KEYS[key];
                let expected = self.model.readable(key).map(|object| {
                    object.nodes.difference(&self.model.silent).cloned().collect::<BTreeSet<String>>()
                });
                if expected.is_ok() {
                    self.model.lease(key, self.world.now);
                }
                let list = self.world.master.replicas(self.world.now, TENANT, key);
                prop_assert_eq!(list.map(|it| endpoints(&it.replicas).into_iter().collect()), expected);
            }
            ModelStep::Remove { key, force } => {
                let key = KEYS[key];
                let expected = self.model.remove(key, force, self.world.now);
                let TestMasterCore { master, now, facts } = &mut self.world;
                prop_assert_eq!(master.remove(*now, TENANT, key, force, facts), expected);
            }
            ModelStep::RemoveAll { force } => {
                let now = self.world.now;
                let keys = self.model.objects.keys();
                let count = keys.filter(|key| self.model.remove(key, force, now).is_ok()).count();
                let removed = self.world.master.remove_all(now, None, force, &mut self.world.facts);
                prop_assert_eq!(removed, count as i64);
            }
            ModelStep::Tick { ms } => self.tick(ms),
            ModelStep::Mount { node } => {
                let size = if node == 3 { MIB } else { 2 * MIB };
                let TestMasterCore { master, now, facts } = &mut self.world;
                prop_assert_eq!(master.remount(*now, &[segment(node, size)], id(100 + node), facts), Ok(()));
                self.model.silent.remove(&name(node));
            }
            ModelStep::Unmount { node } => {
                let TestMasterCore { master, now, facts } = &mut self.world;
                prop_assert_eq!(master.unmount(*now, id(node), id(100 + node), facts), Ok(()));
            }
            ModelStep::Lost { node } => {
                let TestMasterCore { master, now, facts } = &mut self.world;
                let is_mounted = master.segment_status_by_id(id(node)) == Ok(SegmentStatus::OK);
                master.client_disconnected(*now, id(100 + node), facts);
                if is_mounted {
                    self.model.silent.insert(name(node));
                }
            }
            ModelStep::Transfer { key, to, moves } => self.transfer(KEYS[key], to, moves)?,
            ModelStep::TransferEnd { key, done } => self.end_transfer(KEYS[key], done)?,
        }
        self.apply_changes()?;
        self.check()
    }

    fn exist(
        &mut self,
        keys: &[usize],
        ask: impl FnOnce(&TestMasterCore, &[&'static str]) -> Vec<bool>,
    ) -> Result<(), TestCaseError> {
        let keys: Vec<&'static str> = keys.iter().map(|at| KEYS[*at]).collect();
        let expected: Vec<bool> = keys.iter().map(|key| self.model.readable(key).is_ok()).collect();
        for (key, _) in keys.iter().zip(&expected).filter(|(_, is_there)| **is_there) {
            self.model.lease(key, self.world.now);
        }
        prop_assert_eq!(ask(&self.world, &keys), expected);
        Ok(())
    }

    fn tick(&mut self, ms: u64) {
        self.world.tick(ms);
        let now = self.world.now;
        let objects = self.model.objects.values_mut();
        let is_late =
            |it: &&mut ModelObject| it.pending.as_ref().is_some_and(|it| it.stamp + RELEASE_MS <= now);
        objects.filter(is_late).for_each(ModelObject::abandon_pending);
        if ms >= RELEASE_MS {
            // Everything that goes on has gone on for too long by now.
            self.model.objects.values_mut().for_each(|object| object.transfer = None);
        }
    }

    /// What the master has is what the model has, and space is neither lost nor given away twice.
    fn check(&mut self) -> Result<(), TestCaseError> {
        let master = &self.world.master;
        let mut taken: BTreeMap<(Uuid, u64), u64> = BTreeMap::new();
        let mut found = BTreeMap::new();
        for fact in snapshot(master, 3) {
            let (written, object) = match fact {
                StateChange::ObjectStored { object, .. } => (true, object),
                StateChange::ObjectStarted(object) => (false, object),
                StateChange::RangeQuarantined { segment, offset, size, .. } => {
                    prop_assert!(taken.insert((segment, offset), size).is_none());
                    continue;
                }
                _ => continue,
            };
            for place in object.locations.iter() {
                prop_assert!(taken.insert((place.segment, place.offset), object.size).is_none());
            }
            let nodes: BTreeSet<String> = object.locations.iter().map(|it| name(it.segment.first)).collect();
            found.insert((object.key.to_string(), written), (object.size, nodes));
        }
        let mut expected = BTreeMap::new();
        for (key, it) in &self.model.objects {
            expected.insert(((*key).to_owned(), it.written), (it.size, it.nodes.clone()));
            if let Some(pending) = &it.pending {
                expected.insert(((*key).to_owned(), false), (pending.size, pending.nodes.clone()));
            }
        }
        prop_assert_eq!(found, expected);
        let rounded =
            |size: u64| if size < 8 { size } else { size.next_multiple_of(1 << (size.ilog2() - 3)) };
        let mut end: BTreeMap<Uuid, u64> = BTreeMap::new();
        for ((segment, offset), size) in &taken {
            let end = end.entry(*segment).or_default();
            prop_assert!(*offset >= *end, "overlap");
            *end = offset + rounded(*size);
        }
        prop_assert_eq!(master.space_usage().used, taken.values().sum::<u64>());
        Ok(())
    }

    /// Another piece of a snapshot that is taken while things change.
    fn snapshot_step(&mut self, at: usize) {
        if at == 10 {
            (self.snapshot, self.since) = (Some(SnapshotCursor::default()), self.world.facts.len());
        }
        if let Some(from) = self.snapshot {
            self.snapshot = self.world.master.snapshot(from, 1, &mut self.pieces);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn every_answer_is_the_models_and_facts_rebuild_the_state(
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let mut pair = ModelComparison::new();
        for (at, step) in steps.iter().enumerate() {
            pair.snapshot_step(at);
            pair.run(step)?;
        }
        let ModelComparison { world, settings, .. } = &pair;
        let replayed_from_log = replayed(settings, &world.facts, world.now);
        prop_assert_eq!(comparable_state(&replayed_from_log), comparable_state(&world.master));
        if pair.snapshot.is_none() && pair.since > 0 {
            let all = [&pair.pieces[..], &world.facts[pair.since..]].concat();
            let replayed_from_pieces = replayed(settings, &all, world.now);
            prop_assert_eq!(comparable_state(&replayed_from_pieces), comparable_state(&world.master));
        }
    }
}
