//! Fetching pages from the shared store: one queue per engine, one read at a time, as in SGLang's prefetch thread.

use std::collections::VecDeque;

use crate::engine::EngineTimeModel;

/// One prompt's pages to fetch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockFetch {
    /// Attempt that needs the blocks.
    pub(crate) attempt: u32,
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

#[derive(Debug, Default)]
pub(crate) struct StoreFetchQueue {
    waiting: VecDeque<BlockFetch>,
    active: Option<ActiveFetch>,
    /// Incremented with every read, so that the end of an abandoned one is ignored.
    epoch: u32,
}

impl StoreFetchQueue {
    /// Adds a read. If it starts at once, returns its end and epoch.
    pub(crate) fn add(
        &mut self,
        now: f64,
        fetch: BlockFetch,
        service: &EngineTimeModel,
    ) -> Option<(f64, u32)> {
        self.waiting.push_back(fetch);
        self.start_next(now, service)
    }

    /// Starts the next read if none is running; returns its end and epoch.
    pub(crate) fn start_next(&mut self, now: f64, service: &EngineTimeModel) -> Option<(f64, u32)> {
        if self.active.is_some() {
            return None;
        }
        let fetch = self.waiting.pop_front()?;
        let reading = service.storage_fetch_s(fetch.tokens as usize) - service.storage_latency_s;
        let duration = service.storage_latency_s + f64::from(fetch.network_distance) * reading;
        self.active = Some(ActiveFetch { fetch, began: now, duration });
        self.epoch = self.epoch.wrapping_add(1);
        Some((now + duration, self.epoch))
    }

    /// Completes the read of epoch `turn`; `None` if it was abandoned.
    pub(crate) fn complete(&mut self, epoch: u32) -> Option<BlockFetch> {
        if epoch != self.epoch {
            return None;
        }
        self.active.take().map(|active| active.fetch)
    }

    /// Abandons the read of `attempt`; returns how many blocks have arrived.
    pub(crate) fn abandon(&mut self, now: f64, attempt: u32, service: &EngineTimeModel) -> u32 {
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
        let fetch = |attempt| BlockFetch { attempt, blocks: 4, tokens: 2_000, network_distance: 1.0 };
        let (ends, first) = queue.add(0.0, fetch(1), &service).expect("begins");
        assert!((ends - 2.5).abs() < 1e-9);
        assert!(queue.add(0.1, fetch(2), &service).is_none());
        assert_eq!(queue.abandon(1.5, 1, &service), 2);
        let (ends, second) = queue.start_next(1.5, &service).expect("the next read starts");
        assert!((ends - 4.0).abs() < 1e-9);
        assert!(queue.complete(first).is_none());
        assert_eq!(queue.complete(second).map(|fetch| fetch.attempt), Some(2));
        assert_eq!(queue.abandon(5.0, 7, &service), 0);
    }
}
