//! The engines as one state machine: operations for gateways, and handling of events.

use moongate_retention::ReturnHint;
use moongate_scheduler::InstanceIndex;

use super::caches::SimulatedCaches;
use super::decode::{DecodeEngine, DecodeSequence};
use super::event_queue::{SimulationEvent, SimulationEventQueue};
use super::fetch_queue::StartedFetch;
use super::indices::{AttemptIndex, DecodeIndex, PrefillIndex, WorkloadIndex};
use super::outcome::{SimulatedOutcome, SimulationResult};
use super::prefill::{
    ComputedPrompt, DelayedWork, PrefillContext, PrefillEngine, PrefillResult, PromptBlocks, SentPrompt,
};
use super::settings::SimulationOptions;
use super::workload::{ArrivalMode, SimulatedWorkload, WorkloadRequest};

/// The engines of an attempt. A plain worker has both roles.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SimulatedRoute {
    pub(crate) prefill: PrefillIndex,
    pub(crate) decode: DecodeIndex,
}

/// One attempt to serve a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SimulatedAttempt {
    pub(crate) request: WorkloadIndex,
    pub(crate) route: SimulatedRoute,
    pub(crate) computed: PrefillResult,
    /// Lost with an engine; its scheduled events are ignored.
    lost: bool,
}

/// Notifications from the engines about attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FleetNotification {
    /// An engine has computed the prompt. With a transfer to a decode, gateways do not observe this.
    Computed(AttemptIndex),
    /// The client has received its first token.
    FirstToken(AttemptIndex),
    Finished(AttemptIndex),
    /// An engine failed while it had the attempt.
    Lost {
        attempt: AttemptIndex,
        engine: InstanceIndex,
    },
    /// An engine has failed or recovered.
    AvailabilityChanged {
        engine: InstanceIndex,
        up: bool,
    },
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
    /// What each request's client says about the next request.
    hints: Vec<ReturnHint>,
    delayed: Vec<DelayedWork>,
    done: Vec<ComputedPrompt>,
    joined: Vec<AttemptIndex>,
}

impl<'a> SimulatedFleet<'a> {
    pub(crate) fn new(settings: &'a SimulationOptions, workload: &'a SimulatedWorkload, seed: u64) -> Self {
        let prefill = |number| {
            let slowdown =
                if number < settings.slow_engines.min(settings.prefill) { settings.slow_engine } else { 1.0 };
            PrefillEngine::new(PrefillIndex::new(number), slowdown)
        };
        let decodes = if settings.decode == 0 { settings.prefill } else { settings.decode };
        Self {
            settings,
            workload,
            events: SimulationEventQueue::default(),
            prefills: (0..settings.prompt_engines()).map(prefill).collect(),
            decodes: (0..decodes).map(|_| DecodeEngine::default()).collect(),
            caches: SimulatedCaches::new(settings, workload),
            attempts: Vec::with_capacity(workload.requests.len()),
            result: SimulationResult::new(settings, workload),
            source: workload.source.clone(),
            notifications: Vec::new(),
            hints: return_hints(workload, settings.return_hints, seed),
            noise: noise(workload.requests.len(), settings.noise_sigma, seed),
            delayed: Vec::new(),
            done: Vec::new(),
            joined: Vec::new(),
        }
    }

    /// Creates an attempt at a request. It has no effect until it is sent.
    pub(crate) fn attempt(&mut self, request: WorkloadIndex) -> AttemptIndex {
        let attempt = SimulatedAttempt {
            request,
            route: SimulatedRoute::default(),
            computed: PrefillResult::default(),
            lost: false,
        };
        self.attempts.push(attempt);
        AttemptIndex::new(self.attempts.len() - 1)
    }

