//! Fetching pages from the shared store: one queue per engine, one read at a time, as in SGLang's prefetch thread.

use std::collections::VecDeque;

use super::indices::AttemptIndex;
use crate::engine::EngineTimeModel;

/// One prompt's pages to fetch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockFetch {
    /// Attempt that needs the blocks.
    pub(crate) attempt: AttemptIndex,
    /// Number of blocks, after those that the engine has.
    pub(crate) blocks: u32,
    /// Number of tokens in these blocks.
    pub(crate) tokens: u32,
    /// Time factor of the read, by the location of the blocks.
    pub(crate) network_distance: f32,
}

#[derive(Debug, Clone, Copy)]
struct ActiveFetch {
    fetch: BlockFetch,
    began: f64,
    duration: f64,
}

/// A read that has started.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StartedFetch {
    /// Time of its end.
    pub(crate) end: f64,
    pub(crate) epoch: u32,
}

#[derive(Debug, Default)]
pub(crate) struct StoreFetchQueue {
    waiting: VecDeque<BlockFetch>,
    active: Option<ActiveFetch>,
    /// Incremented with every read, so that the end of an abandoned one is ignored.
    epoch: u32,
}

impl StoreFetchQueue {
    /// Adds a read. Returns it if it starts at once.
    pub(crate) fn add(
        &mut self,
        now: f64,
        fetch: BlockFetch,
        service: &EngineTimeModel,
    ) -> Option<StartedFetch> {
        self.waiting.push_back(fetch);
        self.start_next(now, service)
    }

    /// Starts the next read if none is running.
    pub(crate) fn start_next(&mut self, now: f64, service: &EngineTimeModel) -> Option<StartedFetch> {
        if self.active.is_some() {
            return None;
        }
        let fetch = self.waiting.pop_front()?;
        let reading = service.storage_fetch_s(fetch.tokens as usize) - service.storage_latency_s;
        let duration = service.storage_latency_s + f64::from(fetch.network_distance) * reading;
        self.active = Some(ActiveFetch { fetch, began: now, duration });
        self.epoch = self.epoch.wrapping_add(1);
        Some(StartedFetch { end: now + duration, epoch: self.epoch })
    }

    /// Completes the read of epoch `epoch`; `None` if it was abandoned.
    pub(crate) fn complete(&mut self, epoch: u32) -> Option<BlockFetch> {
        if epoch != self.epoch {
            return None;
        }
        self.active.take().map(|active| active.fetch)
    }

    /// Abandons the read of `attempt`; returns how many blocks have arrived.
    pub(crate) fn abandon(&mut self, now: f64, attempt: AttemptIndex, service: &EngineTimeModel) -> u32 {
        if let Some(active) = self.active.filter(|active| active.fetch.attempt == attempt) {
            self.active = None;
            let reading = active.duration - service.storage_latency_s;
            let share =
                if reading > 0.0 { (now - active.began - service.storage_latency_s) / reading } else { 1.0 };
            return (f64::from(active.fetch.blocks) * share.clamp(0.0, 1.0)) as u32;
        }
        self.waiting.retain(|fetch| fetch.attempt != attempt);
        0
    }

    /// Drops all reads after a failure of the engine.
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
        self.active = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_sequential_and_an_aborted_one_keeps_its_bytes() {
        let service = EngineTimeModel {
            kv_bytes_per_token: 1_000,
            storage_bytes_per_s: 1e6,
            storage_latency_s: 0.5,
            ..EngineTimeModel::default()
        };
        let mut queue = StoreFetchQueue::default();
        let attempt = AttemptIndex::new;
        let fetch =
            |number| BlockFetch { attempt: attempt(number), blocks: 4, tokens: 2_000, network_distance: 1.0 };
        let StartedFetch { end, epoch: first } = queue.add(0.0, fetch(1), &service).expect("begins");
        assert!((end - 2.5).abs() < 1e-9);
        assert!(queue.add(0.1, fetch(2), &service).is_none());
        assert_eq!(queue.abandon(1.5, attempt(1), &service), 2);
        let StartedFetch { end, epoch: second } =
            queue.start_next(1.5, &service).expect("the next read starts");
        assert!((end - 4.0).abs() < 1e-9);
        assert!(queue.complete(first).is_none());
        assert_eq!(queue.complete(second).map(|fetch| fetch.attempt), Some(attempt(2)));
        assert_eq!(queue.abandon(5.0, attempt(7), &service), 0);
    }
}
