//! Copies and moves of replicas, which a node does and tells the master about.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{CopyPlan, MovePlan, Uuid};

use crate::change::{StateChange, StateChangeSink, StoreCause};
use crate::locked_shard::{KeyLocation, LockedShard};
use crate::master::MasterCore;
use crate::object::{MemoryReplica, ReplicaTransfer};

/// A key that a client works on.
#[derive(Clone, Copy, Debug)]
pub struct ClientObjectKey<'a> {
    /// Who works.
    pub client: Uuid,
    /// Whose the key is.
    pub tenant: &'a str,
    /// The key.
    pub key: &'a str,
}

/// What identifies a copy that the master made up because of load: the lease and its epoch.
pub type DynamicReplicationLease = (Uuid, u64);

impl MasterCore {
    /// Takes space for copies of an object on the named segments, except on those that have one. Nothing is evicted for
    /// a copy. `plan` is that of a copy that the master made up.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`, `OBJECT_HAS_REPLICATION_TASK`, `REPLICA_NOT_FOUND` if it is not on
    /// the source, `SEGMENT_NOT_FOUND` and `NO_AVAILABLE_HANDLE` for a target, `INVALID_PARAMS` for an unknown plan.
    pub fn copy_start<S: AsRef<str>>(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        source: &str,
        targets: &[S],
        plan: Option<DynamicReplicationLease>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<CopyPlan<Arc<str>>, ErrorCode> {
        if let Some(plan) = plan {
            // An object that is not there is told before a plan that is none.
            self.source_of(work.tenant, work.key, None)?;
            self.check_plan(now_ms, plan)?;
        }
        let targets: Vec<&str> = targets.iter().map(AsRef::as_ref).collect();
        let (source, targets) = self.begin_transfer(now_ms, work, source, &targets, (false, plan), fx)?;
        Ok(CopyPlan { source, targets })
    }

    /// Ends a copy: the new replicas can be read.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `OBJECT_NO_REPLICATION_TASK`, `ILLEGAL_CLIENT`, `INVALID_PARAMS` if it is a move.
    pub fn copy_end(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        plan: Option<DynamicReplicationLease>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(work, (false, plan), |shard, at| shard.finish_transfer(at, now_ms, fx))
    }

    /// Gives up a copy and its space.
    ///
    /// # Errors
    /// As [`Self::copy_end`].
    pub fn copy_revoke(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        plan: Option<DynamicReplicationLease>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(work, (false, plan), |shard, at| shard.end_transfer(at, now_ms, fx))
    }

    /// Takes space for an object on another segment, unless it is there already.
    ///
    /// # Errors
    /// As [`Self::copy_start`].
    pub fn move_start(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        source: &str,
        target: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Result<MovePlan<Arc<str>>, ErrorCode> {
        if source == target {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let (source, targets) = self.begin_transfer(now_ms, work, source, &[target], (true, None), fx)?;
        Ok(MovePlan { source, target: targets.into_iter().next() })
    }

    /// Ends a move: the new replica can be read, the old one is gone.
    ///
    /// # Errors
    /// As [`Self::copy_end`], but `INVALID_PARAMS` if it is a copy.
    pub fn move_end(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(work, (true, None), |shard, at| shard.finish_transfer(at, now_ms, fx))
    }

    /// Gives up a move and its space.
    ///
    /// # Errors
    /// As [`Self::move_end`].
    pub fn move_revoke(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(work, (true, None), |shard, at| shard.end_transfer(at, now_ms, fx))
    }

    fn begin_transfer(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        source: &str,
        targets: &[&str],
        (moves, plan): (bool, Option<DynamicReplicationLease>),
        fx: &mut dyn StateChangeSink,
    ) -> Result<(crate::SharedReplicaDescriptor, crate::ReplicaDescriptors), ErrorCode> {
        self.check_segments(targets, ErrorCode::SEGMENT_NOT_FOUND)?;
        let spot = self.locate_reader_key(work.tenant, work.key)?;
        let mut shard = self.lock(spot.shard);
        let at = shard.lookup(spot, work.key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let source = shard.source(at, source, moves)?;
        let mut new = shard.allocate_targets(at, targets)?;
        new.iter_mut().for_each(|it| it.id = self.new_replica_id());
        let transfer = ReplicaTransfer {
            client: work.client,
            source: source.id,
            is_move: moves,
            since_ms: now_ms,
            lease: plan,
        };
        shard.set_transfer(at, transfer, &new);
        shard.emit_transfer(at, fx);
        let size = shard.entries[at].size;
        let source = shard.to_descriptor(&source, size).ok_or(ErrorCode::REPLICA_NOT_FOUND)?;
        Ok((source, new.iter().filter_map(|it| shard.to_descriptor(it, size)).collect()))
    }

    fn with_transfer(
        &self,
        work: ClientObjectKey<'_>,
        (moves, plan): (bool, Option<DynamicReplicationLease>),
        end: impl FnOnce(&mut LockedShard<'_>, u32),
    ) -> Result<(), ErrorCode> {
        let spot: KeyLocation = self.locate_reader_key(work.tenant, work.key)?;
        let mut shard = self.lock(spot.shard);
        let at = shard.lookup(spot, work.key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let transfer = shard.entries[at].transfer().ok_or(ErrorCode::OBJECT_NO_REPLICATION_TASK)?;
        if transfer.client != work.client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        if transfer.is_move != moves {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if transfer.lease != plan {
            return Err(ErrorCode::OBJECT_NO_REPLICATION_TASK);
        }
        end(&mut shard, at);
        Ok(())
    }
}

impl LockedShard<'_> {
    /// The replica to copy from.
    fn source(&self, at: u32, segment: &str, moves: bool) -> Result<MemoryReplica, ErrorCode> {
        let entry = &self.entries[at];
        if !entry.is_complete() || entry.pending().is_some() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        // A node that puts the object on its disk reads what a move would take away.
        if entry.transfer().is_some() || moves && entry.work().is_some() {
            return Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK);
        }
        let is_source = |it: &&MemoryReplica| {
            self.can_be_read(it)
                && self.segments.get(it.segment).is_some_and(|mounted| *mounted.descriptor.name == *segment)
        };
        entry.replicas().find(is_source).copied().ok_or(ErrorCode::REPLICA_NOT_FOUND)
    }

    /// Space on each of the named segments that do not have the object: all or nothing.
    fn allocate_targets(&self, at: u32, names: &[&str]) -> Result<Vec<MemoryReplica>, ErrorCode> {
        let entry = &self.entries[at];
        let mut new: Vec<MemoryReplica> = Vec::new();
        for name in names {
            let has_it = |it: &MemoryReplica| self.segments.indices_by_name(name).contains(&it.segment);
            if entry.replicas().any(has_it) || new.iter().any(has_it) {
                continue;
            }
            match self.allocate_on(name, entry.size) {
                Ok(replica) => new.push(replica),
                Err(error) => {
                    new.iter().for_each(|it| self.free(it));
                    return Err(error);
                }
            }
        }
        Ok(new)
    }

    fn allocate_on(&self, name: &str, size: u64) -> Result<MemoryReplica, ErrorCode> {
        let places = self.segments.indices_by_name(name);
        if places.is_empty() {
            return Err(ErrorCode::SEGMENT_NOT_FOUND);
        }
        let mounted = places.iter().filter_map(|at| Some((*at, self.segments.get(*at)?)));
        let mut spaces = mounted.filter(|(_, it)| it.is_writable()).filter_map(|(segment, it)| {
            let space = it.allocate(size)?;
            Some(MemoryReplica { id: 0, offset: space.offset, block: space.block, segment, ready: false })
        });
        spaces.next().ok_or(ErrorCode::NO_AVAILABLE_HANDLE)
    }

    /// Makes the new replicas readable, and removes the old one of a move.
    fn finish_transfer(&mut self, at: u32, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let Some(transfer) = self.clear_transfer(at) else { return };
        let entry = &mut self.entries[at];
        let mut replicas: Vec<MemoryReplica> = entry.replicas().copied().collect();
        let new: Vec<MemoryReplica> = replicas.iter().filter(|it| !it.ready).copied().collect();
        replicas.iter_mut().for_each(|it| it.ready = true);
        let source = replicas.iter().position(|it| it.id == transfer.source);
        let old = source.filter(|_| transfer.is_move && replicas.len() > 1).map(|at| replicas.remove(at));
        entry.set_replicas(&replicas);
        let (size, tenant, stamp, is_leased) =
            (entry.size, entry.tenant, entry.stamp, entry.is_leased(now_ms));
        for place in self.locations(new.into_iter()) {
            fx.record(StateChange::RangeReleased { segment: place.segment, offset: place.offset });
        }
        self.emit_transfer_ended(at, fx);
        self.requeue(at, now_ms);
        self.emit_state(at, StoreCause::Replicas, fx);
        let Some(old) = old else { return };
        self.master.tenants.discharge(tenant, size);
        self.report_vacated([old].iter(), fx);
        if is_leased {
            self.quarantine(&old, size, stamp, fx);
        } else {
            self.free(&old);
        }
    }

    /// Gives up a copy or a move, if there is one.
    pub(crate) fn end_transfer(&mut self, at: u32, now_ms: u64, fx: &mut dyn StateChangeSink) {
        if self.clear_transfer(at).is_none() {
            return;
        }
        let entry = &mut self.entries[at];
        let (ready, new): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
            entry.replicas().partition(|it| it.ready);
        entry.set_replicas(&ready);
        let (tenant, bytes) = (entry.tenant, entry.size * new.len() as u64);
        self.master.tenants.discharge(tenant, bytes);
        for place in self.locations(new.iter().copied()) {
            fx.record(StateChange::RangeReleased { segment: place.segment, offset: place.offset });
        }
        self.emit_transfer_ended(at, fx);
        new.iter().for_each(|it| self.free(it));
        self.requeue(at, now_ms);
    }

    fn clear_transfer(&mut self, at: u32) -> Option<ReplicaTransfer> {
        let transfer = self.entries[at].extra.as_mut()?.transfer.take()?;
        self.transfers.retain(|it| *it != at);
        Some(transfer)
    }

    fn requeue(&mut self, at: u32, now_ms: u64) {
        let queue = self.entries[at].target_queue(now_ms);
        self.enqueue(at, queue);
    }
}
