//! Routing without a scheduler: the single engine of the calibration, and one queue in front of engines that share an
//! unbounded cache. Shortest first is not the best order for every trace, so with long prompts and a large store a
//! policy can be faster.

use super::fleet::{FleetNotification, SimulatedFleet, SimulatedRoute};
use super::indices::{DecodeIndex, GatewayIndex, PrefillIndex, WorkloadIndex};
use super::outcome::SimulatedOutcome;
use super::prefill::PromptCounts;
use super::run::RequestRouter;

/// Sends everything to the first engine.
#[derive(Debug, Default)]
pub(crate) struct SingleEngineRouter;

impl RequestRouter for SingleEngineRouter {
    fn on_arrival(&mut self, now: f64, request: WorkloadIndex, fleet: &mut SimulatedFleet<'_>) {
        let attempt = fleet.attempt(request);
        fleet.send(now, attempt, SimulatedRoute::default(), 0);
    }

    fn on_notification(&mut self, _: f64, _: FleetNotification, _: &mut SimulatedFleet<'_>) {}
    fn after_notifications(&mut self, _: f64, _: &mut SimulatedFleet<'_>) {}
    fn on_load_poll(&mut self, _: f64, _: &mut SimulatedFleet<'_>) {}
    fn on_wakeup(&mut self, _: f64, _: GatewayIndex, _: u32, _: &mut SimulatedFleet<'_>) {}
}

/// Order of the ideal queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdealOrder {
    /// First come, first served.
    Fcfs,
    /// Shortest computation first.
    Shortest,
    /// The smallest sum of arrival time and this many times the computation first.
    Aged(u32),
}

impl IdealOrder {
    /// With ageing as in `predictive`.
    pub(crate) const AGED: Self = Self::Aged(20);

    /// All orders that are compared, except shortest first.
    pub(crate) const OTHERS: [Self; 4] = [Self::Fcfs, Self::Aged(5), Self::AGED, Self::Aged(80)];
}

/// One queue for all engines. An engine gets its next request when it becomes idle, without any delay.
#[derive(Debug)]
pub(crate) struct IdealRouter {
    order: IdealOrder,
    queue: Vec<WorkloadIndex>,
    /// Number of requests sent, for rotation over the decode engines.
    sent: usize,
}

impl IdealRouter {
    pub(crate) fn new(order: IdealOrder) -> Self {
        Self { order, queue: Vec::new(), sent: 0 }
    }

    /// Position of the queued request with the smallest rank.
    fn first_by(&self, rank: impl Fn(WorkloadIndex) -> f64) -> usize {
        let ranks = self.queue.iter().map(|&request| rank(request)).enumerate();
        ranks.min_by(|left, right| left.1.total_cmp(&right.1)).map_or(0, |(index, _)| index)
    }

    fn dispatch_queued(&mut self, now: f64, fleet: &mut SimulatedFleet<'_>) {
        while !self.queue.is_empty() {
            let idle = (0..fleet.settings.prefill).find(|&engine| {
                let prefill = &fleet.prefills[engine];
                prefill.available
                    && prefill.idle()
                    && prefill.counts() == PromptCounts { running: 0, waiting: 0 }
            });
            let Some(engine) = idle else { return };
            let next = match self.order {
                IdealOrder::Fcfs => 0,
                IdealOrder::Shortest => self.first_by(|request| service_s(request, fleet)),
                IdealOrder::Aged(factor) => self.first_by(|request| {
                    let arrived_s = fleet.result.records[request.get()].arrived_s;
                    arrived_s + f64::from(factor) * service_s(request, fleet)
                }),
            };
            let attempt = fleet.attempt(self.queue.remove(next));
            let route = SimulatedRoute {
                prefill: PrefillIndex::new(engine),
                decode: DecodeIndex::new(self.sent % fleet.decodes.len()),
            };
            self.sent += 1;
            fleet.send(now, attempt, route, 0);
        }
    }
}

fn service_s(request: WorkloadIndex, fleet: &SimulatedFleet<'_>) -> f64 {
    let blocks = fleet.workload.blocks(request);
    let own = fleet.caches.local_prefix(PrefillIndex::default(), blocks).all;
    let input = fleet.workload.request(request).input_tokens as usize;
    let cached = (own * fleet.workload.block_tokens as usize).min(input.saturating_sub(1));
    fleet.settings.service.prefill_compute_s(input - cached, cached)
}

impl RequestRouter for IdealRouter {
    fn on_arrival(&mut self, now: f64, request: WorkloadIndex, fleet: &mut SimulatedFleet<'_>) {
        self.queue.push(request);
        self.dispatch_queued(now, fleet);
    }

    fn on_notification(&mut self, now: f64, notice: FleetNotification, fleet: &mut SimulatedFleet<'_>) {
        let FleetNotification::Lost { attempt, .. } = notice else { return };
        let request = fleet.attempts[attempt.get()].request;
        if fleet.result.records[request.get()].first_token_s.is_nan() {
            self.queue.push(request);
        } else {
            fleet.finish(now, request, SimulatedOutcome::Failed);
        }
    }

    fn after_notifications(&mut self, now: f64, fleet: &mut SimulatedFleet<'_>) {
        self.dispatch_queued(now, fleet);
    }

    fn on_load_poll(&mut self, now: f64, fleet: &mut SimulatedFleet<'_>) {
        self.dispatch_queued(now, fleet);
    }

    fn on_wakeup(&mut self, _: f64, _: GatewayIndex, _: u32, _: &mut SimulatedFleet<'_>) {}
}
