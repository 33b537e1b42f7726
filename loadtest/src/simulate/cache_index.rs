//! The gateways' view of the caches, with a configurable delay.

use std::collections::VecDeque;

use moongate_scheduler::{StoreSiteIndex, StoreSiteRun, StoreTokenRun, TierHits};

use super::settings::SimulationOptions;
use crate::prefix_lru::LruChange;

#[derive(Debug, Clone, Copy)]
pub(crate) enum CacheLocation {
    Device(usize),
    Host(usize),
    /// The shared store, written by an engine in this zone.
    Store(u8),
}

/// Number of engines in a word of an engine set.
const WORD_ENGINES: usize = u64::BITS as usize;

/// 64 engines that have a block, one bit each.
#[derive(Debug, Clone, Copy, Default)]
struct BlockHolders {
    device: u64,
    host: u64,
}

/// Whether the store has a block, and in which zone.
#[derive(Debug, Clone, Copy, Default)]
struct StoredBlock {
    stored: bool,
    zone: u8,
}

#[derive(Debug, Clone, Copy)]
struct DelayedChange {
    /// When the gateways receive it.
    due_s: f64,
    location: CacheLocation,
    change: LruChange<u32>,
}

/// What the gateways know of a prompt's blocks in the shared store.
#[derive(Debug, Default)]
pub(crate) struct StoredPrompt {
    pub(crate) runs: Vec<StoreTokenRun>,
    /// The same blocks by zone.
    pub(crate) sites: Vec<StoreSiteRun>,
}

/// Index of the locations of every block.
#[derive(Debug)]
pub(crate) struct DelayedCacheIndex {
    /// For each block `words` entries, one for every 64 engines.
    holders: Vec<BlockHolders>,
    words: usize,
    store: Vec<StoredBlock>,
    engines: usize,
    /// Whether a block of any engine is on all of them.
    shared: bool,
    lag_s: f64,
    threshold: u32,
    /// Changes that the gateways have not received yet.
    pending_changes: VecDeque<DelayedChange>,
}

impl DelayedCacheIndex {
    pub(crate) fn new(settings: &SimulationOptions, blocks: usize) -> Self {
        let words = settings.prompt_engines().div_ceil(WORD_ENGINES).max(1);
        Self {
            holders: vec![BlockHolders::default(); blocks * words],
            words,
            store: vec![StoredBlock::default(); blocks],
            engines: settings.prompt_engines(),
            shared: settings.shared_cache,
            lag_s: settings.index_lag_s,
            threshold: settings.prefetch_threshold,
            pending_changes: VecDeque::new(),
        }
    }

    /// Records a change of a cache, for later delivery.
    pub(crate) fn record_change(&mut self, now: f64, tier: CacheLocation, change: LruChange<u32>) {
        if self.lag_s > 0.0 {
            self.pending_changes.push_back(DelayedChange { due_s: now + self.lag_s, location: tier, change });
        } else {
            self.apply(tier, change);
        }
    }

    /// Applies the changes whose delay has passed by `now`.
    pub(crate) fn apply_due_changes(&mut self, now: f64) {
        while let Some(&DelayedChange { due_s, location, change }) = self.pending_changes.front() {
            if due_s > now {
                break;
            }
            self.pending_changes.pop_front();
            self.apply(location, change);
        }
    }

    fn apply(&mut self, tier: CacheLocation, change: LruChange<u32>) {
        let (block, cached) = match change {
            LruChange::Added(block) => (block, true),
            LruChange::Evicted(block) => (block, false),
        };
        let (engine, member): (usize, fn(&mut BlockHolders) -> &mut u64) = match tier {
            CacheLocation::Device(engine) => (engine, |holders| &mut holders.device),
            CacheLocation::Host(engine) => (engine, |holders| &mut holders.host),
            CacheLocation::Store(zone) => {
                self.store[block as usize] = StoredBlock { stored: cached, zone };
                return;
            }
        };
        let set = |mask: &mut u64, bits: u64| *mask = if cached { *mask | bits } else { *mask & !bits };
        let first = block as usize * self.words;
        if self.shared {
            let holders = &mut self.holders[first..first + self.words];
            holders.iter_mut().for_each(|holders| set(member(holders), u64::MAX));
        } else {
            let holders = &mut self.holders[first + engine / WORD_ENGINES];
            set(member(holders), 1 << (engine % WORD_ENGINES));
        }
    }

