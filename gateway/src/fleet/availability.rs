//! Whether all engines are available: so they nearly always are, and then no request needs to look at each of a thousand engines.

use std::sync::atomic::{AtomicU64, Ordering};

use super::snapshot::FleetSnapshot;

/// Counts events after which an engine may not be available: its breaker opened, it became suspect, or a health check failed. Shared by all
/// endpoints and snapshots of a fleet.
#[derive(Debug, Default)]
pub(crate) struct AvailabilityEvents(AtomicU64);

impl AvailabilityEvents {
    /// To be called after the change.
    pub(super) fn record(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// The latest check of a snapshot that found all its engines available.
#[derive(Debug, Default)]
pub(super) struct AvailabilityCheck {
    /// The number of events before that check, plus one; 0 without such a check.
    events: AtomicU64,
}

impl FleetSnapshot {
    /// Whether all engines are available, none of them being suspect.
    pub(crate) fn is_all_available(&self) -> bool {
        let events = self.availability.count() + 1;
        if self.all_available.events.load(Ordering::Relaxed) == events {
            return true;
        }
        let is_all = self.members.iter().all(|member| member.endpoint.is_available());
        if is_all {
            self.all_available.events.store(events, Ordering::Relaxed);
        }
        is_all
    }
}

#[cfg(test)]
mod tests {
    use moongate_discovery::{EngineKind, EngineRole};
    use tokio::time::Instant;

    use super::*;
    use crate::kv_index::KvIndex;
    use crate::test_fleet::{engine, snapshot};
    use crate::upstream::LegError;

    #[tokio::test(start_paused = true)]
    async fn every_kind_of_unavailability_is_seen() {
        let index = KvIndex::new(10);
        let engines = || ["a", "b"].map(|name| engine(name, EngineRole::Plain, EngineKind::Vllm, 1)).to_vec();
        let first = snapshot(engines(), &FleetSnapshot::default(), &index);
        let fleet = snapshot(engines(), &first, &index);
        let endpoint = &first.members[1].endpoint;
        assert!(first.is_all_available() && fleet.is_all_available());
        endpoint.set_healthy(false);
        assert!(!first.is_all_available() && !fleet.is_all_available());
        endpoint.set_healthy(true);
        assert!(fleet.is_all_available());
        endpoint.silence.mark_suspect(Instant::now());
        assert!(!fleet.is_all_available());
        endpoint.record_progress(Instant::now());
        assert!(fleet.is_all_available());
        for _ in 0..10 {
            endpoint.record_failure(&LegError::Closed);
        }
        assert!(!fleet.is_all_available());
        endpoint.breaker.record_success();
        assert!(fleet.is_all_available());
    }
}
