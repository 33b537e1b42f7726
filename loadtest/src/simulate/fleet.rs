//! The engines as one state machine: operations for gateways, and handling of events.

use super::caches::SimulatedCaches;
use super::decode::{DecodeEngine, DecodeSequence};
use super::event_queue::{SimulationEvent, SimulationEventQueue};
use super::outcome::{SimulatedOutcome, SimulationResult};
use super::prefill::{DelayedWork, PrefillEngine, PrefillResult, PromptBlocks};
use super::settings::SimulationOptions;
use super::workload::{ArrivalMode, SimulatedWorkload};

/// One attempt to serve a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SimulatedAttempt {
    pub(crate) request: u32,
    pub(crate) prefill: usize,
    pub(crate) decode: usize,
    pub(crate) computed: PrefillResult,
    /// Lost with an engine; its scheduled events are ignored.
    lost: bool,
}

/// Notifications from the engines about attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FleetNotification {
    /// An engine has computed the prompt. With a transfer to a decode, gateways do not observe this.
    Computed(u32),
    /// The client has received its first token.
    FirstToken(u32),
    Finished(u32),
    /// An engine failed while it had the attempt: attempt, engine as in [`EngineOutage`].
    Lost(u32, usize),
    /// An engine has failed or recovered: engine as in [`EngineOutage`], whether it is up.
    AvailabilityChanged(usize, bool),
}

/// Engines, caches, clock, and the recorded history.
#[derive(Debug)]
pub(crate) struct SimulatedFleet<'a> {
    pub(crate) settings: &'a SimulationOptions,
    pub(crate) workload: &'a SimulatedWorkload,
    pub(crate) events: SimulationEventQueue,
    pub(crate) prefills: Vec<PrefillEngine>,
    pub(crate) decodes: Vec<DecodeEngine>,
    pub(crate) caches: SimulatedCaches,
    pub(crate) attempts: Vec<SimulatedAttempt>,
    pub(crate) result: SimulationResult,
    pub(crate) source: ArrivalMode,
    /// Notifications not delivered to the router yet.
    pub(crate) notifications: Vec<FleetNotification>,
    /// Factor on each request's service time. The same for every policy.
    noise: Vec<f64>,
    delayed: Vec<DelayedWork>,
    done: Vec<(u32, PrefillResult)>,
    joined: Vec<u32>,
}

impl<'a> SimulatedFleet<'a> {
    pub(crate) fn new(settings: &'a SimulationOptions, workload: &'a SimulatedWorkload, seed: u64) -> Self {
        let slow = |number| if number == 0 { settings.slow_engine } else { 1.0 };
        let decodes = if settings.decode == 0 { settings.prefill } else { settings.decode };
        Self {
            settings,
            workload,
            events: SimulationEventQueue::default(),
            prefills: (0..settings.prefill).map(|number| PrefillEngine::new(number, slow(number))).collect(),
            decodes: (0..decodes).map(|_| DecodeEngine::default()).collect(),
            caches: SimulatedCaches::new(settings, workload.block_token_counts()),
            attempts: Vec::with_capacity(workload.requests.len()),
            result: SimulationResult::new(settings, workload),
            source: workload.source.clone(),
            notifications: Vec::new(),
            noise: noise(workload.requests.len(), settings.noise_sigma, seed),
            delayed: Vec::new(),
            done: Vec::new(),
            joined: Vec::new(),
        }
    }

    /// Creates an attempt at a request. It has no effect until it is sent.
    pub(crate) fn attempt(&mut self, request: u32) -> u32 {
        let attempt = SimulatedAttempt {
            request,
            prefill: 0,
            decode: 0,
            computed: PrefillResult::default(),
            lost: false,
        };
        self.attempts.push(attempt);
        u32::try_from(self.attempts.len() - 1).unwrap_or(u32::MAX)
    }

    /// Sends an attempt to its engines.
    pub(crate) fn send(&mut self, now: f64, attempt: u32, (prefill, decode): (usize, usize), priority: i64) {
        let record = &mut self.attempts[attempt as usize];
        (record.prefill, record.decode) = (prefill, decode);
        let request = record.request;
        if !self.prefills[prefill].available {
            self.mark_lost(attempt, prefill);
            return;
        }
        self.result.record_send(now, request, prefill);
        let prompt = prompt(self.workload, request);
        self.prefills[prefill].enqueue(
            now,
            (attempt, priority),
            prompt,
            &mut self.caches,
            self.settings,
            &mut self.delayed,
        );
        self.start_pass(now, prefill);
    }

