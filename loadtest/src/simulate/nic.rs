//! Fetching pages from the shared store: one queue per engine, one read at a time, as SGLang's prefetch thread works.

use std::collections::VecDeque;

use crate::engine::ServiceModel;

/// One prompt's pages to fetch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fetch {
    /// For whom.
    pub(crate) attempt: u32,
    /// How many blocks, behind those that the engine has.
    pub(crate) blocks: u32,
    /// Their tokens.
    pub(crate) tokens: u32,
    /// How much longer than from nearby they take.
    pub(crate) farness: f32,
}

#[derive(Debug, Clone, Copy)]
struct Active {
    fetch: Fetch,
    began: f64,
    duration: f64,
}

/// The queue.
#[derive(Debug, Default)]
pub(crate) struct Nic {
    waiting: VecDeque<Fetch>,
    active: Option<Active>,
    /// Goes up with every read, so that the end of an abandoned one is not taken for the current one's.
    turn: u32,
}

impl Nic {
    /// Adds a read. If it begins at once, says when it ends and its turn.
    pub(crate) fn add(&mut self, now: f64, fetch: Fetch, service: &ServiceModel) -> Option<(f64, u32)> {
        self.waiting.push_back(fetch);
        self.begin(now, service)
    }

    /// Begins the next read if none is under way; says when it ends and its turn.
    pub(crate) fn begin(&mut self, now: f64, service: &ServiceModel) -> Option<(f64, u32)> {
        if self.active.is_some() {
            return None;
        }
        let fetch = self.waiting.pop_front()?;
        let reading = service.storage_fetch_s(fetch.tokens as usize) - service.storage_latency_s;
        let duration = service.storage_latency_s + f64::from(fetch.farness) * reading;
        self.active = Some(Active { fetch, began: now, duration });
        self.turn = self.turn.wrapping_add(1);
        Some((now + duration, self.turn))
    }

    /// The read of `turn` has ended; `None` if it was abandoned.
    pub(crate) fn ended(&mut self, turn: u32) -> Option<Fetch> {
        if turn != self.turn {
            return None;
        }
        self.active.take().map(|active| active.fetch)
    }

    /// Gives up what `attempt` waits for; answers how many blocks have arrived.
    pub(crate) fn cut(&mut self, now: f64, attempt: u32, service: &ServiceModel) -> u32 {
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
    fn reads_follow_each_other_and_a_cut_one_yields_what_has_arrived() {
        let service = ServiceModel {
            kv_bytes_per_token: 1_000,
            storage_bytes_per_s: 1e6,
            storage_latency_s: 0.5,
            ..ServiceModel::default()
        };
        let mut nic = Nic::default();
        let fetch = |attempt| Fetch { attempt, blocks: 4, tokens: 2_000, farness: 1.0 };
        let (ends, first) = nic.add(0.0, fetch(1), &service).expect("begins");
        assert!((ends - 2.5).abs() < 1e-9);
        assert!(nic.add(0.1, fetch(2), &service).is_none());
        assert_eq!(nic.cut(1.5, 1, &service), 2);
        let (ends, second) = nic.begin(1.5, &service).expect("the next begins");
        assert!((ends - 4.0).abs() < 1e-9);
        assert!(nic.ended(first).is_none());
        assert_eq!(nic.ended(second).map(|fetch| fetch.attempt), Some(2));
        assert_eq!(nic.cut(5.0, 7, &service), 0);
    }
}
