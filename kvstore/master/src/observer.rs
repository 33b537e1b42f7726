//! Observes every change before it is appended to the journal.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_wire::events::StorageMedium;
use mooncake_wire::events::mooncake::SegmentChange;
use mooncake_wire::types::Uuid;
use moongate_master_core::{MasterCore, ObjectState, RemoveCause, StateChange, StoreCause, UnmountCause};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::events::KvEventQueue;
use crate::journal::{DataDirStatus, Journal};

/// Upper bounds of the buckets of [`ValueSizeHistogram`] in bytes; one more bucket is unbounded.
pub const SIZE_BOUNDS: [u64; 7] = [4096, 65_536, 262_144, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// Maximum number of expired nodes whose metadata cleanup is pending.
const EXPIRED_CAPACITY: usize = 65_536;

/// Histogram of the sizes of written objects.
#[derive(Debug, Default)]
pub struct ValueSizeHistogram {
    buckets: [AtomicU64; SIZE_BOUNDS.len() + 1],
    sum: AtomicU64,
}

impl ValueSizeHistogram {
    fn add(&self, size: u64) {
        let index = SIZE_BOUNDS.partition_point(|bound| *bound < size);
        if let Some(bucket) = self.buckets.get(index) {
            bucket.fetch_add(1, Relaxed);
        }
        self.sum.fetch_add(size, Relaxed);
    }

    /// Object count of each bucket, and the sum of all sizes in bytes.
    pub fn read(&self) -> ([u64; SIZE_BOUNDS.len() + 1], u64) {
        (std::array::from_fn(|index| self.buckets[index].load(Relaxed)), self.sum.load(Relaxed))
    }
}

/// Name of a segment and its client.
#[derive(Debug)]
struct SegmentOwner {
    name: Arc<str>,
    client: Uuid,
}

/// Derives statistics, KV events and metadata cleanup from the observed changes.
#[derive(Debug)]
pub struct FactObserver {
    pub sizes: ValueSizeHistogram,
    segments: Mutex<HashMap<Uuid, SegmentOwner>>,
    events: Option<Arc<KvEventQueue>>,
    expired: Option<mpsc::Sender<Arc<str>>>,
    silent_clients: AtomicU64,
    expired_clients: AtomicU64,
}

impl FactObserver {
    /// An observer that queues KV events in `events`.
    pub fn new(events: Option<Arc<KvEventQueue>>) -> Self {
        Self {
            sizes: ValueSizeHistogram::default(),
            segments: Mutex::default(),
            events,
            expired: None,
            silent_clients: AtomicU64::new(0),
            expired_clients: AtomicU64::new(0),
        }
    }

    /// Returns a channel that receives the names of segments whose client has expired.
    pub fn subscribe_expired(&mut self) -> mpsc::Receiver<Arc<str>> {
        let (sender, receiver) = mpsc::channel(EXPIRED_CAPACITY);
        self.expired = Some(sender);
        receiver
    }

    /// How often a client became silent, and how many were removed because of their silence.
    pub(crate) fn client_transitions(&self) -> (u64, u64) {
        (self.silent_clients.load(Relaxed), self.expired_clients.load(Relaxed))
    }

    /// Loads the segments that were mounted before this observer started.
    pub(crate) fn load_segments(&self, master: &MasterCore) {
        let mut segments = self.segments.lock();
        for segment in master.segments_detail().segments {
            segments.insert(
                segment.segment_id,
                SegmentOwner { name: segment.segment_name.into(), client: segment.client_id },
            );
        }
    }

    /// Processes a change. Fast, because it is called under the lock of the changed entry.
    pub fn observe(&self, fact: &StateChange<'_>) {
        match fact {
            StateChange::ObjectStored { object, cause } => self.stored(object, *cause),
            // An incomplete object was not readable, so its removal is no event.
            StateChange::Removed { cause: RemoveCause::Revoked | RemoveCause::PutTimedOut, .. } => {}
            StateChange::Removed { tenant, key, group, tiers, .. } => {
                let media =
                    [(tiers.memory, StorageMedium::StoreMemory), (tiers.disk, StorageMedium::StoreDisk)];
                for (_, medium) in media.into_iter().filter(|(was_present, _)| *was_present) {
                    self.publish(|events| events.removed(tenant, key, group.as_deref(), medium));
                }
            }
            StateChange::SegmentMounted { segment, client, .. } => {
                let name: Arc<str> = Arc::from(&*segment.name);
                let owner = SegmentOwner { name: Arc::clone(&name), client: *client };
                let change = match self.segments.lock().insert(segment.id, owner) {
                    None => SegmentChange::Mounted,
                    Some(_) => SegmentChange::Recovered,
                };
                self.publish(|events| events.segment(name, change));
            }
            StateChange::SegmentUnmounted { segment, cause } => self.unmounted(*segment, *cause),
            StateChange::ClientSilent { client, .. } => {
                self.silent_clients.fetch_add(1, Relaxed);
                self.publish_client_segments(*client, SegmentChange::Silent);
            }
            StateChange::ClientExpired { .. } => _ = self.expired_clients.fetch_add(1, Relaxed),
            StateChange::SegmentStatus { .. }
            | StateChange::ClientRecovered { .. }
            | StateChange::DiskMounted { .. }
            | StateChange::DiskUnmounted { .. }
            | StateChange::ObjectStarted(_)
            | StateChange::RangeQuarantined { .. }
            | StateChange::RangeReleased { .. }
            | StateChange::TenantQuota { .. }
            | StateChange::ReturnTimes { .. }
            | StateChange::TransferStarted(_)
            | StateChange::TransferEnded { .. }
            | StateChange::Task(_)
            | StateChange::DrainJob(_)
            | StateChange::DrainMoveStarted { .. }
            | StateChange::DrainMoveEnded { .. } => {}
        }
    }

    fn stored(&self, object: &ObjectState<'_>, cause: StoreCause) {
        if cause == StoreCause::Written {
            self.sizes.add(object.size);
        }
        let (is_readable, medium) = match cause {
            StoreCause::Written | StoreCause::Promoted => (true, StorageMedium::StoreMemory),
            StoreCause::Offloaded => (true, StorageMedium::StoreDisk),
            StoreCause::MemoryEvicted => (false, StorageMedium::StoreMemory),
            StoreCause::DiskCopyLost => (false, StorageMedium::StoreDisk),
            StoreCause::Replicas | StoreCause::Snapshot => return,
        };
        let (tenant, key, group) = (&*object.tenant, &*object.key, object.group.as_deref());
        self.publish(|events| {
            if is_readable {
                events.stored(tenant, key, group, medium);
            } else {
                events.removed(tenant, key, group, medium);
            }
        });
    }

    fn publish(&self, publish: impl FnOnce(&KvEventQueue)) {
        if let Some(events) = &self.events {
            publish(events);
        }
    }

    fn unmounted(&self, segment: Uuid, cause: UnmountCause) {
        let Some(SegmentOwner { name, .. }) = self.segments.lock().remove(&segment) else { return };
        if cause == UnmountCause::ClientExpired
            && let Some(expired) = &self.expired
            && expired.try_send(Arc::clone(&name)).is_err()
        {
            tracing::warn!(%name, "metadata of an expired node stays: too many cleanups are pending");
        }
        self.publish(|events| events.segment(name, SegmentChange::Lost));
    }

    fn publish_client_segments(&self, client: Uuid, change: SegmentChange) {
        let segments = self.segments.lock();
        for owner in segments.values().filter(|owner| owner.client == client) {
            self.publish(|events| events.segment(Arc::clone(&owner.name), change));
        }
    }
}

/// Passes every change to an observer before it is appended.
pub struct ObservingJournal {
    journal: Arc<dyn Journal>,
    observer: Arc<FactObserver>,
}

impl ObservingJournal {
    /// Wraps `journal` with an observer.
    pub fn new(journal: Arc<dyn Journal>, observer: Arc<FactObserver>) -> Self {
        Self { journal, observer }
    }
}

impl Journal for ObservingJournal {
    fn append(&self, fact: &[u8]) -> u64 {
        self.journal.append(fact)
    }

    fn append_fact(&self, fact: &StateChange<'_>, encoded: &[u8]) -> u64 {
        self.observer.observe(fact);
        self.journal.append_fact(fact, encoded)
    }

    fn commit(&self, number: u64) -> io::Result<()> {
        self.journal.commit(number)
    }

    fn may_reply(&self) -> io::Result<()> {
        self.journal.may_reply()
    }

    fn may_write(&self) -> bool {
        self.journal.may_write()
    }

    fn storage(&self) -> Option<DataDirStatus> {
        self.journal.storage()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_in_the_bucket_that_ends_with_it() {
        let sizes = ValueSizeHistogram::default();
        for size in [1, 4096, 4097, 64 << 20, (64 << 20) + 1] {
            sizes.add(size);
        }
        let (buckets, sum) = sizes.read();
        assert_eq!(buckets, [2, 1, 0, 0, 0, 0, 1, 1]);
        assert_eq!(sum, 1 + 4096 + 4097 + (128 << 20) + 1);
    }
}