    /// Applies an event to the engines.
    pub(crate) fn handle_event(&mut self, now: f64, event: SimulationEvent) {
        match event {
            SimulationEvent::FetchEnded(engine, epoch, engine_epoch) => {
                self.fetched(now, engine as usize, epoch, engine_epoch);
            }
            SimulationEvent::StartPass(engine) => self.start_pass(now, engine as usize),
            SimulationEvent::PassEnded(engine, engine_epoch) => {
                self.finish_pass(now, engine as usize, engine_epoch);
            }
            SimulationEvent::KvTransferred(attempt) => self.handed_over(now, attempt),
            SimulationEvent::SequenceEnded(engine, epoch) => self.decoded(now, engine as usize, epoch),
            SimulationEvent::EngineFailed(engine) => self.fail_engine(now, engine as usize),
            SimulationEvent::EngineRecovered(engine) => self.recover_engine(engine as usize),
            SimulationEvent::RequestArrived(_)
            | SimulationEvent::Poll
            | SimulationEvent::SchedulerWakeup(..)
            | SimulationEvent::SenderTick
            | SimulationEvent::InFlightSlotFreed(_) => {}
        }
    }

    /// Ends a request. Requests that wait for its end arrive now, or when they are due.
    pub(crate) fn finish(&mut self, now: f64, request: u32, state: SimulatedOutcome) {
        self.result.record_end(now, request, state);
        for &next in self.workload.successors(request) {
            let due = self.workload.requests[next as usize].due_s;
            self.events.schedule(due.max(now), SimulationEvent::RequestArrived(next));
        }
    }

    fn fetched(&mut self, now: f64, engine: usize, epoch: u32, engine_epoch: u32) {
        let prefill = &mut self.prefills[engine];
        if prefill.epoch != engine_epoch {
            return;
        }
        if let Some(arrived) = prefill.fetched(now, epoch, self.settings, &mut self.delayed) {
            let request = self.attempts[arrived.attempt as usize].request;
            let blocks = self.workload.blocks(request);
            let (preceding, count) = (arrived.preceding_blocks as usize, arrived.blocks as usize);
            self.caches.insert_fetched(now, engine, &blocks[preceding..preceding + count]);
        }
        self.start_pass(now, engine);
    }

    /// Starts a pass if the engine is idle and a prompt is ready.
    fn start_pass(&mut self, now: f64, engine: usize) {
        let prefill = &mut self.prefills[engine];
        if prefill.idle() {
            while prefill.remaining_budget(self.settings) > 0 {
                let Some(next) = prefill.dequeue(now, self.settings, &mut self.delayed) else { break };
                let request = self.attempts[next.attempt() as usize].request;
                let prompt = prompt(self.workload, request);
                if next.new > 0 {
                    let preceding = next.preceding_blocks() as usize;
                    self.caches.insert_fetched(
                        now,
                        engine,
                        &prompt.blocks[preceding..preceding + next.new as usize],
                    );
                }
                prefill.admit(&next, prompt, self.noise[request as usize], &mut self.caches, self.settings);
            }
            if let Some(seconds) = prefill.start_pass(self.settings) {
                let (engine, engine_epoch) = (number(engine), prefill.epoch);
                self.events.schedule(now + seconds, SimulationEvent::PassEnded(engine, engine_epoch));
            }
        }
        let engine_epoch = prefill.epoch;
        for later in self.delayed.drain(..) {
            let (time, event) = match later {
                DelayedWork::Fetched(time, epoch) => {
                    (time, SimulationEvent::FetchEnded(number(engine), epoch, engine_epoch))
                }
                DelayedWork::Begin(time) => (time, SimulationEvent::StartPass(number(engine))),
            };
            self.events.schedule(time, event);
        }
    }

    fn finish_pass(&mut self, now: f64, engine: usize, engine_epoch: u32) {
        if self.prefills[engine].epoch != engine_epoch {
            return;
        }
        let mut done = std::mem::take(&mut self.done);
        self.prefills[engine].finish_pass(&mut done);
        for (attempt, computed) in done.drain(..) {
            let record = &mut self.attempts[attempt as usize];
            record.computed = computed;
            self.notifications.push(FleetNotification::Computed(attempt));
            let request = record.request;
            self.caches.insert_computed(now, engine, self.workload.blocks(request));
            if self.settings.decode == 0 {
                self.attempts[attempt as usize].decode = engine;
                self.handed_over(now, attempt);
            } else {
                let input = self.workload.requests[request as usize].input_tokens as usize;
                let new = input - computed.cached_tokens() as usize;
                let service = &self.settings.service;
                let time = now + service.transfer_s(service.last_transfer_tokens(input, new));
                self.events.schedule(time, SimulationEvent::KvTransferred(attempt));
            }
        }
        self.done = done;
        self.start_pass(now, engine);
    }

