//! Who decides without a scheduler: the one engine of the calibration, and the bound that no scheduler reaches, one
//! queue before engines that share a cache without bounds.

use super::fleet::{Fleet, Notice};
use super::run::Control;

/// Everything goes to the first engine.
#[derive(Debug, Default)]
pub(crate) struct OneEngine;

impl Control for OneEngine {
    fn arrive(&mut self, now: f64, request: u32, fleet: &mut Fleet<'_>) {
        let attempt = fleet.attempt(request);
        fleet.send(now, attempt, (0, 0), 0);
    }

    fn notice(&mut self, _: f64, _: Notice, _: &mut Fleet<'_>) {}
    fn settle(&mut self, _: f64, _: &mut Fleet<'_>) {}
    fn poll(&mut self, _: f64, _: &mut Fleet<'_>) {}
    fn wake(&mut self, _: f64, _: usize, _: u32, _: &mut Fleet<'_>) {}
}

/// In which order the ideal's queue is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdealOrder {
    /// First come, first served.
    Fcfs,
    /// The shortest computation first.
    Shortest,
}

/// One queue before all engines. An engine gets its next request when it is idle, without any delay.
#[derive(Debug)]
pub(crate) struct Ideal {
    order: IdealOrder,
    held: Vec<u32>,
    /// Requests sent, for turns among the decode engines.
    sent: usize,
}

impl Ideal {
    pub(crate) fn new(order: IdealOrder) -> Self {
        Self { order, held: Vec::new(), sent: 0 }
    }

    fn release(&mut self, now: f64, fleet: &mut Fleet<'_>) {
        while !self.held.is_empty() {
            let idle = (0..fleet.prefills.len()).find(|&engine| {
                let prefill = &fleet.prefills[engine];
                prefill.idle() && prefill.counts() == (0, 0)
            });
            let Some(engine) = idle else { return };
            let next = match self.order {
                IdealOrder::Fcfs => 0,
                IdealOrder::Shortest => {
                    let times = self.held.iter().map(|&request| service_s(request, fleet));
                    times.enumerate().min_by(|left, right| left.1.total_cmp(&right.1)).map_or(0, |(at, _)| at)
                }
            };
            let attempt = fleet.attempt(self.held.remove(next));
            let decode = self.sent % fleet.decodes.len();
            self.sent += 1;
            fleet.send(now, attempt, (engine, decode), 0);
        }
    }
}

fn service_s(request: u32, fleet: &Fleet<'_>) -> f64 {
    let blocks = fleet.workload.blocks(request);
    let (_, own) = fleet.memory.own(0, blocks);
    let input = fleet.workload.requests[request as usize].input_tokens as usize;
    let cached = (own * fleet.workload.block_tokens as usize).min(input.saturating_sub(1));
    fleet.settings.service.prefill_compute_s(input - cached, cached)
}

impl Control for Ideal {
    fn arrive(&mut self, now: f64, request: u32, fleet: &mut Fleet<'_>) {
        self.held.push(request);
        self.release(now, fleet);
    }

    fn notice(&mut self, _: f64, _: Notice, _: &mut Fleet<'_>) {}

    fn settle(&mut self, now: f64, fleet: &mut Fleet<'_>) {
        self.release(now, fleet);
    }

    fn poll(&mut self, now: f64, fleet: &mut Fleet<'_>) {
        self.release(now, fleet);
    }

    fn wake(&mut self, _: f64, _: usize, _: u32, _: &mut Fleet<'_>) {}
}
