//! Which memory of a node this process has mapped.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use moongate_transfer::{SharedMapping, SharedMemoryAddress};

/// How long after a failed attempt a node's memory is not requested again.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// The mapped segments of one node.
#[derive(Debug, Default)]
pub(crate) struct NodeMappings {
    /// Where to request them. `None` if the node shares none, or is not on this host.
    address: Option<Arc<SharedMemoryAddress>>,
    mapped: Vec<Weak<SharedMapping>>,
    /// Whether a request is in progress. Other transfers use the socket meanwhile.
    is_requested: bool,
    retry_at: Option<Instant>,
}

/// How to transfer a range.
pub(crate) enum RangeMapping {
    Mapped(Arc<SharedMapping>),
    /// Its segment should be requested there, and the result be passed to [`NodeMappings::requested`].
    Request(Arc<SharedMemoryAddress>),
    NotShared,
}

impl NodeMappings {
    /// No segments, of a node with this address.
    pub(crate) fn none(address: Option<SharedMemoryAddress>) -> Self {
        Self { address: address.map(Arc::new), ..Self::default() }
    }

    /// The mapping of a range.
    pub(crate) fn find(&mut self, start: u64, size: u64) -> RangeMapping {
        let mut mapped = self.mapped.iter().filter_map(Weak::upgrade);
        if let Some(mapping) = mapped.find(|mapping| mapping.contains(start, size)) {
            return RangeMapping::Mapped(mapping);
        }
        let is_due = self.retry_at.is_none_or(|at| Instant::now() >= at);
        match &self.address {
            Some(address) if is_due && !self.is_requested => {
                self.is_requested = true;
                RangeMapping::Request(Arc::clone(address))
            }
            _ => RangeMapping::NotShared,
        }
    }

    /// Adds the result of a request.
    pub(crate) fn requested(&mut self, mapping: Option<Weak<SharedMapping>>) {
        self.is_requested = false;
        self.retry_at = mapping.is_none().then(|| Instant::now() + RETRY_PAUSE);
        self.mapped.retain(|mapping| mapping.strong_count() > 0);
        self.mapped.extend(mapping);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_requested_once_until_the_retry() {
        let address = SharedMemoryAddress { socket: "@none".to_owned(), process: "0".to_owned() };
        let mut mappings = NodeMappings::none(Some(address));
        assert!(matches!(mappings.find(0, 1), RangeMapping::Request(_)));
        assert!(matches!(mappings.find(0, 1), RangeMapping::NotShared), "in progress");
        mappings.requested(None);
        assert!(matches!(mappings.find(0, 1), RangeMapping::NotShared), "paused");
        mappings.retry_at = Some(Instant::now());
        assert!(matches!(mappings.find(0, 1), RangeMapping::Request(_)));
        assert!(matches!(NodeMappings::none(None).find(0, 1), RangeMapping::NotShared));
    }
}
