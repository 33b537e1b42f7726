//! Cache of the capabilities that the master issued to this program.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_wire::capability::{AccessGrant, AccessRights, Capability, grants};
use moongate_runtime::PeerTls;
use parking_lot::Mutex;

/// Maximum number of cached ranges. When it is reached, those of one node are dropped, and its objects are located again.
const MAX_GRANTS: usize = 1 << 20;
/// Number of insertions between two purges of expired entries.
const PURGE_EVERY: usize = 1 << 12;

/// This program's TLS identity, and the capabilities it received. Clones share the capabilities.
#[derive(Clone, Debug)]
pub struct StoreCredentials {
    /// Mutual TLS with the store's other programs.
    pub tls: PeerTls,
    /// Capabilities that the master granted.
    pub grants: Arc<GrantTable>,
}

impl StoreCredentials {
    #[must_use]
    pub fn new(tls: PeerTls) -> Self {
        Self { tls, grants: Arc::default() }
    }
}

/// The cached capabilities for ranges of nodes' memory. Ranges of one node do not overlap: a new grant for the same memory is for
/// another object, so it replaces the older one.
#[derive(Debug, Default)]
pub struct GrantTable(Mutex<GrantTableState>);

#[derive(Debug, Default)]
struct GrantTableState {
    nodes: HashMap<Arc<str>, BTreeMap<u64, RangeGrants>>,
    count: usize,
    inserted: usize,
}

/// Read and write capability of one range, each with its expiry.
#[derive(Clone, Copy, Debug)]
struct RangeGrants {
    size: u64,
    read: Option<(Capability, Instant)>,
    write: Option<(Capability, Instant)>,
}

impl RangeGrants {
    fn is_valid(&self, now: Instant) -> bool {
        [self.read, self.write].iter().flatten().any(|(_, until)| *until > now)
    }
}

impl GrantTable {
    /// Stores the capabilities of a response to a request that was sent at `sent`.
    pub(super) fn record(&self, attachment: &[u8], sent: Instant) {
        if attachment.is_empty() {
            return;
        }
        let mut all = self.0.lock();
        for issued in grants::read(attachment) {
            let until = sent + Duration::from_millis(issued.lifetime_ms.into());
            all.insert(issued.endpoint, issued.capability, until, sent);
        }
    }

    /// Finds a valid capability for a transfer with the node at `endpoint`.
    #[must_use]
    pub fn find(&self, endpoint: &str, rights: AccessRights, start: u64, size: u64) -> Option<Capability> {
        let all = self.0.lock();
        let (_, range) = all.nodes.get(endpoint)?.range(..=start).next_back()?;
        let (capability, until) = match rights {
            AccessRights::Read => range.read?,
            AccessRights::Write => range.write?,
        };
        (until > Instant::now() && capability.grant.covers(start, size)).then_some(capability)
    }
}

impl GrantTableState {
    fn insert(&mut self, endpoint: &str, capability: Capability, until: Instant, now: Instant) {
        self.inserted += 1;
        if self.inserted.is_multiple_of(PURGE_EVERY) {
            self.purge(now);
        }
        if self.count >= MAX_GRANTS {
            self.evict_node();
        }
        let AccessGrant { rights, start, size, .. } = capability.grant;
        if !self.nodes.contains_key(endpoint) {
            self.nodes.insert(endpoint.into(), BTreeMap::new());
        }
        let Some(ranges) = self.nodes.get_mut(endpoint) else { return };
        let mut grants = RangeGrants { size, read: None, write: None };
        if let Some(same) = ranges.get(&start).filter(|same| same.size == size) {
            grants = *same;
        }
        let end = start.saturating_add(size);
        let overlapping = |(other, grants): &(&u64, &RangeGrants)| other.saturating_add(grants.size) > start;
        let replaced: Vec<u64> =
            ranges.range(..end).rev().take_while(overlapping).map(|(other, _)| *other).collect();
        for other in &replaced {
            ranges.remove(other);
        }
        match rights {
            AccessRights::Read => grants.read = Some((capability, until)),
            AccessRights::Write => grants.write = Some((capability, until)),
        }
        ranges.insert(start, grants);
        self.count = self.count + 1 - replaced.len();
    }

