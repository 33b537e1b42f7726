//! Copies and moves of replicas, which a node performs and reports to the master.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{CopyPlan, MovePlan, Uuid};

use crate::change::{DynamicReplicationLease, StateChangeSink};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::ReplicaTransfer;
use crate::object_table::KeyLocation;
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
            self.objects.source_of(work.tenant, work.key, None)?;
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
        self.objects.check_segments(targets, ErrorCode::SEGMENT_NOT_FOUND)?;
        let key_location = self.objects.locate_reader_key(work.tenant, work.key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, work.key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let source = shard.source(index, source, is_move)?;
        let mut new = shard.allocate_targets(index, targets)?;
        new.iter_mut().for_each(|replica| replica.id = self.objects.new_replica_id());
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
        let key_location: KeyLocation = self.objects.locate_reader_key(work.tenant, work.key)?;
        let mut shard = self.objects.lock(key_location.shard);
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
