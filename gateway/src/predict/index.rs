//! The one index of the gateway: many requests read it, feeds write it.

use std::sync::Arc;
use std::time::Duration;

use moongate_scheduler::index::{EngineSlot, IndexLookup, IndexSize, KvBlockIndex};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::spin_rw_lock::SpinRwLock;

/// Pages that are read while the lock is held once, as in a step of a lookup: two microseconds.
const READ_BATCH: usize = 64;
/// Pages that are changed while the lock is held once: a microsecond or two.
const WRITE_BATCH: usize = 8;
/// Index entries swept while the lock is held once: about as long.
const SWEEP_BATCH: usize = 128;
/// How often that is done without a pause.
const SWEEP_STEPS: usize = 8;
/// Pause between two steps of a sweep, so that lookups come in between.
const SWEEP_PAUSE: Duration = Duration::from_millis(1);

/// Which pages are where. Everybody holds the lock for small batches only, so that nobody waits long.
#[derive(Debug)]
pub(crate) struct KvIndex {
    pages: SpinRwLock<KvBlockIndex>,
    sweep: Notify,
}

impl KvIndex {
    /// An index of at most `max_pages` pages.
    pub(crate) fn new(max_pages: usize) -> Arc<Self> {
        Arc::new(Self { pages: SpinRwLock::new(KvBlockIndex::new(max_pages)), sweep: Notify::new() })
    }

    /// Which engines have how much of a prompt.
    pub(crate) fn lookup(&self, keys: &[u64], hits: &mut IndexLookup) {
        hits.restart();
        while !self.pages.read().lookup_step(keys, hits) {}
    }

    /// How many of these pages, from the first on, are complete in the store.
    pub(crate) fn shared_prefix(&self, keys: &[u64]) -> usize {
        let mut prefix = 0;
        for keys in keys.chunks(READ_BATCH) {
            let found = self.pages.read().shared_prefix(keys);
            prefix += found;
            if found < keys.len() {
                break;
            }
        }
        prefix
    }

    /// Whether a page is known, or can be added without displacing another.
    pub(crate) fn has_capacity_for(&self, page: u64) -> bool {
        self.pages.read().has_capacity_for(page)
    }

    /// Applies a small change.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut KvBlockIndex) -> R) -> R {
        let mut pages = self.pages.write();
        let result = change(&mut pages);
        if pages.needs_sweep() {
            self.sweep.notify_one();
        }
        result
    }

    /// Applies a change to pages, a few at a time.
    pub(crate) fn update_blocks(&self, pages: &[u64], change: impl Fn(&mut KvBlockIndex, &[u64])) {
        // What has been read just now is changed faster, while others wait.
        std::hint::black_box(self.pages.read().count_known(pages));
        for pages in pages.chunks(WRITE_BATCH) {
            self.update(|index| change(index, pages));
        }
    }

    /// How large it is.
    pub(crate) fn size(&self) -> IndexSize {
        self.pages.read().size()
    }

    /// Removes pages that count no more, in small steps, whenever there are some.
    pub(crate) async fn run_sweeper(self: Arc<Self>, stop: CancellationToken) {
        while stop.run_until_cancelled(self.sweep.notified()).await.is_some() {
            while (0..SWEEP_STEPS).all(|_| self.pages.write().sweep(SWEEP_BATCH)) {
                tokio::time::sleep(SWEEP_PAUSE).await;
            }
        }
    }
}

/// An engine's place in the index. Dropping it forgets the engine's pages.
#[derive(Debug)]
pub(crate) struct EngineSlotGuard {
    index: Arc<KvIndex>,
    slot: EngineSlot,
}

impl EngineSlotGuard {
    pub(crate) fn new(index: Arc<KvIndex>) -> Self {
        let slot = index.update(KvBlockIndex::add_engine);
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

impl Drop for EngineSlotGuard {
    fn drop(&mut self) {
        self.index.update(|pages| pages.remove_engine(self.slot));
    }
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::index::EngineCacheTier;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_dropped_engine_is_removed_and_swept() {
        let index = KvIndex::new(1000);
        let stop = CancellationToken::new();
        let sweeper = index.clone().run_sweeper(stop.clone());
        let engine = EngineSlotGuard::new(index.clone());
        index.update(|pages| pages.add_engine_blocks(engine.slot(), EngineCacheTier::L1, &[1, 2, 3]));
        let mut hits = IndexLookup::default();
        index.lookup(&[1, 2, 9], &mut hits);
        assert_eq!(hits.engine(engine.slot()).l1, 2);
        drop(engine);
        let test = async {
            while index.size().blocks > 0 {
                tokio::time::sleep(SWEEP_PAUSE).await;
            }
            stop.cancel();
        };
        tokio::join!(sweeper, test);
    }
}
