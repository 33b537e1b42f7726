//! What the shared store has: from its master's metadata, without leasing a single object.
//!
//! What a request could use is asked for when the request is there ([`StoreView::confirm`]). What others store is heard of by the
//! master's events, where it publishes them ([`StoreView::follow_events`]); masters from PyPI do not. As events tell neither what was
//! there before nor every removal, the whole of the keys is read now and then, slowly. And nodes are watched, because the master goes
//! on to list the pages of a dead one for seconds.

mod changes;
mod confirm;
mod events;
mod nodes;
mod reading;
mod seen;
mod sequence;

use std::sync::Arc;

use moka::sync::Cache;
use mooncake_wire::admin::KeyReplicas;
use moongate_kvstore::admin::Admin;
use moongate_scheduler::index::StoreNode;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::feedback::StoreMetrics;
use crate::predict::index::KvIndex;
use crate::predict::stored::Stored;
use confirm::{CONFIRMED_FOR, CONFIRMED_PAGES};
use events::Following;
use nodes::Nodes;
pub(crate) use seen::StoreSeen;

/// The store, as the gateway sees it.
#[derive(Debug)]
pub(crate) struct StoreView {
    admin: Admin,
    index: Arc<KvIndex>,
    metrics: Arc<StoreMetrics>,
    nodes: Mutex<Nodes>,
    /// Pages that were found complete a moment ago.
    confirmed: Cache<u64, ()>,
    /// Until when requests do not ask, because the master failed.
    sulking: Mutex<Option<Instant>>,
    read_now: Notify,
    following: Following,
    /// Held by readings and by events from asking the master until its answer is in the index, so that an old answer never comes
    /// after a newer one. Requests do not wait for it: what they got wrong in the meantime, they ask for again.
    turn: tokio::sync::Mutex<()>,
}

impl StoreView {
    pub(crate) fn new(admin: Admin, index: Arc<KvIndex>, metrics: Arc<StoreMetrics>) -> Arc<Self> {
        let confirmed = Cache::builder().max_capacity(CONFIRMED_PAGES).time_to_live(CONFIRMED_FOR).build();
        let following = Following::new(metrics.events_current.clone());
        Arc::new(Self {
            admin,
            index,
            metrics,
            nodes: Mutex::default(),
            confirmed,
            sulking: Mutex::default(),
            read_now: Notify::new(),
            following,
            turn: tokio::sync::Mutex::default(),
        })
    }

    /// On which hosts nodes are; empty for one that is not known any more.
    pub(crate) fn hosts(&self, nodes: impl Iterator<Item = StoreNode>) -> Vec<Arc<str>> {
        let known = self.nodes.lock();
        nodes.map(|node| known.host(node).cloned().unwrap_or_default()).collect()
    }

    /// Enters an object that was found. Returns whether it can be read anywhere.
    fn put(&self, stored: Stored, replicas: &KeyReplicas<'_>) -> bool {
        let mut nodes = self.nodes.lock();
        let Some((endpoint, medium)) = nodes.place(replicas) else { return false };
        self.index.change(|pages| {
            let Some(node) = nodes.at(&endpoint, pages) else { return false };
            pages.part_stored(stored.page, stored.part, node, medium);
            true
        })
    }

    /// An object is gone: its page is not complete any more.
    fn gone(&self, stored: Stored) {
        self.index.change(|pages| pages.part_removed(stored.page, stored.part));
        self.confirmed.invalidate(&stored.page);
    }
}
