//! Which peer may read or write what: capabilities that the master has issued, and those of this node for objects from its disk.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_wire::capability::{
    AccessGrant, AccessRights, Capability, CapabilityError, CertificateFingerprint, RequestedAccess,
    SegmentKey, SegmentKeyArguments,
};
use mooncake_wire::types::Uuid;
use moongate_runtime::random_key;
use moongate_transfer::plane::TransferOperation;
use moongate_transfer::serve::{AddressRange, TransferAuthorizer};
use parking_lot::RwLock;

use crate::segment_pool::{RangeLocation, SegmentPool};

/// Stands for the buffer for objects from the disk, which is no segment.
const STAGING: Uuid = Uuid { first: 0, second: 0 };

/// Checks the capabilities of peers. Keys are made by this process, so capabilities of an earlier one are invalid.
pub(crate) struct CapabilityChecker {
    pool: Arc<SegmentPool>,
    keys: RwLock<HashMap<Uuid, SegmentKey>>,
    staging: SegmentKey,
    /// The node's clock begins here.
    epoch: Instant,
}

impl CapabilityChecker {
    /// For the memory of a node.
    ///
    /// # Errors
    /// When there is no key to be had.
    pub(crate) fn new(pool: Arc<SegmentPool>) -> io::Result<Self> {
        let staging = SegmentKey::new(random_key()?);
        Ok(Self { pool, keys: RwLock::default(), staging, epoch: Instant::now() })
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// What the master is sent about a segment. Its key is made when it is needed first.
    ///
    /// # Errors
    /// When there is no key to be had.
    pub(crate) fn key_of(&self, client: Uuid, segment: Uuid) -> io::Result<SegmentKeyArguments> {
        let known = self.keys.read().get(&segment).cloned();
        let key = match known {
            Some(key) => key,
            None => {
                let new = SegmentKey::new(random_key()?);
                self.keys.write().entry(segment).or_insert(new).clone()
            }
        };
        Ok(SegmentKeyArguments::new(client, segment, self.now_ms(), &key))
    }

    /// Removes the key of a segment that was unmounted.
    pub(crate) fn remove(&self, segment: Uuid) {
        self.keys.write().remove(&segment);
    }

    /// Grants a peer to read an object from the disk in the buffer.
    pub(crate) fn grant_staged(
        &self,
        span: AddressRange,
        lifetime: Duration,
        holder: &CertificateFingerprint,
    ) -> Capability {
        let lifetime_ms = u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX);
        let expires_ms = self.now_ms().saturating_add(lifetime_ms);
        let grant =
            AccessGrant { rights: AccessRights::Read, start: span.start, size: span.size, expires_ms };
        self.staging.sign(STAGING, grant, holder)
    }
}

impl TransferAuthorizer for CapabilityChecker {
    fn check(
        &self,
        operation: TransferOperation,
        span: AddressRange,
        capability: &Capability,
        peer: &CertificateFingerprint,
    ) -> Result<(), CapabilityError> {
        let rights = match operation {
            TransferOperation::Read => AccessRights::Read,
            TransferOperation::Write => AccessRights::Write,
        };
        let transfer = RequestedAccess { rights, start: span.start, size: span.size, now_ms: self.now_ms() };
        match self.pool.locate(span) {
            Some(RangeLocation::Staging) => self.staging.check(STAGING, capability, peer, transfer),
            Some(RangeLocation::Segment(id)) => {
                let key = self.keys.read().get(&id).cloned();
                key.ok_or(CapabilityError::InvalidSignature)?.check(id, capability, peer, transfer)
            }
            // The peer gets the same answer for a range outside the memory.
            None => Err(CapabilityError::InvalidSignature),
        }
    }
}

impl std::fmt::Debug for CapabilityChecker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CapabilityChecker").finish_non_exhaustive()
    }
}
