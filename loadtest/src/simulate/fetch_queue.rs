//! Fetching pages from the shared store: one queue per engine, one read at a time, as SGLang's prefetch thread works.

use std::collections::VecDeque;

use crate::engine::EngineTimeModel;

/// One prompt's pages to fetch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockFetch {
    /// For whom.
    pub(crate) attempt: u32,
    /// How many blocks, behind those that the engine has.
    pub(crate) blocks: u32,
    /// Their tokens.
    pub(crate) tokens: u32,
    /// How much longer than from nearby they take.
    pub(crate) network_distance: f32,
}

#[derive(Debug, Clone, Copy)]
struct ActiveFetch {
    fetch: BlockFetch,
    began: f64,
    duration: f64,
}

/// The queue.
#[derive(Debug, Default)]
pub(crate) struct StoreFetchQueue {
    waiting: VecDeque<BlockFetch>,
    active: Option<ActiveFetch>,
    /// Goes up with every read, so that the end of an abandoned one is not taken for the current one's.
    epoch: u32,
}

impl StoreFetchQueue {
    /// Adds a read. If it begins at once, says when it ends and its turn.
    pub(crate) fn add(
        &mut self,
        now: f64,
        fetch: BlockFetch,
        service: &EngineTimeModel,
    ) -> Option<(f64, u32)> {
        self.waiting.push_back(fetch);
        self.begin(now, service)
    }

    /// Begins the next read if none is under way; says when it ends and its turn.
    pub(crate) fn begin(&mut self, now: f64, service: &EngineTimeModel) -> Option<(f64, u32)> {
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

    /// The read of `turn` has ended; `None` if it was abandoned.
    pub(crate) fn complete(&mut self, turn: u32) -> Option<BlockFetch> {
        if turn != self.epoch {
            return None;
        }
        self.active.take().map(|active| active.fetch)
    }

    /// Gives up what `attempt` waits for; answers how many blocks have arrived.
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

    /// The engine has died.
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
        let mut nic = StoreFetchQueue::default();
        let fetch = |attempt| BlockFetch { attempt, blocks: 4, tokens: 2_000, network_distance: 1.0 };
        let (ends, first) = nic.add(0.0, fetch(1), &service).expect("begins");
        assert!((ends - 2.5).abs() < 1e-9);
        assert!(nic.add(0.1, fetch(2), &service).is_none());
        assert_eq!(nic.abandon(1.5, 1, &service), 2);
        let (ends, second) = nic.begin(1.5, &service).expect("the next begins");
        assert!((ends - 4.0).abs() < 1e-9);
        assert!(nic.complete(first).is_none());
        assert_eq!(nic.complete(second).map(|fetch| fetch.attempt), Some(2));
        assert_eq!(nic.abandon(5.0, 7, &service), 0);
    }
}
