//! SGLang's `benchmark/hicache/bench_multiturn.py`: many clients, each with a conversation that grows by one text per
//! round, and few requests in flight.

use super::indices::WorkloadIndex;
use super::workload::{ArrivalMode, NewRequest, SimulatedWorkload, WorkloadBuilder};

/// Pause of the sender while the maximum number of requests is in flight.
const FULL_PAUSE_S: f64 = 0.050;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MultiTurnOptions {
    pub clients: u32,
    /// Number of requests per conversation.
    pub rounds: u32,
    /// Tokens of the text that each round adds.
    pub text_tokens: u32,
    /// Maximum number of requests in flight.
    pub in_flight: u32,
    /// Rate of the exponential pause between two requests.
    pub per_second: f64,
    /// Mean time that a request stays in flight after its first token, in multiples of its computation; uniform between
    /// zero and twice the mean. By Little's law, the published results have 3.4 requests in flight where the benchmark
    /// allows 4.
    pub in_flight_lag: f64,
}

impl Default for MultiTurnOptions {
    fn default() -> Self {
        Self {
            clients: 150,
            rounds: 10,
            text_tokens: 2_048,
            in_flight: 4,
            per_second: 16.0,
            in_flight_lag: 0.5,
        }
    }
}

#[derive(Debug, Clone)]
pub struct MultiTurnSender {
    pub(crate) settings: MultiTurnOptions,
    random: fastrand::Rng,
    round: u32,
    /// Clients that may send their request of this round.
    ready: Vec<u32>,
    in_flight: u32,
    /// Number of requests of this round that have ended.
    ended: u32,
}

/// What the sender does at one time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SenderStep {
    /// The request that it sends.
    pub(crate) request: Option<WorkloadIndex>,
    /// Seconds until its next run; `None` when everything is sent.
    pub(crate) pause_s: Option<f64>,
}

impl MultiTurnSender {
    #[must_use]
    pub fn workload(settings: MultiTurnOptions, seed: u64) -> SimulatedWorkload {
        // An engine's cache evicts a turn as a whole: it is one node of the tree.
        let mut prompts = WorkloadBuilder::new(settings.text_tokens as usize);
        for round in 1..=settings.rounds {
            for client in 0..u64::from(settings.clients) {
                let ids: Vec<u64> = (0..u64::from(round))
                    .map(|number| client * u64::from(settings.rounds) + number)
                    .collect();
                prompts.push(NewRequest {
                    recorded_s: 0.0,
                    input_tokens: (round * settings.text_tokens) as usize,
                    output_tokens: 1,
                    block_ids: &ids,
                    predecessor: None,
                    session: client,
                });
            }
        }
        let random = fastrand::Rng::with_seed(seed);
        let ready = (0..settings.clients).collect();
        prompts.finish(ArrivalMode::Closed(Self {
            settings,
            random,
            round: 0,
            ready,
            in_flight: 0,
            ended: 0,
        }))
    }

    /// Runs the sender once.
    pub(crate) fn tick(&mut self) -> SenderStep {
        if self.in_flight >= self.settings.in_flight {
            return SenderStep { request: None, pause_s: Some(FULL_PAUSE_S) };
        }
        let pause = -(1.0 - self.random.f64()).ln() / self.settings.per_second;
        if self.ready.is_empty() {
            let pause_s = (self.round < self.settings.rounds).then_some(pause);
            return SenderStep { request: None, pause_s };
        }
        let client = self.ready.swap_remove(self.random.usize(..self.ready.len()));
        self.in_flight += 1;
        let request = WorkloadIndex::new((self.round * self.settings.clients + client) as usize);
        SenderStep { request: Some(request), pause_s: Some(pause) }
    }

    /// How long a request stays in flight after its first token.
    pub(crate) fn lag_s(&mut self, service_s: f64) -> f64 {
        2.0 * self.settings.in_flight_lag * self.random.f64() * service_s
    }

    /// Frees the in-flight slot of a request.
    pub(crate) fn release_in_flight(&mut self) {
        self.in_flight -= 1;
        self.ended += 1;
        if self.ended == self.settings.clients {
            self.ended = 0;
            self.round += 1;
            if self.round < self.settings.rounds {
                self.ready = (0..self.settings.clients).collect();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_starts_after_the_previous_one() {
        let settings =
            MultiTurnOptions { clients: 3, rounds: 2, in_flight: 2, ..MultiTurnOptions::default() };
        let workload = MultiTurnSender::workload(settings, 1);
        assert_eq!(workload.requests.len(), 6);
        let index = WorkloadIndex::new;
        assert_eq!(workload.blocks(index(0)), &workload.blocks(index(3))[..1]);
        let ArrivalMode::Closed(mut sender) = workload.source else { panic!("closed") };
        let first = sender.tick().request.expect("sends");
        let second = sender.tick().request.expect("sends");
        assert!(first != second && first < index(3) && second < index(3));
        assert_eq!(sender.tick(), SenderStep { request: None, pause_s: Some(FULL_PAUSE_S) });
        sender.release_in_flight();
        assert!(sender.tick().request.expect("the third") < index(3));
        sender.release_in_flight();
        assert_eq!(sender.tick().request, None);
        sender.release_in_flight();
        assert!(sender.tick().request.expect("the next round") >= index(3));
    }
}