    /// Sends an attempt to its engines.
    pub(crate) fn send(&mut self, now: f64, attempt: AttemptIndex, route: SimulatedRoute, priority: i64) {
        let record = &mut self.attempts[attempt.get()];
        record.route = route;
        let (request, prefill) = (record.request, route.prefill);
        if !self.prefills[prefill.get()].available {
            self.mark_lost(attempt, prefill.instance());
            return;
        }
        self.result.record_send(now, request, prefill);
        let sent = SentPrompt { attempt, priority, blocks: prompt(self.workload, &self.hints, request) };
        let context = PrefillContext { caches: &mut self.caches, settings: self.settings };
        self.prefills[prefill.get()].enqueue(now, sent, context, &mut self.delayed);
        self.start_pass(now, prefill);
    }

    /// Applies an event to the engines.
    pub(crate) fn handle_event(&mut self, now: f64, event: SimulationEvent) {
        match event {
            SimulationEvent::FetchEnded { engine, engine_epoch, fetch_epoch } => {
                if self.prefills[engine.get()].epoch == engine_epoch {
                    self.fetched(now, engine, fetch_epoch);
                }
            }
            SimulationEvent::StartPass(engine) => self.start_pass(now, engine),
            SimulationEvent::PassEnded { engine, engine_epoch } => {
                if self.prefills[engine.get()].epoch == engine_epoch {
                    self.finish_pass(now, engine);
                }
            }
            SimulationEvent::KvTransferred(attempt) => self.handed_over(now, attempt),
            SimulationEvent::SequenceEnded { engine, batch_epoch } => self.decoded(now, engine, batch_epoch),
            SimulationEvent::EngineFailed(engine) => self.fail_engine(now, engine),
            SimulationEvent::EngineRecovered(engine) => self.recover_engine(engine),
            SimulationEvent::RequestArrived(_)
            | SimulationEvent::TicketArrived(_)
            | SimulationEvent::Poll
            | SimulationEvent::SchedulerWakeup { .. }
            | SimulationEvent::SenderTick
            | SimulationEvent::BackgroundTick
            | SimulationEvent::InFlightSlotFreed => {}
        }
    }

    /// Ends a request. Requests that wait for its end arrive now, or when they are due.
    pub(crate) fn finish(&mut self, now: f64, request: WorkloadIndex, state: SimulatedOutcome) {
        self.result.record_end(now, request, state);
        if state == SimulatedOutcome::Served && self.hints[request.get()] != ReturnHint::Unknown {
            let arrived = self.result.records[request.get()].arrived_s;
            self.caches.report_prompt(now, arrived, &prompt(self.workload, &self.hints, request));
        }
        for &next in self.workload.successors(request) {
            let due = self.workload.request(next).due_s;
            self.events.schedule(due.max(now), SimulationEvent::RequestArrived(next));
        }
    }

    fn fetched(&mut self, now: f64, engine: PrefillIndex, epoch: u32) {
        let prefill = &mut self.prefills[engine.get()];
        if let Some(arrived) = prefill.fetched(now, epoch, self.settings, &mut self.delayed) {
            let request = self.attempts[arrived.attempt.get()].request;
            let blocks = self.workload.blocks(request);
            let (preceding, count) = (arrived.preceding_blocks as usize, arrived.blocks as usize);
            self.caches.insert_fetched(now, engine, &blocks[preceding..preceding + count]);
        }
        self.start_pass(now, engine);
    }

