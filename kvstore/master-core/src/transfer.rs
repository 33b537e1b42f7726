//! Copies and moves of replicas, which a node performs and reports to the master.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{CopyPlan, MovePlan};

use crate::change::{DynamicReplicationLease, StateChangeSink};
use crate::indices::EntryIndex;
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::ReplicaTransfer;
use crate::requests::{CallContext, CopyRequest, MoveRequest};
use crate::segment::{ReplicaDescriptors, SharedReplicaDescriptor};

/// What a node transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferKind {
    /// With the lease of a copy that dynamic replication planned.
    Copy(Option<DynamicReplicationLease>),
    Move,
}

impl TransferKind {
    fn is_move(self) -> bool {
        self == Self::Move
    }

    fn lease(self) -> Option<DynamicReplicationLease> {
        match self {
            Self::Copy(lease) => lease,
            Self::Move => None,
        }
    }
}

/// A transfer to start. Segments are named.
struct TransferRequest<'a> {
    key: &'a str,
    source: &'a str,
    targets: &'a [&'a str],
    kind: TransferKind,
}

/// The source and the targets of a transfer that has started.
struct StartedTransfer {
    source: SharedReplicaDescriptor,
    targets: ReplicaDescriptors,
}

impl MasterCore {
    /// Allocates space for copies of an object on the named segments, except on those with a replica. Evicts nothing.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`, `OBJECT_HAS_REPLICATION_TASK`, `REPLICA_NOT_FOUND` if it is not on the source
    /// segment, `SEGMENT_NOT_FOUND` and `NO_AVAILABLE_HANDLE` for a target, `INVALID_PARAMS` for an unknown lease.
    pub fn copy_start<S: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        request: &CopyRequest<'_, S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<CopyPlan<Arc<str>>, ErrorCode> {
        let CopyRequest { key, source, targets, lease } = *request;
        if let Some(lease) = lease {
            // A missing object takes precedence over an invalid lease.
            self.objects.source_of(context.tenant, key, None)?;
            self.check_plan(context.now_ms, lease)?;
        }
        let targets: Vec<&str> = targets.iter().map(AsRef::as_ref).collect();
        let transfer = TransferRequest { key, source, targets: &targets, kind: TransferKind::Copy(lease) };
        let StartedTransfer { source, targets } = self.begin_transfer(context, &transfer, fx)?;
        Ok(CopyPlan { source, targets })
    }

    /// Ends a copy: the new replicas become readable.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `OBJECT_NO_REPLICATION_TASK`, `ILLEGAL_CLIENT`, `INVALID_PARAMS` if the transfer is a move.
    pub fn copy_end(
        &self,
        context: CallContext<'_>,
        key: &str,
        lease: Option<DynamicReplicationLease>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(context, key, TransferKind::Copy(lease), |shard, index| {
            shard.finish_transfer(index, context.now_ms, fx);
        })
    }

    /// Revokes a copy and frees its space.
    ///
    /// # Errors
    /// As [`Self::copy_end`].
    pub fn copy_revoke(
        &self,
        context: CallContext<'_>,
        key: &str,
        lease: Option<DynamicReplicationLease>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(context, key, TransferKind::Copy(lease), |shard, index| {
            shard.end_transfer(index, context.now_ms, fx);
        })
    }

    /// Allocates space for an object on another segment, unless that has a replica.
    ///
    /// # Errors
    /// As [`Self::copy_start`].
    pub fn move_start(
        &self,
        context: CallContext<'_>,
        request: MoveRequest<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<MovePlan<Arc<str>>, ErrorCode> {
        let MoveRequest { key, source, target } = request;
        if source == target {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let transfer = TransferRequest { key, source, targets: &[target], kind: TransferKind::Move };
        let StartedTransfer { source, targets } = self.begin_transfer(context, &transfer, fx)?;
        Ok(MovePlan { source, target: targets.into_iter().next() })
    }

    /// Ends a move: the new replica becomes readable, the old one is removed.
    ///
    /// # Errors
    /// As [`Self::copy_end`], but `INVALID_PARAMS` if the transfer is a copy.
    pub fn move_end(
        &self,
        context: CallContext<'_>,
        key: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(context, key, TransferKind::Move, |shard, index| {
            shard.finish_transfer(index, context.now_ms, fx);
        })
    }

    /// Revokes a move and frees its space.
    ///
    /// # Errors
    /// As [`Self::move_end`].
    pub fn move_revoke(
        &self,
        context: CallContext<'_>,
        key: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.with_transfer(context, key, TransferKind::Move, |shard, index| {
            shard.end_transfer(index, context.now_ms, fx);
        })
    }

    fn begin_transfer(
        &self,
        context: CallContext<'_>,
        request: &TransferRequest<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<StartedTransfer, ErrorCode> {
        let TransferRequest { key, source, targets, kind } = *request;
        self.objects.check_segments(targets, ErrorCode::SEGMENT_NOT_FOUND)?;
        let key_location = self.objects.locate_reader_key(context.tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let source = shard.source(index, source, kind.is_move())?;
        let mut new = shard.allocate_targets(index, targets)?;
        new.iter_mut().for_each(|replica| replica.id = self.objects.new_replica_id());
        let transfer = ReplicaTransfer {
            client: context.client,
            source: source.id,
            is_move: kind.is_move(),
            since_ms: context.now_ms,
            lease: kind.lease(),
        };
        shard.set_transfer(index, transfer, &new);
        shard.emit_transfer(index, fx);
        let size = shard.entries[index].size;
        let source = shard.to_descriptor(&source, size).ok_or(ErrorCode::REPLICA_NOT_FOUND)?;
        let targets = new.iter().filter_map(|replica| shard.to_descriptor(replica, size)).collect();
        Ok(StartedTransfer { source, targets })
    }

    fn with_transfer(
        &self,
        context: CallContext<'_>,
        key: &str,
        kind: TransferKind,
        end: impl FnOnce(&mut LockedShard<'_>, EntryIndex),
    ) -> Result<(), ErrorCode> {
        let key_location = self.objects.locate_reader_key(context.tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let transfer = shard.entries[index].transfer().ok_or(ErrorCode::OBJECT_NO_REPLICATION_TASK)?;
        if transfer.client != context.client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        if transfer.is_move != kind.is_move() {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if transfer.lease != kind.lease() {
            return Err(ErrorCode::OBJECT_NO_REPLICATION_TASK);
        }
        end(&mut shard, index);
        Ok(())
    }
}
