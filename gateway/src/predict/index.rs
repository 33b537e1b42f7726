//! The one index of the gateway: many requests read it, feeds write it.

use std::sync::Arc;
use std::time::Duration;

use moongate_scheduler::index::{EngineSlot, Hits, PageIndex, Size};
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Index entries swept while the lock is held once: a few microseconds.
const SWEPT_AT_ONCE: usize = 1024;
/// Pause between two steps of a sweep, so that lookups come in between.
const SWEEP_PAUSE: Duration = Duration::from_millis(1);

/// Which pages are where. Writers hold the lock for small batches only, so that a lookup never waits long.
#[derive(Debug)]
pub(crate) struct KvIndex {
    pages: RwLock<PageIndex>,
    sweep: Notify,
}

impl KvIndex {
    /// An index of at most `max_pages` pages.
    pub(crate) fn new(max_pages: usize) -> Arc<Self> {
        Arc::new(Self { pages: RwLock::new(PageIndex::new(max_pages)), sweep: Notify::new() })
    }

    /// Which engines have how much of a prompt.
    pub(crate) fn lookup(&self, keys: &[u64], hits: &mut Hits) {
        self.pages.read().lookup(keys, hits);
    }

    /// How many of these pages, from the first on, are complete in the store.
    pub(crate) fn shared_prefix(&self, keys: &[u64]) -> usize {
        self.pages.read().shared_prefix(keys)
    }

    /// Whether a page is known, or can be added without displacing another.
    pub(crate) fn has_room_for(&self, page: u64) -> bool {
        self.pages.read().has_room_for(page)
    }

    /// Applies a small change.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut PageIndex) -> R) -> R {
        let mut pages = self.pages.write();
        let result = change(&mut pages);
        if pages.needs_sweep() {
            self.sweep.notify_one();
        }
        result
    }

    /// How large it is.
    pub(crate) fn size(&self) -> Size {
        self.pages.read().size()
    }

    /// Removes pages that count no more, in small steps, whenever there are some.
    pub(crate) async fn keep_swept(self: Arc<Self>, stop: CancellationToken) {
        while stop.run_until_cancelled(self.sweep.notified()).await.is_some() {
            while self.pages.write().sweep(SWEPT_AT_ONCE) {
                tokio::time::sleep(SWEEP_PAUSE).await;
            }
        }
    }
}

/// An engine's place in the index. Dropping it forgets the engine's pages.
#[derive(Debug)]
pub(crate) struct EngineEntry {
    index: Arc<KvIndex>,
    slot: EngineSlot,
}

impl EngineEntry {
    pub(crate) fn new(index: Arc<KvIndex>) -> Self {
        let slot = index.change(PageIndex::add_engine);
        Self { index, slot }
    }

    /// The index.
    pub(crate) fn index(&self) -> &Arc<KvIndex> {
        &self.index
    }

    /// The engine's number.
    pub(crate) fn slot(&self) -> EngineSlot {
        self.slot
    }
}

impl Drop for EngineEntry {
    fn drop(&mut self) {
        self.index.change(|pages| pages.remove_engine(self.slot));
    }
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::index::Tier;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_dropped_engine_is_forgotten_and_swept() {
        let index = KvIndex::new(1000);
        let stop = CancellationToken::new();
        let sweeper = index.clone().keep_swept(stop.clone());
        let engine = EngineEntry::new(index.clone());
        index.change(|pages| pages.stored(engine.slot(), Tier::L1, &[1, 2, 3]));
        let mut hits = Hits::default();
        index.lookup(&[1, 2, 9], &mut hits);
        assert_eq!(hits.of(engine.slot()).l1, 2);
        drop(engine);
        let test = async {
            while index.size().pages > 0 {
                tokio::time::sleep(SWEEP_PAUSE).await;
            }
            stop.cancel();
        };
        tokio::join!(sweeper, test);
    }
}
