//! Copies and moves of replicas, which a node performs and reports to the master.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{CopyPlan, MovePlan, Uuid};

use crate::change::{DynamicReplicationLease, StateChange, StateChangeSink, StoreCause};
use crate::locked_shard::{KeyLocation, LockedShard};
use crate::master::MasterCore;
use crate::object::{MemoryReplica, ReplicaTransfer};
use crate::segment::{ReplicaDescriptors, SharedReplicaDescriptor};

/// A key, with its tenant and the client that operates on it.
#[derive(Clone, Copy, Debug)]
pub struct ClientObjectKey<'a> {
    /// Client that performs the operation.
    pub client: Uuid,
    pub tenant: &'a str,
    pub key: &'a str,
}

impl MasterCore {
    /// Allocates space for copies of an object on the named segments, except on those with a replica. Evicts nothing. `lease` is
    /// that of a copy planned by dynamic replication.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`, `OBJECT_HAS_REPLICATION_TASK`, `REPLICA_NOT_FOUND` if it is not on the source
    /// segment, `SEGMENT_NOT_FOUND` and `NO_AVAILABLE_HANDLE` for a target, `INVALID_PARAMS` for an unknown lease.
    pub fn copy_start<S: AsRef<str>>(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        source: &str,
        targets: &[S],
        lease: Option<DynamicReplicationLease>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<CopyPlan<Arc<str>>, ErrorCode> {
        if let Some(lease) = lease {
            // A missing object takes precedence over an invalid lease.
            self.source_of(work.tenant, work.key, None)?;
            self.check_plan(now_ms, lease)?;
        }
        let targets: Vec<&str> = targets.iter().map(AsRef::as_ref).collect();
        let (source, targets) = self.begin_transfer(now_ms, work, source, &targets, (false, lease), fx)?;
        Ok(CopyPlan { source, targets })
    }

    /// Ends a copy: the new replicas become readable.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `OBJECT_NO_REPLICATION_TASK`, `ILLEGAL_CLIENT`, `INVALID_PARAMS` if the transfer is a move.
    pub fn copy_end(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        lease: Option<DynamicReplicationLease>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(work, (false, lease), |shard, index| shard.finish_transfer(index, now_ms, fx))
    }

    /// Revokes a copy and frees its space.
    ///
    /// # Errors
    /// As [`Self::copy_end`].
    pub fn copy_revoke(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        lease: Option<DynamicReplicationLease>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(work, (false, lease), |shard, index| shard.end_transfer(index, now_ms, fx))
    }

    /// Allocates space for an object on another segment, unless that has a replica.
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

    /// Ends a move: the new replica becomes readable, the old one is removed.
    ///
    /// # Errors
    /// As [`Self::copy_end`], but `INVALID_PARAMS` if the transfer is a copy.
    pub fn move_end(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(work, (true, None), |shard, index| shard.finish_transfer(index, now_ms, fx))
    }

    /// Revokes a move and frees its space.
    ///
    /// # Errors
    /// As [`Self::move_end`].
    pub fn move_revoke(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(work, (true, None), |shard, index| shard.end_transfer(index, now_ms, fx))
    }

    fn begin_transfer(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        source: &str,
        targets: &[&str],
        (is_move, lease): (bool, Option<DynamicReplicationLease>),
        fx: &mut dyn StateChangeSink,
    ) -> Result<(SharedReplicaDescriptor, ReplicaDescriptors), ErrorCode> {
        self.check_segments(targets, ErrorCode::SEGMENT_NOT_FOUND)?;
        let key_location = self.locate_reader_key(work.tenant, work.key)?;
        let mut shard = self.lock(key_location.shard);
        let index = shard.lookup(key_location, work.key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let source = shard.source(index, source, is_move)?;
        let mut new = shard.allocate_targets(index, targets)?;
        new.iter_mut().for_each(|replica| replica.id = self.new_replica_id());
        let transfer =
            ReplicaTransfer { client: work.client, source: source.id, is_move, since_ms: now_ms, lease };
        shard.set_transfer(index, transfer, &new);
        shard.emit_transfer(index, fx);
        let size = shard.entries[index].size;
        let source = shard.to_descriptor(&source, size).ok_or(ErrorCode::REPLICA_NOT_FOUND)?;
        Ok((source, new.iter().filter_map(|replica| shard.to_descriptor(replica, size)).collect()))
    }

    fn with_transfer(
        &self,
        work: ClientObjectKey<'_>,
        (is_move, lease): (bool, Option<DynamicReplicationLease>),
        end: impl FnOnce(&mut LockedShard<'_>, u32),
    ) -> Result<(), ErrorCode> {
        let key_location: KeyLocation = self.locate_reader_key(work.tenant, work.key)?;
        let mut shard = self.lock(key_location.shard);
        let index = shard.lookup(key_location, work.key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let transfer = shard.entries[index].transfer().ok_or(ErrorCode::OBJECT_NO_REPLICATION_TASK)?;
        if transfer.client != work.client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        if transfer.is_move != is_move {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if transfer.lease != lease {
            return Err(ErrorCode::OBJECT_NO_REPLICATION_TASK);
        }
        end(&mut shard, index);
        Ok(())
    }
}

impl LockedShard<'_> {
    /// The source replica of a transfer.
    fn source(&self, index: u32, segment: &str, is_move: bool) -> Result<MemoryReplica, ErrorCode> {
        let entry = &self.entries[index];
        if !entry.is_complete() || entry.pending().is_some() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        // A node that offloads the object reads the replica that a move would remove.
        if entry.transfer().is_some() || is_move && entry.work().is_some() {
            return Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK);
        }
        let is_source = |replica: &&MemoryReplica| {
            self.can_be_read(replica)
                && self
                    .segments
                    .get(replica.segment)
                    .is_some_and(|mounted| *mounted.descriptor.name == *segment)
        };
        entry.replicas().find(is_source).copied().ok_or(ErrorCode::REPLICA_NOT_FOUND)
    }

    /// Allocates space on each of the named segments without a replica: all or nothing.
    fn allocate_targets(&self, index: u32, names: &[&str]) -> Result<Vec<MemoryReplica>, ErrorCode> {
        let entry = &self.entries[index];
        let mut new: Vec<MemoryReplica> = Vec::new();
        for name in names {
            let has_replica =
                |replica: &MemoryReplica| self.segments.indices_by_name(name).contains(&replica.segment);
            if entry.replicas().any(has_replica) || new.iter().any(has_replica) {
                continue;
            }
            match self.allocate_on(name, entry.size) {
                Ok(replica) => new.push(replica),
                Err(error) => {
                    new.iter().for_each(|replica| self.free(replica));
                    return Err(error);
                }
            }
        }
        Ok(new)
    }

    fn allocate_on(&self, name: &str, size: u64) -> Result<MemoryReplica, ErrorCode> {
        let indices = self.segments.indices_by_name(name);
        if indices.is_empty() {
            return Err(ErrorCode::SEGMENT_NOT_FOUND);
        }
        let mounted = indices.iter().filter_map(|index| Some((*index, self.segments.get(*index)?)));
        let mut replicas = mounted.filter(|(_, mounted_segment)| mounted_segment.is_writable()).filter_map(
            |(segment, mounted_segment)| {
                let range = mounted_segment.allocate(size)?;
                Some(MemoryReplica { id: 0, offset: range.offset, block: range.block, segment, ready: false })
            },
        );
        replicas.next().ok_or(ErrorCode::NO_AVAILABLE_HANDLE)
    }

    /// Makes the new replicas readable, and removes the source of a move.
    fn finish_transfer(&mut self, index: u32, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let Some(transfer) = self.clear_transfer(index) else { return };
        let entry = &mut self.entries[index];
        let mut replicas: Vec<MemoryReplica> = entry.replicas().copied().collect();
        let new: Vec<MemoryReplica> = replicas.iter().filter(|replica| !replica.ready).copied().collect();
        replicas.iter_mut().for_each(|replica| replica.ready = true);
        let source = replicas.iter().position(|replica| replica.id == transfer.source);
        let old =
            source.filter(|_| transfer.is_move && replicas.len() > 1).map(|index| replicas.remove(index));
        entry.set_replicas(&replicas);
        let (size, tenant, stamp, is_leased) =
            (entry.size, entry.tenant, entry.stamp, entry.is_leased(now_ms));
        for location in self.locations(new.into_iter()) {
            fx.record(StateChange::RangeReleased { segment: location.segment, offset: location.offset });
        }
        self.emit_transfer_ended(index, fx);
        self.requeue(index, now_ms);
        self.emit_state(index, StoreCause::Replicas, fx);
        let Some(old) = old else { return };
        self.master.tenants.discharge(tenant, size);
        self.report_vacated([old].iter(), fx);
        if is_leased {
            self.quarantine(&old, size, stamp, fx);
        } else {
            self.free(&old);
        }
    }

    /// Abandons a copy or move, if there is one, and frees its space.
    pub(crate) fn end_transfer(&mut self, index: u32, now_ms: u64, fx: &mut dyn StateChangeSink) {
        if self.clear_transfer(index).is_none() {
            return;
        }
        let entry = &mut self.entries[index];
        let (ready, new): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
            entry.replicas().partition(|replica| replica.ready);
        entry.set_replicas(&ready);
        let (tenant, bytes) = (entry.tenant, entry.size * new.len() as u64);
        self.master.tenants.discharge(tenant, bytes);
        for location in self.locations(new.iter().copied()) {
            fx.record(StateChange::RangeReleased { segment: location.segment, offset: location.offset });
        }
        self.emit_transfer_ended(index, fx);
        new.iter().for_each(|replica| self.free(replica));
        self.requeue(index, now_ms);
    }

    fn clear_transfer(&mut self, index: u32) -> Option<ReplicaTransfer> {
        let transfer = self.entries[index].extra.as_mut()?.transfer.take()?;
        self.transfers.retain(|other| *other != index);
        Some(transfer)
    }

    fn requeue(&mut self, index: u32, now_ms: u64) {
        let queue = self.entries[index].target_queue(now_ms);
        self.enqueue(index, queue);
    }
}
