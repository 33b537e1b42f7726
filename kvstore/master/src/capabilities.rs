//! Issues capabilities for memory ranges, signed with the keys of their segments.
//!
//! Keys are stored in memory only. Nodes send them after mounting and with each heartbeat, so a restarted master or a new leader has
//! them within a second.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::BytesMut;
use mooncake_wire::capability::grants::{self, IssuedCapability};
use mooncake_wire::capability::{AccessGrant, AccessRights, CertificateFingerprint, SegmentKey};
use mooncake_wire::types::{BufferDescriptor, Uuid};
use moongate_runtime::LogRateLimiter;
use parking_lot::RwLock;

/// A key is dropped if its node has not sent it again for this long, in milliseconds.
const KEY_TTL_MS: u64 = 60_000;
/// Maximum number of keys of one node: the maximum number of its segments.
const MAX_SEGMENTS_PER_NODE: usize = 256;
/// Maximum number of nodes with keys.
const MAX_NODES: usize = 65_536;

/// Segment keys, and counters of their use.
#[derive(Debug, Default)]
pub(crate) struct CapabilityIssuer {
    nodes: RwLock<HashMap<Arc<str>, Vec<KeyedSegment>>>,
    issued: AtomicU64,
    without_key: AtomicU64,
    unauthenticated: AtomicU64,
    warnings: LogRateLimiter,
}

/// A segment and its signing key.
#[derive(Debug)]
pub(crate) struct KeyedSegment {
    pub(crate) id: Uuid,
    pub(crate) base: u64,
    pub(crate) size: u64,
    pub(crate) key: SegmentKey,
    /// The node's clock when it sent the key, in milliseconds.
    pub(crate) clock_ms: u64,
    /// This master's clock when the key arrived, in milliseconds.
    pub(crate) received_ms: u64,
}

/// Holder, access rights and lifetime of a capability.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CapabilityClaims {
    pub(crate) certificate: CertificateFingerprint,
    pub(crate) rights: AccessRights,
    pub(crate) lifetime_ms: u64,
}

impl KeyedSegment {
    fn contains(&self, buffer: &BufferDescriptor<Arc<str>>) -> bool {
        let offset = buffer.address.checked_sub(self.base);
        offset.and_then(|offset| offset.checked_add(buffer.size)).is_some_and(|end| end <= self.size)
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.base < other.base.saturating_add(other.size) && other.base < self.base.saturating_add(self.size)
    }

    fn is_current(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.received_ms) < KEY_TTL_MS
    }
}

impl CapabilityIssuer {
    /// Stores the key of a segment of the node at `endpoint`. Returns false if a limit is reached.
    pub(crate) fn register(&self, endpoint: Arc<str>, segment: KeyedSegment) -> bool {
        let now_ms = segment.received_ms;
        let mut nodes = self.nodes.write();
        if nodes.len() >= MAX_NODES && !nodes.contains_key(&endpoint) {
            nodes.retain(|_, segments| segments.iter().any(|segment| segment.is_current(now_ms)));
            if nodes.len() >= MAX_NODES {
                return false;
            }
        }
        let segments = nodes.entry(endpoint).or_default();
        segments.retain(|other| other.is_current(now_ms) && !other.overlaps(&segment));
        if segments.len() >= MAX_SEGMENTS_PER_NODE {
            return false;
        }
        segments.push(segment);
        true
    }

    /// Appends a capability for `buffer` to an attachment, if the key of its segment is present.
    pub(crate) fn issue(
        &self,
        now_ms: u64,
        holder: CapabilityClaims,
        buffer: &BufferDescriptor<Arc<str>>,
        attachment: &mut BytesMut,
    ) {
        let nodes = self.nodes.read();
        let segments = nodes.get(&*buffer.endpoint).map_or(&[][..], Vec::as_slice);
        let segment = segments.iter().find(|segment| segment.contains(buffer) && segment.is_current(now_ms));
        let Some(segment) = segment else {
            self.without_key.fetch_add(1, Relaxed);
            if self.warnings.is_due() {
                tracing::warn!(node = %buffer.endpoint, "cannot issue a capability: this node has not sent the key of the segment");
            }
            return;
        };
        let node_now_ms = segment.clock_ms.saturating_add(now_ms.saturating_sub(segment.received_ms));
        let grant = AccessGrant {
            rights: holder.rights,
            start: buffer.address,
            size: buffer.size,
            expires_ms: node_now_ms.saturating_add(holder.lifetime_ms),
        };
        let capability = segment.key.sign(segment.id, grant, &holder.certificate);
        let lifetime_ms = u32::try_from(holder.lifetime_ms).unwrap_or(u32::MAX);
        grants::append(attachment, &IssuedCapability { endpoint: &buffer.endpoint, lifetime_ms, capability });
        self.issued.fetch_add(1, Relaxed);
    }

