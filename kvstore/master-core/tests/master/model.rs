//! A simple reference model of the master, and the operations run on both.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_wire::ErrorCode;
use moongate_master_core::RemoveCause;
use proptest::prelude::*;

use crate::harness::{MIB, segment};

pub(crate) const NODES: u64 = 3;
pub(crate) const KEYS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "m_1", "m_2"];
const DISCARD_MS: u64 = 30_000;
pub(crate) const RELEASE_MS: u64 = 600_000;
const LEASE_MS: u64 = 10_000;

#[derive(Clone, Debug)]
pub(crate) enum ModelStep {
    Start { key: usize, size: u64, kind: usize, upsert: bool },
    End { key: usize },
    Revoke { key: usize },
    Exist { key: usize },
    Replicas { key: usize },
    BatchExist { keys: Vec<usize> },
    Remove { key: usize, force: bool },
    RemoveAll { force: bool },
    Tick { ms: u64 },
    Mount { node: u64 },
    Unmount { node: u64 },
    Lost { node: u64 },
    Transfer { key: usize, to: u64, is_move: bool },
    TransferEnd { key: usize, done: bool },
}

pub(crate) fn step() -> impl Strategy<Value = ModelStep> {
    let key = || 0..KEYS.len();
    let size = prop_oneof![Just(0), 1..3000_u64, Just(MIB / 4), Just(MIB)];
    prop_oneof![
        6 => (key(), size, 0..6_usize, prop::bool::weighted(0.3))
            .prop_map(|(key, size, kind, upsert)| ModelStep::Start { key, size, kind, upsert }),
        6 => key().prop_map(|key| ModelStep::End { key }),
        1 => key().prop_map(|key| ModelStep::Revoke { key }),
        2 => key().prop_map(|key| ModelStep::Exist { key }),
        1 => key().prop_map(|key| ModelStep::Replicas { key }),
        1 => prop::collection::vec(key(), 0..12).prop_map(|keys| ModelStep::BatchExist { keys }),
        2 => (key(), any::<bool>()).prop_map(|(key, force)| ModelStep::Remove { key, force }),
        1 => prop::bool::weighted(0.3).prop_map(|force| ModelStep::RemoveAll { force }),
        2 => prop_oneof![0..5000_u64, Just(DISCARD_MS), Just(RELEASE_MS)].prop_map(|ms| ModelStep::Tick { ms }),
        2 => (1..=NODES).prop_map(|node| ModelStep::Mount { node }),
        1 => (1..=NODES).prop_map(|node| ModelStep::Unmount { node }),
        1 => (1..=NODES).prop_map(|node| ModelStep::Lost { node }),
        2 => (key(), 1..=NODES, any::<bool>()).prop_map(|(key, to, is_move)| ModelStep::Transfer { key, to, is_move }),
        2 => (key(), any::<bool>()).prop_map(|(key, done)| ModelStep::TransferEnd { key, done }),
    ]
}

#[derive(Clone, Debug)]
pub(crate) struct ModelObject {
    pub(crate) size: u64,
    pub(crate) nodes: BTreeSet<String>,
    pub(crate) written: bool,
    /// Start of the put, or expiry of the lease.
    pub(crate) stamp: u64,
    pub(crate) hard_pin: bool,
    pub(crate) transfer: Option<(bool, u64)>,
    pub(crate) pending: Option<ModelPendingVersion>,
    /// Whether a new version was abandoned without a revoke, so that its PutEnd must be rejected.
    pub(crate) superseded: bool,
}

/// A new version of an object being written.
#[derive(Clone, Debug)]
pub(crate) struct ModelPendingVersion {
    pub(crate) size: u64,
    pub(crate) nodes: BTreeSet<String>,
    pub(crate) stamp: u64,
    pub(crate) hard_pin: bool,
}

impl ModelObject {
    pub(crate) fn end(&mut self, now: u64) -> Result<(), ErrorCode> {
        if let Some(ModelPendingVersion { size, nodes, hard_pin, .. }) = self.pending.take() {
            (self.size, self.nodes, self.hard_pin, self.stamp) = (size, nodes, hard_pin, now);
            self.superseded = false;
        } else if self.superseded {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        } else if !self.written {
            (self.written, self.stamp) = (true, now);
        }
        Ok(())
    }

    pub(crate) fn abandon_pending(&mut self) {
        self.superseded |= self.pending.take().is_some();
    }
}

#[derive(Default)]
pub(crate) struct MasterModel {
    pub(crate) objects: BTreeMap<&'static str, ModelObject>,
    pub(crate) silent: BTreeSet<String>,
}

pub(crate) fn name(node: u64) -> String {
    segment(node, MIB).name
}

impl MasterModel {
    pub(crate) fn readable(&self, key: &str) -> Result<&ModelObject, ErrorCode> {
        let object = self.objects.get(key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        if !object.written {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        let is_responsive = object.nodes.iter().any(|node| !self.silent.contains(node));
        if is_responsive { Ok(object) } else { Err(ErrorCode::OBJECT_NOT_FOUND) }
    }

    pub(crate) fn lease(&mut self, key: &str, now: u64) {
        if let Some(object) = self.objects.get_mut(key) {
            object.stamp = object.stamp.max(now + LEASE_MS);
        }
    }

    /// Expected result of a put or upsert start, except for a lack of space.
    pub(crate) fn start(&self, key: &str, size: u64, upsert: bool, now: u64) -> Result<(), ErrorCode> {
        let Some(object) = self.objects.get(key).filter(|_| size > 0) else {
            return if size == 0 { Err(ErrorCode::INVALID_PARAMS) } else { Ok(()) };
        };
        if !object.written && upsert {
            return Ok(());
        }
        if !object.written {
            let is_old = object.stamp + DISCARD_MS <= now;
            return if is_old { Ok(()) } else { Err(ErrorCode::OBJECT_ALREADY_EXISTS) };
        }
        match self.readable(key) {
            Err(_) => Ok(()),
            Ok(_) if !upsert => Err(ErrorCode::OBJECT_ALREADY_EXISTS),
            Ok(object) if object.transfer.is_some() => Err(ErrorCode::OBJECT_REPLICA_BUSY),
            Ok(_) => Ok(()),
        }
    }

    pub(crate) fn remove(&self, key: &str, force: bool, now: u64) -> Result<(), ErrorCode> {
        let object = self.objects.get(key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        if !object.written {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        if object.stamp > now && self.readable(key).is_ok() && !force {
            return Err(ErrorCode::OBJECT_HAS_LEASE);
        }
        if object.pending.is_some() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        if let Some((_, to)) = object.transfer {
            let is_source = object.nodes.contains(&name(to));
            let error = if is_source {
                ErrorCode::OBJECT_HAS_REPLICATION_TASK
            } else {
                ErrorCode::REPLICA_IS_NOT_READY
            };
            return Err(error);
        }
        Ok(())
    }

    /// Removes an object and returns whether its removal for this cause is allowed.
    pub(crate) fn remove_lost(&mut self, key: &str, cause: RemoveCause, now: u64) -> bool {
        let Some(object) = self.objects.remove(key) else { return false };
        match cause {
            RemoveCause::Evicted => {
                let is_idle = object.transfer.is_none() && object.pending.is_none();
                object.written && !object.hard_pin && is_idle && object.stamp <= now
            }
            RemoveCause::PutTimedOut => !object.written && object.stamp + DISCARD_MS <= now,
            RemoveCause::Revoked => !object.written,
            RemoveCause::SegmentLost => object.nodes.is_empty(),
            _ => true,
        }
    }
}
