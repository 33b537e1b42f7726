//! What the shared store has: from its master's metadata, without leasing a single object.
//!
//! What a request could use is asked for when the request is there ([`StoreView::confirm`]). What others store is heard of by the
//! master's events, where it publishes them ([`StoreView::follow_events`]); masters from PyPI do not. As events tell neither what was
//! there before nor every removal, the whole of the keys is read now and then, slowly. And nodes are watched, because the master goes
//! on to list the pages of a dead one for seconds.

mod changes;
mod confirm;
mod events;
mod key_scan;
mod nodes;
mod sequence;
mod status;

use std::sync::Arc;

use moka::sync::Cache;
use mooncake_wire::admin::KeyReplicas;
use moongate_master_client::admin::AdminClient;
use moongate_scheduler::index::StoreNodeSlot;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::feedback::StoreViewMetrics;
use crate::predict::index::KvIndex;
use crate::predict::store_keys::StoredBlockPart;
use confirm::{CONFIRMATION_TTL, MAX_CONFIRMED_BLOCKS};
use events::EventSyncTracker;
use nodes::StoreNodeTable;
pub(crate) use status::StoreViewStatus;

/// The store, as the gateway sees it.
#[derive(Debug)]
pub(crate) struct StoreView {
    admin: AdminClient,
    index: Arc<KvIndex>,
    metrics: Arc<StoreViewMetrics>,
    nodes: Mutex<StoreNodeTable>,
    /// Pages that were found complete a moment ago.
    confirmed: Cache<u64, ()>,
    /// Until when requests do not ask, because the master failed.
    backoff_until: Mutex<Option<Instant>>,
    scan_requested: Notify,
    event_sync: EventSyncTracker,
    /// Held by readings and by events from asking the master until its answer is in the index, so that an old answer never comes
    /// after a newer one. Requests do not wait for it: what they got wrong in the meantime, they ask for again.
    update_lock: tokio::sync::Mutex<()>,
}

impl StoreView {
    pub(crate) fn new(admin: AdminClient, index: Arc<KvIndex>, metrics: Arc<StoreViewMetrics>) -> Arc<Self> {
        let confirmed =
            Cache::builder().max_capacity(MAX_CONFIRMED_BLOCKS).time_to_live(CONFIRMATION_TTL).build();
        let following = EventSyncTracker::new(metrics.events_in_sync.clone());
        Arc::new(Self {
            admin,
            index,
            metrics,
            nodes: Mutex::default(),
            confirmed,
            backoff_until: Mutex::default(),
            scan_requested: Notify::new(),
            event_sync: following,
            update_lock: tokio::sync::Mutex::default(),
        })
    }

    /// On which hosts nodes are; empty for one that is not known any more.
    pub(crate) fn hosts(&self, nodes: impl Iterator<Item = StoreNodeSlot>) -> Vec<Arc<str>> {
        let known = self.nodes.lock();
        nodes.map(|node| known.host(node).cloned().unwrap_or_default()).collect()
    }

    /// Enters an object that was found. Returns whether it can be read anywhere.
    fn insert(&self, stored: StoredBlockPart, replicas: &KeyReplicas<'_>) -> bool {
        let mut nodes = self.nodes.lock();
        let Some((endpoint, medium)) = nodes.location(replicas) else { return false };
        self.index.update(|pages| {
            let Some(node) = nodes.node_at(&endpoint, pages) else { return false };
            pages.add_store_part(stored.page, stored.part, node, medium);
            true
        })
    }

    /// An object is gone: its page is not complete any more.
    fn remove(&self, stored: StoredBlockPart) {
        self.index.update(|pages| pages.remove_store_part(stored.page, stored.part));
        self.confirmed.invalidate(&stored.page);
    }
}