    /// Computes the hits of a prompt of `input_tokens` in `blocks` of `block_tokens` on every engine, one entry per
    /// prefill engine in `hits`.
    pub(crate) fn predict(
        &self,
        blocks: &[u32],
        block_tokens: u32,
        input_tokens: u32,
        hits: &mut [TierHits],
    ) -> StoredPrompt {
        // At least one token must be computed.
        let usable = input_tokens.saturating_sub(1);
        let tokens =
            |count: usize| usable.min(u32::try_from(count).unwrap_or(u32::MAX).saturating_mul(block_tokens));
        for word in 0..self.words {
            let first = word * WORD_ENGINES;
            let engines = (self.engines - first).min(WORD_ENGINES);
            self.predict_local(blocks, word, &tokens, &mut hits[first..first + engines]);
        }
        let StoredPrompt { runs, sites } = self.stored_runs(blocks, &tokens);
        for hit in &mut hits[..self.engines] {
            let own = hit.l2_tokens;
            hit.l2_tokens = own - hit.l1_tokens;
            let run = runs.iter().find(|run| run.first_token <= own && own < run.first_token + run.tokens);
            let stored = run.map_or(0, |run| run.first_token + run.tokens - own);
            hit.l3_tokens = if stored >= self.threshold { stored } else { 0 };
        }
        StoredPrompt { runs, sites }
    }

    /// Computes the hits in the own caches of up to 64 engines: device in `l1_tokens`, device and host in `l2_tokens`.
    fn predict_local(
        &self,
        blocks: &[u32],
        word: usize,
        tokens: &impl Fn(usize) -> u32,
        hits: &mut [TierHits],
    ) {
        let all = if hits.len() >= WORD_ENGINES { u64::MAX } else { (1 << hits.len()) - 1 };
        let (mut on_device, mut local) = (all, all);
        for (index, &block) in blocks.iter().enumerate() {
            let holders = self.holders[block as usize * self.words + word];
            for_each_set_bit(on_device & !holders.device, |engine| hits[engine].l1_tokens = tokens(index));
            on_device &= holders.device;
            let own = holders.device | holders.host;
            for_each_set_bit(local & !own, |engine| hits[engine].l2_tokens = tokens(index));
            local &= own;
            if local == 0 {
                return;
            }
        }
        for_each_set_bit(on_device, |engine| hits[engine].l1_tokens = tokens(usize::MAX));
        for_each_set_bit(local, |engine| hits[engine].l2_tokens = tokens(usize::MAX));
    }

    /// The stored runs of a prompt's blocks, up to the first block that no cache has.
    fn stored_runs(&self, blocks: &[u32], tokens: &impl Fn(usize) -> u32) -> StoredPrompt {
        let StoredPrompt { mut runs, mut sites } = StoredPrompt::default();
        let mut end_of_run = false;
        for (index, &block) in blocks.iter().enumerate() {
            let StoredBlock { stored, zone } = self.store[block as usize];
            if stored {
                let (first, last) = (tokens(index), tokens(index + 1));
                match runs.last_mut() {
                    Some(run) if !end_of_run => run.tokens = last - run.first_token,
                    _ => runs.push(StoreTokenRun { first_token: first, tokens: last - first }),
                }
                let site = StoreSiteIndex(zone.into());
                match sites.last_mut() {
                    Some(run) if !end_of_run && run.site == site => run.tokens = last - run.first_token,
                    _ => sites.push(StoreSiteRun { first_token: first, tokens: last - first, site }),
                }
            } else if !self.is_held(block) {
                // Later blocks are not usable.
                break;
            }
            end_of_run = !stored;
        }
        StoredPrompt { runs, sites }
    }

    /// Whether any engine has the block.
    fn is_held(&self, block: u32) -> bool {
        let first = block as usize * self.words;
        self.holders[first..first + self.words].iter().any(|holders| holders.device | holders.host != 0)
    }
}