    /// Starts a pass if the engine is idle and a prompt is ready.
    fn start_pass(&mut self, now: f64, engine: PrefillIndex) {
        let prefill = &mut self.prefills[engine.get()];
        if prefill.idle() {
            while prefill.remaining_budget(self.settings) > 0 {
                let Some(next) = prefill.dequeue(now, self.settings, &mut self.delayed) else { break };
                let request = self.attempts[next.attempt().get()].request;
                let prompt = prompt(self.workload, &self.hints, request);
                if next.new > 0 {
                    let preceding = next.preceding_blocks() as usize;
                    self.caches.insert_fetched(
                        now,
                        engine,
                        &prompt.blocks[preceding..preceding + next.new as usize],
                    );
                }
                let context = PrefillContext { caches: &mut self.caches, settings: self.settings };
                prefill.admit(&next, prompt, self.noise[request.get()], context);
            }
            if let Some(pass) = prefill.start_pass(self.settings) {
                let engine_epoch = prefill.epoch;
                let seconds = match self.settings.computing_decode(engine) {
                    Some(decode) => {
                        let seconds = self.decodes[decode.get()].start_prompt(
                            now,
                            (pass.seconds, pass.chunks),
                            self.settings,
                        );
                        self.schedule_next_end(decode);
                        seconds
                    }
                    None => pass.seconds,
                };
                self.events.schedule(now + seconds, SimulationEvent::PassEnded { engine, engine_epoch });
            }
        }
        let engine_epoch = self.prefills[engine.get()].epoch;
        for later in self.delayed.drain(..) {
            let (time, event) = match later {
                DelayedWork::Fetched(StartedFetch { end, epoch: fetch_epoch }) => {
                    (end, SimulationEvent::FetchEnded { engine, engine_epoch, fetch_epoch })
                }
                DelayedWork::Begin(time) => (time, SimulationEvent::StartPass(engine)),
            };
            self.events.schedule(time, event);
        }
    }

    fn finish_pass(&mut self, now: f64, engine: PrefillIndex) {
        let mut done = std::mem::take(&mut self.done);
        self.prefills[engine.get()].finish_pass(&mut done);
        let computing_decode = self.settings.computing_decode(engine);
        if let Some(decode) = computing_decode {
            self.decodes[decode.get()].end_prompt(now, self.settings);
            self.schedule_next_end(decode);
        }
        for ComputedPrompt { attempt, result: computed } in done.drain(..) {
            let record = &mut self.attempts[attempt.get()];
            record.computed = computed;
            self.notifications.push(FleetNotification::Computed(attempt));
            let request = record.request;
            self.result.record_computed(now, request, computed.service_s);
            if computing_decode.is_none() {
                self.caches.insert_computed(now, engine, &prompt(self.workload, &self.hints, request));
            }
            if self.settings.decode == 0 {
                record.route.decode = DecodeIndex::new(engine.get());
            }
            if self.settings.decode == 0 || computing_decode.is_some() {
                self.handed_over(now, attempt);
            } else {
                let input = self.workload.request(request).input_tokens as usize;
                let new = input - computed.cached_tokens() as usize;
                let service = &self.settings.service;
                let time = now + service.transfer_s(service.last_transfer_tokens(input, new));
                self.events.schedule(time, SimulationEvent::KvTransferred(attempt));
            }
        }
        self.done = done;
        self.start_pass(now, engine);
    }

    fn handed_over(&mut self, now: f64, attempt: AttemptIndex) {
        let record = self.attempts[attempt.get()];
        if record.lost {
            return;
        }
        let decode = record.route.decode;
        if self.decodes[decode.get()].down {
            self.mark_lost(attempt, self.settings.decode_instance(decode));
            return;
        }
        let request = self.workload.request(record.request);
        self.decodes[decode.get()].add(DecodeSequence {
            attempt,
            tokens: u64::from(request.input_tokens) + u64::from(request.output_tokens),
            // The first token arrived with the prompt's KV cache.
            output_tokens: request.output_tokens.saturating_sub(1),
        });
        self.admit(now, decode);
    }

    fn admit(&mut self, now: f64, decode: DecodeIndex) {
        let engine = &mut self.decodes[decode.get()];
        engine.admit(now, self.settings, &mut self.joined);
        self.schedule_next_end(decode);
        for attempt in self.joined.drain(..) {
            let record = self.attempts[attempt.get()];
            self.result.record_first_token(now, record.request, &record.computed);
            self.notifications.push(FleetNotification::FirstToken(attempt));
            if let ArrivalMode::Closed(sender) = &mut self.source {
                let time = now + sender.lag_s(record.computed.service_s);
                self.events.schedule(time, SimulationEvent::InFlightSlotFreed);
            }
        }
    }