    /// Counts a caller without a valid certificate. Returns whether to log it.
    pub(crate) fn add_unauthenticated(&self) -> bool {
        self.unauthenticated.fetch_add(1, Relaxed);
        self.warnings.is_due()
    }

    /// Capabilities issued, capabilities missing because of an unknown key, and rejected connections.
    pub(crate) fn counts(&self) -> [u64; 3] {
        [self.issued.load(Relaxed), self.without_key.load(Relaxed), self.unauthenticated.load(Relaxed)]
    }
}

#[cfg(test)]
mod tests {
    use mooncake_wire::capability::{CapabilityError, RequestedAccess};

    use super::*;

    const ID: Uuid = Uuid { first: 1, second: 2 };
    const HOLDER: CapabilityClaims =
        CapabilityClaims { certificate: [9; 32], rights: AccessRights::Read, lifetime_ms: 5000 };

    fn segment(base: u64, key: u8, received_ms: u64) -> KeyedSegment {
        let key = SegmentKey::new([key; 32]);
        KeyedSegment { id: ID, base, size: 1000, key, clock_ms: 70, received_ms }
    }

    fn buffer(address: u64) -> BufferDescriptor<Arc<str>> {
        BufferDescriptor {
            size: 100,
            address,
            protocol: "tcp".into(),
            endpoint: "n:1".into(),
            locality: None,
        }
    }

    fn issued(capabilities: &CapabilityIssuer, now_ms: u64, address: u64) -> BytesMut {
        let mut attachment = BytesMut::new();
        capabilities.issue(now_ms, HOLDER, &buffer(address), &mut attachment);
        attachment
    }

    #[test]
    fn expiry_is_in_the_nodes_clock() {
        let capabilities = CapabilityIssuer::default();
        assert!(capabilities.register("n:1".into(), segment(4096, 1, 1_000_000)));
        let attachment = issued(&capabilities, 1_000_010, 4096);
        let grant = grants::read(&attachment).next().unwrap();
        assert_eq!((grant.endpoint, grant.lifetime_ms), ("n:1", 5000));
        let check = |now_ms| {
            let transfer = RequestedAccess { rights: AccessRights::Read, start: 4096, size: 100, now_ms };
            SegmentKey::new([1; 32]).check(ID, &grant.capability, &[9; 32], transfer)
        };
        assert_eq!((check(5079), check(5080)), (Ok(()), Err(CapabilityError::Expired)));
        assert!(issued(&capabilities, 1_000_010, 4997).is_empty(), "beyond the segment");
        assert_eq!(capabilities.counts(), [1, 1, 0]);
    }

    #[test]
    fn new_keys_replace_old_ones_and_stale_keys_are_unused() {
        let capabilities = CapabilityIssuer::default();
        assert!(capabilities.register("n:1".into(), segment(4096, 1, 0)));
        assert!(capabilities.register("n:1".into(), segment(4096, 2, 0)));
        assert_eq!(capabilities.nodes.read()["n:1"].len(), 1);
        assert!(issued(&capabilities, KEY_TTL_MS, 4096).is_empty());
        let key = capabilities.nodes.read()["n:1"][0].key.clone();
        assert_eq!(key, SegmentKey::new([2; 32]));
    }

    #[test]
    fn the_number_of_keys_is_bounded() {
        let capabilities = CapabilityIssuer::default();
        for index in 0..MAX_SEGMENTS_PER_NODE as u64 {
            assert!(capabilities.register("n:1".into(), segment(index * 1000, 1, 0)));
        }
        assert!(!capabilities.register("n:1".into(), segment(1 << 40, 1, 0)));
        assert!(
            capabilities.register("n:1".into(), segment(1 << 40, 1, KEY_TTL_MS)),
            "the other keys are stale"
        );
    }
}
