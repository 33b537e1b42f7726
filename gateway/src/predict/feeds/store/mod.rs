//! Contents of the shared store, from the metadata of its master, or of several masters that each have a shard of it, without taking
//! leases on objects.
//!
//! Blocks that a request could use are queried when the request arrives ([`StoreView::confirm`]). Changes by others arrive as
//! events, where the master publishes them ([`StoreView::follow_events`]); masters from PyPI do not. As events cover neither
//! earlier objects nor every removal, all keys are scanned from time to time. Nodes are watched too, because the master keeps
//! listing the blocks of a dead one for seconds.

mod admins;
mod changes;
mod confirm;
mod events;
mod key_scan;
mod nodes;
mod object_list;
mod sequence;
mod status;

use std::sync::{Arc, Once};

use moka::sync::Cache;
use mooncake_wire::admin::KeyReplicas;
use moongate_scheduler::index::StoreNodeSlot;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::feedback::StoreViewMetrics;
use crate::kv_index::KvIndex;
use crate::kv_index::StoredBlockPart;
pub(crate) use admins::StoreAdmins;
use confirm::{CONFIRMATION_TTL, MAX_CONFIRMED_BLOCKS};
use events::EventSyncTracker;
use nodes::StoreNodeTable;
pub(crate) use status::StoreViewStatus;

/// The gateway's view of the store.
#[derive(Debug)]
pub(crate) struct StoreView {
    admins: StoreAdmins,
    index: Arc<KvIndex>,
    metrics: Arc<StoreViewMetrics>,
    nodes: Mutex<StoreNodeTable>,
    /// Blocks that were found complete recently.
    confirmed: Cache<u64, ()>,
    /// Until when requests skip their query, because the master failed.
    backoff_until: Mutex<Option<Instant>>,
    scan_requested: Notify,
    /// Whether the log says that the master has no list of locations.
    key_lookup_logged: Once,
    event_sync: EventSyncTracker,
    /// Held by scans and events from a query until its response is in the index, so that an old response never overwrites a newer
    /// one. Requests do not wait for it: they query a wrong entry again.
    update_lock: tokio::sync::Mutex<()>,
}

impl StoreView {
    pub(crate) fn new(admins: StoreAdmins, index: Arc<KvIndex>, metrics: Arc<StoreViewMetrics>) -> Arc<Self> {
        let confirmed =
            Cache::builder().max_capacity(MAX_CONFIRMED_BLOCKS).time_to_live(CONFIRMATION_TTL).build();
        let event_sync = EventSyncTracker::new(admins.count(), metrics.events_in_sync.clone());
        Arc::new(Self {
            nodes: Mutex::new(StoreNodeTable::new(admins.count())),
            admins,
            index,
            metrics,
            confirmed,
            backoff_until: Mutex::default(),
            scan_requested: Notify::new(),
            key_lookup_logged: Once::new(),
            event_sync,
            update_lock: tokio::sync::Mutex::default(),
        })
    }

    /// Hosts of store nodes; empty for a node that is no longer known.
    pub(crate) fn hosts(&self, nodes: impl Iterator<Item = StoreNodeSlot>) -> Vec<Arc<str>> {
        let known = self.nodes.lock();
        nodes.map(|node| known.host(node).cloned().unwrap_or_default()).collect()
    }

    /// Records the location of an object. Returns whether it can be read from any node.
    fn insert(&self, stored: StoredBlockPart, replicas: &KeyReplicas<'_>) -> bool {
        let mut nodes = self.nodes.lock();
        let Some((endpoint, medium)) = nodes.location(replicas) else { return false };
        self.index.update(|blocks| {
            let Some(node) = nodes.node_at(&endpoint, blocks) else { return false };
            blocks.add_store_part(stored.block, stored.part, node, medium);
            true
        })
    }

    /// Removes an object: its block is no longer complete.
    fn remove(&self, stored: StoredBlockPart) {
        self.index.update(|blocks| blocks.remove_store_part(stored.block, stored.part));
        self.confirmed.invalidate(&stored.block);
    }
}