    fn purge(&mut self, now: Instant) {
        self.nodes.retain(|_, ranges| {
            ranges.retain(|_, grants| grants.is_valid(now));
            !ranges.is_empty()
        });
        self.count = self.nodes.values().map(BTreeMap::len).sum();
    }

    fn evict_node(&mut self) {
        let node = self.nodes.keys().next().cloned();
        if let Some(dropped) = node.and_then(|node| self.nodes.remove(&node)) {
            self.count -= dropped.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use mooncake_wire::capability::SegmentKey;
    use mooncake_wire::capability::grants::IssuedCapability;
    use mooncake_wire::types::Uuid;

    use super::*;

    fn attachment(endpoint: &str, rights: AccessRights, start: u64, size: u64, lifetime_ms: u32) -> BytesMut {
        let grant = AccessGrant { rights, start, size, expires_ms: 1 };
        let capability = SegmentKey::new([1; 32]).sign(Uuid::default(), grant, &[2; 32]);
        let mut attachment = BytesMut::new();
        grants::append(&mut attachment, &IssuedCapability { endpoint, lifetime_ms, capability });
        attachment
    }

    #[test]
    fn capability_is_valid_until_expiry_or_regrant() {
        let (table, now) = (GrantTable::default(), Instant::now());
        let hour = 3_600_000;
        table.record(&attachment("a:1", AccessRights::Read, 100, 50, hour), now);
        table.record(&attachment("a:1", AccessRights::Write, 100, 50, hour), now);
        table.record(&attachment("a:1", AccessRights::Read, 150, 50, hour), now);
        let granted = |rights, start, size| {
            table.find("a:1", rights, start, size).map(|it| (it.grant.start, it.grant.size))
        };
        assert_eq!(granted(AccessRights::Read, 100, 50), Some((100, 50)));
        assert_eq!(granted(AccessRights::Write, 120, 30), Some((100, 50)));
        assert_eq!(granted(AccessRights::Write, 120, 31), None, "beyond its end");
        assert_eq!(granted(AccessRights::Write, 150, 1), None, "only for reading");
        assert_eq!(granted(AccessRights::Read, 99, 1), None);
        assert!(table.find("b:1", AccessRights::Read, 100, 50).is_none(), "another node");

        table.record(&attachment("a:1", AccessRights::Read, 120, 40, hour), now);
        assert_eq!(granted(AccessRights::Read, 100, 10), None);
        assert_eq!(granted(AccessRights::Read, 150, 10), Some((120, 40)));
        assert_eq!(table.0.lock().count, 1);

        table.record(&attachment("a:1", AccessRights::Read, 120, 40, 0), now);
        assert_eq!(granted(AccessRights::Read, 120, 40), None, "expired");
        table.0.lock().purge(Instant::now());
        let grants = table.0.lock();
        assert_eq!((grants.count, grants.nodes.len()), (0, 0));
    }

    #[test]
    fn number_of_grants_is_limited() {
        let mut grants = GrantTableState { count: MAX_GRANTS, ..GrantTableState::default() };
        grants.nodes.insert(
            "old:1".into(),
            (0..10).map(|start| (start, RangeGrants { size: 1, read: None, write: None })).collect(),
        );
        let grant = AccessGrant { rights: AccessRights::Read, start: 1, size: 1, expires_ms: 1 };
        let capability = SegmentKey::new([1; 32]).sign(Uuid::default(), grant, &[2; 32]);
        grants.insert("new:1", capability, Instant::now(), Instant::now());
        assert!(!grants.nodes.contains_key("old:1"));
        assert_eq!(grants.count, MAX_GRANTS - 10 + 1);
    }
}