    fn decoded(&mut self, now: f64, decode: DecodeIndex, batch_epoch: u32) {
        let engine = &mut self.decodes[decode.get()];
        if engine.batch_epoch != batch_epoch || engine.down {
            return;
        }
        let mut done = Vec::new();
        engine.remove_finished(now, self.settings, &mut done);
        for attempt in done {
            self.notifications.push(FleetNotification::Finished(attempt));
            let request = self.attempts[attempt.get()].request;
            let instance = self.settings.decode_instance(decode);
            if self.settings.decode > 0
                && let Some(cache) = self.settings.prefill_engine(instance)
            {
                let prompt = prompt(self.workload, &self.hints, request);
                let free = self.decodes[decode.get()].free_tokens(self.settings);
                self.caches.insert_decoded(now, cache, &prompt, free);
            }
            self.finish(now, request, SimulatedOutcome::Served);
        }
        self.admit(now, decode);
    }

    fn schedule_next_end(&mut self, decode: DecodeIndex) {
        let engine = &self.decodes[decode.get()];
        if let Some(time) = engine.next_end(self.settings) {
            let batch_epoch = engine.batch_epoch;
            self.events.schedule(time, SimulationEvent::SequenceEnded { engine: decode, batch_epoch });
        }
    }

    fn mark_lost(&mut self, attempt: AttemptIndex, engine: InstanceIndex) {
        self.attempts[attempt.get()].lost = true;
        self.notifications.push(FleetNotification::Lost { attempt, engine });
    }

    fn fail_engine(&mut self, now: f64, engine: InstanceIndex) {
        let mut lost = Vec::new();
        if let Some(prefill) = self.settings.prefill_engine(engine) {
            self.caches.clear_engine(now, prefill);
            lost.extend(self.prefills[prefill.get()].fail());
        }
        if let Some(decode) = self.settings.decode_engine(engine) {
            lost.extend(self.decodes[decode.get()].fail());
        }
        self.notifications.push(FleetNotification::AvailabilityChanged { engine, up: false });
        for attempt in lost {
            self.mark_lost(attempt, engine);
        }
    }

    fn recover_engine(&mut self, engine: InstanceIndex) {
        if let Some(prefill) = self.settings.prefill_engine(engine) {
            self.prefills[prefill.get()].available = true;
        }
        if let Some(decode) = self.settings.decode_engine(engine) {
            self.decodes[decode.get()].down = false;
        }
        self.notifications.push(FleetNotification::AvailabilityChanged { engine, up: true });
    }
}

fn prompt<'w>(
    workload: &'w SimulatedWorkload,
    hints: &[ReturnHint],
    request: WorkloadIndex,
) -> PromptBlocks<'w> {
    PromptBlocks {
        blocks: workload.blocks(request),
        input_tokens: workload.request(request).input_tokens,
        block_tokens: workload.block_tokens,
        request: u32::try_from(request.get()).unwrap_or(u32::MAX),
        hint: hints[request.get()],
    }
}

/// For this share of the requests, whether their prompts will be used again.
pub(crate) fn return_hints(workload: &SimulatedWorkload, share: f64, seed: u64) -> Vec<ReturnHint> {
    let mut random = fastrand::Rng::with_seed(seed ^ 0x4157_0000);
    let hint = |request: &WorkloadRequest| match (random.f64() < share, request.returns) {
        (false, _) => ReturnHint::Unknown,
        (true, true) => ReturnHint::Expected,
        (true, false) => ReturnHint::Never,
    };
    workload.requests.iter().map(hint).collect()
}

/// Log-normal factors with mean one.
pub(crate) fn noise(requests: usize, sigma: f64, seed: u64) -> Vec<f64> {
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
