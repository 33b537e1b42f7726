//! Random operations, compared with the model.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{SegmentStatus, Uuid};
use moongate_master_core::{
    CopyRequest, MasterCoreOptions, MoveRequest, PutStartRequest, RemoveContext, SnapshotCursor, StateChange,
};
use proptest::prelude::*;

use crate::harness::{
    MIB, TENANT, TestMasterCore, TestReplicateConfig, WRITER, caller, client_segment, comparable_state,
    endpoints, hard_pinned, id, replayed, segment, snapshot, soft_pinned,
};
use crate::model::{KEYS, MasterModel, ModelObject, ModelPendingVersion, ModelStep, RELEASE_MS, name, step};

/// The master and the model, and the parts of a snapshot taken meanwhile.
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
            // Disables the protection of recent writes, which the model lacks.
            eviction_ratio: 0.0,
            ..MasterCoreOptions::default()
        };
        let world = TestMasterCore::with_segments(settings.clone(), &[2 * MIB, 2 * MIB, MIB]);
        let emitted_count = world.changes.len();
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
        let TestMasterCore { master, now, changes } = &mut self.world;
        let result = if upsert {
            master.upsert_start(
                caller(*now, WRITER),
                &PutStartRequest { key, size, config: &config },
                changes,
            )
        } else {
            master.put_start(caller(*now, WRITER), &PutStartRequest { key, size, config: &config }, changes)
        };
        let now = *now;
        self.apply_changes()?;
        if expected.is_ok() && result == Err(ErrorCode::NO_AVAILABLE_HANDLE) {
            // Allowed only if no evictable object is large enough by itself: the ranges of several need not be adjacent.
            let is_evictable = |it: &ModelObject| {
                let is_responsive = it.nodes.iter().any(|node| !self.model.silent.contains(node));
                let is_idle = it.transfer.is_none() && it.pending.is_none();
                let is_unprotected = it.written && !it.hard_pin && is_idle && it.stamp <= now;
                is_unprotected && is_responsive && it.size >= size
            };
            let evictable: Vec<_> = self
                .model
                .objects
                .iter()
                .filter(|(it, object)| **it != key && is_evictable(object))
                .collect();
            let fits = self.world.master.segments_detail().segments.iter().any(|it| {
                it.size_bytes >= size && it.status == "OK" && !self.world.master.is_silent(it.segment_id)
            });
            prop_assert!(evictable.is_empty() || !fits, "{evictable:?}");
            return Ok(());
        }
        prop_assert_eq!(result.as_ref().map(|_| ()).map_err(|error| *error), expected);
        let Ok(replicas) = result else { return Ok(()) };
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

    /// Applies the emitted state changes to the model and checks that they are allowed.
    fn apply_changes(&mut self) -> Result<(), TestCaseError> {
        for change in self.world.changes[self.emitted_count..].iter() {
            match change {
                StateChange::Removed { key, cause, .. } => {
                    let is_allowed = self.model.remove_lost(key, *cause, self.world.now);
                    prop_assert!(is_allowed, "{key} {cause:?}");
                }
                StateChange::SegmentUnmounted { segment, .. } => {
                    let unmounted = name(segment.first);
                    self.model.silent.remove(&unmounted);
                    for object in self.model.objects.values_mut() {
                        let was_source = object.nodes.remove(&unmounted);
                        let was_target = object.transfer.is_some_and(|(_, to)| name(to) == unmounted);
                        if was_source || was_target {
                            object.transfer = None;
                        }
                        if let Some(pending) = &mut object.pending {
                            pending.nodes.remove(&unmounted);
                            if pending.nodes.is_empty() {
                                object.abandon_pending();
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        self.emitted_count = self.world.changes.len();
        Ok(())
    }

    fn transfer(&mut self, key: &'static str, to: u64, is_move: bool) -> Result<(), TestCaseError> {
        let target = name(to);
        let TestMasterCore { master, now, changes } = &mut self.world;
        let source = self.model.readable(key).ok().and_then(|object| {
            object.nodes.iter().find(|node| !self.model.silent.contains(*node) && **node != target).cloned()
        });
        let Some(source) = source else { return Ok(()) };
        let result = if is_move {
            master
                .move_start(
                    caller(*now, WRITER),
                    MoveRequest { key, source: &source, target: &target },
                    changes,
                )
                .map(|it| it.target.is_some())
        } else {
            master
                .copy_start(
                    caller(*now, WRITER),
                    &CopyRequest { key, source: &source, targets: &[&target], lease: None },
                    changes,
                )
                .map(|it| !it.targets.is_empty())
        };
        let Some(object) = self.model.objects.get_mut(key) else { return Ok(()) };
        if object.pending.is_some() {
            let is_rejected =
                matches!(result, Err(ErrorCode::REPLICA_IS_NOT_READY | ErrorCode::SEGMENT_NOT_FOUND));
            prop_assert!(is_rejected, "{result:?}");
            return Ok(());
        }
        if object.transfer.is_some() {
            // The target is checked before the source.
            let is_rejected =
                matches!(result, Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK | ErrorCode::SEGMENT_NOT_FOUND));
            prop_assert!(is_rejected, "{result:?}");
            return Ok(());
        }
        match result {
            Ok(is_new) => {
                prop_assert_eq!(is_new, !object.nodes.contains(&target));
                object.transfer = Some((is_move, to));
            }
            Err(error) => prop_assert!(
                matches!(error, ErrorCode::NO_AVAILABLE_HANDLE | ErrorCode::SEGMENT_NOT_FOUND),
                "{error}"
            ),
        }
        // The model does not track which replica is the source of a move.
        if is_move && object.transfer.is_some() && object.nodes.len() > 1 {
            master.move_revoke(caller(*now, WRITER), key, changes).unwrap();
            object.transfer = None;
        }
        Ok(())
    }

    fn end_transfer(&mut self, key: &'static str, done: bool) -> Result<(), TestCaseError> {
        let TestMasterCore { master, now, changes } = &mut self.world;
        let Some(object) = self.model.objects.get_mut(key) else { return Ok(()) };
        let Some((is_move, to)) = object.transfer.take() else {
            prop_assert_eq!(
                master.copy_end(caller(*now, WRITER), key, None, changes),
                Err(ErrorCode::OBJECT_NO_REPLICATION_TASK)
            );
            return Ok(());
        };
        let ended = match (is_move, done) {
            (true, true) => master.move_end(caller(*now, WRITER), key, changes),
            (true, false) => master.move_revoke(caller(*now, WRITER), key, changes),
            (false, true) => master.copy_end(caller(*now, WRITER), key, None, changes),
            (false, false) => master.copy_revoke(caller(*now, WRITER), key, None, changes),
        };
        prop_assert_eq!(ended, Ok(()));
        if done {
            let target = name(to);
            if is_move {
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
                let TestMasterCore { master, now, changes } = &mut self.world;
                prop_assert_eq!(
                    master.remove(RemoveContext { now_ms: *now, tenant: TENANT, force }, key, changes),
                    expected
                );
            }
            ModelStep::RemoveAll { force } => {
                let now = self.world.now;
                let keys = self.model.objects.keys();
                let count = keys.filter(|key| self.model.remove(key, force, now).is_ok()).count();
                let removed = self.world.master.remove_all(now, None, force, &mut self.world.changes);
                prop_assert_eq!(removed, count as i64);
            }
            ModelStep::Tick { ms } => self.tick(ms),
            ModelStep::Mount { node } => {
                let size = if node == 3 { MIB } else { 2 * MIB };
                let TestMasterCore { master, now, changes } = &mut self.world;
                prop_assert_eq!(
                    master.remount(*now, &[segment(node, size)], id(100 + node), changes),
                    Ok(())
                );
                self.model.silent.remove(&name(node));
            }
            ModelStep::Unmount { node } => {
                let TestMasterCore { master, now, changes } = &mut self.world;
                prop_assert_eq!(
                    master.unmount(*now, client_segment(id(node), id(100 + node)), changes),
                    Ok(())
                );
            }
            ModelStep::Lost { node } => {
                let TestMasterCore { master, now, changes } = &mut self.world;
                let is_mounted = master.segment_status_by_id(id(node)) == Ok(SegmentStatus::OK);
                master.client_disconnected(*now, id(100 + node), changes);
                if is_mounted {
                    self.model.silent.insert(name(node));
                }
            }
            ModelStep::Transfer { key, to, is_move } => self.transfer(KEYS[key], to, is_move)?,
            ModelStep::TransferEnd { key, done } => self.end_transfer(KEYS[key], done)?,
        }
        self.apply_changes()?;
        self.check()
    }

    fn exist(
        &mut self,
        keys: &[usize],
        query: impl FnOnce(&TestMasterCore, &[&'static str]) -> Vec<bool>,
    ) -> Result<(), TestCaseError> {
        let keys: Vec<&'static str> = keys.iter().map(|index| KEYS[*index]).collect();
        let expected: Vec<bool> = keys.iter().map(|key| self.model.readable(key).is_ok()).collect();
        for (key, _) in keys.iter().zip(&expected).filter(|(_, is_readable)| **is_readable) {
            self.model.lease(key, self.world.now);
        }
        prop_assert_eq!(query(&self.world, &keys), expected);
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
            // All active transfers have timed out.
            self.model.objects.values_mut().for_each(|object| object.transfer = None);
        }
    }

    /// Checks that the master's objects equal the model's, and that space is neither leaked nor allocated twice.
    fn check(&mut self) -> Result<(), TestCaseError> {
        let master = &self.world.master;
        let mut taken: BTreeMap<(Uuid, u64), u64> = BTreeMap::new();
        let mut found = BTreeMap::new();
        for change in snapshot(master, 3) {
            let (written, object) = match change {
                StateChange::ObjectStored { object, .. } => (true, object),
                StateChange::ObjectStarted(object) => (false, object),
                StateChange::RangeQuarantined { segment, offset, size, .. } => {
                    prop_assert!(taken.insert((segment, offset), size).is_none());
                    continue;
                }
                _ => continue,
            };
            for location in object.locations.iter() {
                prop_assert!(taken.insert((location.segment, location.offset), object.size).is_none());
            }
            let nodes: BTreeSet<String> =
                object.locations.iter().map(|object| name(object.segment.first)).collect();
            found.insert((object.key.to_string(), written), (object.size, nodes));
        }
        let mut expected = BTreeMap::new();
        for (key, object) in &self.model.objects {
            expected.insert(((*key).to_owned(), object.written), (object.size, object.nodes.clone()));
            if let Some(pending) = &object.pending {
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

    /// Takes another part of a snapshot while the state changes.
    fn snapshot_step(&mut self, step: usize) {
        if step == 10 {
            (self.snapshot, self.since) = (Some(SnapshotCursor::default()), self.world.changes.len());
        }
        if let Some(from) = self.snapshot {
            self.snapshot = self.world.master.snapshot(from, 1, &mut self.pieces);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn results_match_the_model_and_replay_restores_the_state(
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let mut pair = ModelComparison::new();
        for (index, step) in steps.iter().enumerate() {
            pair.snapshot_step(index);
            pair.run(step)?;
        }
        let ModelComparison { world, settings, .. } = &pair;
        let replayed_from_log = replayed(settings, &world.changes, world.now);
        prop_assert_eq!(comparable_state(&replayed_from_log), comparable_state(&world.master));
        if pair.snapshot.is_none() && pair.since > 0 {
            let all = [&pair.pieces[..], &world.changes[pair.since..]].concat();
            let replayed_from_pieces = replayed(settings, &all, world.now);
            prop_assert_eq!(comparable_state(&replayed_from_pieces), comparable_state(&world.master));
        }
    }
}