/// Calls `act` with the index of every set bit.
fn for_each_set_bit(mut bits: u64, mut act: impl FnMut(usize)) {
    while bits != 0 {
        act(bits.trailing_zeros() as usize);
        bits &= bits - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(lag_s: f64) -> DelayedCacheIndex {
        DelayedCacheIndex::new(
            &SimulationOptions { prefill: 2, index_lag_s: lag_s, ..SimulationOptions::eight_plus_four() },
            10,
        )
    }

    #[test]
    fn hits_are_split_by_tier_and_stop_at_the_first_gap() {
        let mut view = view(0.0);
        for block in [0, 1] {
            view.record_change(0.0, CacheLocation::Device(0), LruChange::Added(block));
        }
        for block in [0, 1, 2] {
            view.record_change(0.0, CacheLocation::Host(0), LruChange::Added(block));
        }
        for block in [0, 1, 2, 3, 5] {
            view.record_change(0.0, CacheLocation::Store(0), LruChange::Added(block));
        }
        let mut hits = [TierHits::default(); 2];
        let StoredPrompt { runs, .. } = view.predict(&[0, 1, 2, 3, 4, 5], 512, 6 * 512, &mut hits);
        assert_eq!(
            hits[0],
            TierHits { l1_tokens: 1_024, l2_tokens: 512, l3_tokens: 512, ..TierHits::default() }
        );
        assert_eq!(hits[1], TierHits { l3_tokens: 2_048, ..TierHits::default() });
        assert_eq!(runs.iter().map(|run| (run.first_token, run.tokens)).collect::<Vec<_>>(), [(0, 2_048)]);
        // The last token is always computed.
        let mut hits = [TierHits::default(); 2];
        view.predict(&[0, 1], 512, 1_024, &mut hits);
        assert_eq!(hits[0].l1_tokens, 1_023);
    }

    #[test]
    fn engines_beyond_the_first_word_have_hits_of_their_own() {
        let settings = SimulationOptions { prefill: 130, ..SimulationOptions::eight_plus_four() };
        let mut view = DelayedCacheIndex::new(&settings, 10);
        view.record_change(0.0, CacheLocation::Device(129), LruChange::Added(0));
        view.record_change(0.0, CacheLocation::Host(65), LruChange::Added(0));
        let mut hits = [TierHits::default(); 130];
        view.predict(&[0, 1], 512, 1_024, &mut hits);
        let found: Vec<(usize, u32, u32)> = hits
            .iter()
            .enumerate()
            .filter(|(_, hits)| hits.total() > 0)
            .map(|(engine, hits)| (engine, hits.l1_tokens, hits.l2_tokens))
            .collect();
        assert_eq!(found, [(65, 0, 512), (129, 512, 0)]);
        view.record_change(0.0, CacheLocation::Device(129), LruChange::Evicted(0));
        let mut hits = [TierHits::default(); 130];
        view.predict(&[0, 1], 512, 1_024, &mut hits);
        assert_eq!((hits[129].total(), hits[65].total()), (0, 512));
    }

    #[test]
    fn a_shared_cache_is_visible_on_every_engine() {
        let settings = SimulationOptions { prefill: 2, ..SimulationOptions::eight_plus_four() };
        let hits_on_second = |shared_cache: bool| {
            let mut view =
                DelayedCacheIndex::new(&SimulationOptions { shared_cache, ..settings.clone() }, 10);
            view.record_change(0.0, CacheLocation::Device(0), LruChange::Added(0));
            let mut hits = [TierHits::default(); 2];
            view.predict(&[0, 1], 512, 1_024, &mut hits);
            hits[1].l1_tokens
        };
        assert_eq!((hits_on_second(true), hits_on_second(false)), (512, 0));
    }

    #[test]
    fn changes_are_visible_after_the_delay() {
        let mut view = view(2.0);
        view.record_change(1.0, CacheLocation::Store(0), LruChange::Added(0));
        let hit = |view: &DelayedCacheIndex| {
            let mut hits = [TierHits::default(); 2];
            view.predict(&[0, 1], 512, 1_024, &mut hits);
            hits[0].l3_tokens
        };
        view.apply_due_changes(2.9);
        assert_eq!(hit(&view), 0);
        view.apply_due_changes(3.0);
        assert_eq!(hit(&view), 512);
    }
}