    fn handed_over(&mut self, now: f64, attempt: u32) {
        let record = self.attempts[attempt as usize];
        if record.lost {
            return;
        }
        if self.decodes[record.decode].down {
            self.mark_lost(attempt, self.settings.prefill + record.decode);
            return;
        }
        let request = &self.workload.requests[record.request as usize];
        self.decodes[record.decode].add(DecodeSequence {
            attempt,
            tokens: u64::from(request.input_tokens) + u64::from(request.output_tokens),
            // The first token arrived with the prompt's KV cache.
            output_tokens: request.output_tokens.saturating_sub(1),
        });
        self.admit(now, record.decode);
    }

    fn admit(&mut self, now: f64, decode: usize) {
        let engine = &mut self.decodes[decode];
        engine.admit(now, self.settings, &mut self.joined);
        if let Some(time) = engine.next_end(self.settings) {
            self.events.schedule(time, SimulationEvent::SequenceEnded(number(decode), engine.batch_epoch));
        }
        for attempt in self.joined.drain(..) {
            let record = self.attempts[attempt as usize];
            self.result.record_first_token(now, record.request, &record.computed);
            self.notifications.push(FleetNotification::FirstToken(attempt));
            if let ArrivalMode::Closed(sender) = &mut self.source {
                let time = now + sender.lag_s(record.computed.service_s);
                self.events.schedule(time, SimulationEvent::InFlightSlotFreed(record.request));
            }
        }
    }

    fn decoded(&mut self, now: f64, decode: usize, epoch: u32) {
        let engine = &mut self.decodes[decode];
        if engine.batch_epoch != epoch || engine.down {
            return;
        }
        let mut done = Vec::new();
        engine.remove_finished(now, self.settings, &mut done);
        for attempt in done {
            self.notifications.push(FleetNotification::Finished(attempt));
            let request = self.attempts[attempt as usize].request;
            self.finish(now, request, SimulatedOutcome::Served);
        }
        self.admit(now, decode);
    }

    fn mark_lost(&mut self, attempt: u32, engine: usize) {
        self.attempts[attempt as usize].lost = true;
        self.notifications.push(FleetNotification::Lost(attempt, engine));
    }

    fn fail_engine(&mut self, now: f64, engine: usize) {
        let lost = if engine < self.settings.prefill {
            self.caches.clear_engine(now, engine);
            let lost = self.prefills[engine].fail();
            if self.settings.decode == 0 {
                lost.into_iter().chain(self.decodes[engine].fail()).collect()
            } else {
                lost
            }
        } else {
            self.decodes[engine - self.settings.prefill].fail()
        };
        self.notifications.push(FleetNotification::AvailabilityChanged(engine, false));
        for attempt in lost {
            self.mark_lost(attempt, engine);
        }
    }

    fn recover_engine(&mut self, engine: usize) {
        match engine.checked_sub(self.settings.prefill) {
            Some(decode) => self.decodes[decode].down = false,
            None => {
                self.prefills[engine].available = true;
                if self.settings.decode == 0 {
                    self.decodes[engine].down = false;
                }
            }
        }
        self.notifications.push(FleetNotification::AvailabilityChanged(engine, true));
    }
}

fn number(engine: usize) -> u32 {
    u32::try_from(engine).unwrap_or(u32::MAX)
}

fn prompt(workload: &SimulatedWorkload, request: u32) -> PromptBlocks<'_> {
    PromptBlocks {
        blocks: workload.blocks(request),
        input_tokens: workload.requests[request as usize].input_tokens,
        block_tokens: workload.block_tokens,
    }
}

/// Log-normal factors with mean one.
fn noise(requests: usize, sigma: f64, seed: u64) -> Vec<f64> {
    if sigma <= 0.0 {
        return vec![1.0; requests];
    }
    let mut random = fastrand::Rng::with_seed(seed ^ 0x6e01_5e00);
    let mut normal = || {
        let radius = (-2.0 * (1.0 - random.f64()).ln()).sqrt();
        radius * (std::f64::consts::TAU * random.f64()).cos()
    };
    (0..requests).map(|_| (sigma * normal() - sigma * sigma / 2.0).exp()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_leaves_the_mean_and_differs_by_seed() {
        let factors = noise(20_000, 0.3, 1);
        let count = factors.len() as f64;
        let mean = factors.iter().sum::<f64>() / count;
        let spread = (factors.iter().map(|factor| factor.ln().powi(2)).sum::<f64>() / count).sqrt();
        assert!((mean - 1.0).abs() < 0.01 && (0.28..0.33).contains(&spread), "{mean} {spread}");
        assert_ne!(noise(3, 0.3, 1), noise(3, 0.3, 2));
        assert_eq!(noise(3, 0.0, 1), [1.0; 3]);
    }
}
