//! A fleet whose replicas come and go: one queue in front of prefill engines, and decode engines with their batches.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use super::observation::IntervalMetrics;
use super::replica::{PromptEngine, ReplicaRole, ReplicaState, RoleFleet};
use super::workload::DayRequest;
use crate::simulate::decode::{DecodeEngine, DecodeSequence};
use crate::simulate::indices::AttemptIndex;
use crate::simulate::settings::SimulationOptions;

/// Engines and targets of a simulated day.
#[derive(Debug, Clone)]
pub(crate) struct ScalingOptions {
    /// Engines; their number and caches are not used.
    pub(crate) engines: SimulationOptions,
    /// From the creation of a replica until it is ready.
    pub(crate) start_s: f64,
    /// Prompt tokens after which a cache has 63 % of its usual hits.
    pub(crate) warm_tokens: f64,
    /// Seconds of an idle engine to change its role; `None` if it cannot.
    pub(crate) flip_s: Option<f64>,
    pub(crate) gpus_per_replica: u32,
    pub(crate) ttft_target_s: f64,
    pub(crate) tpot_target_s: f64,
    /// Share of the requests that must meet both.
    pub(crate) share: f64,
    pub(crate) day_s: f64,
}

/// Wanted replicas of both roles, and the changes of role among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct WantedReplicas {
    pub(crate) prefill: u32,
    pub(crate) decode: u32,
    pub(crate) prefill_to_decode: u32,
    pub(crate) decode_to_prefill: u32,
}

impl WantedReplicas {
    pub(crate) fn new(prefill: u32, decode: u32) -> Self {
        Self { prefill, decode, ..Self::default() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum FleetEvent {
    PromptComputed { replica: usize, request: usize },
    KvTransferred { request: usize },
    SequenceEnded { replica: usize, batch_epoch: u32 },
    ReplicaReady { role: ReplicaRole, replica: usize },
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct TimedEvent {
    at_s: f64,
    serial: u64,
    event: FleetEvent,
}

impl Eq for TimedEvent {}

impl Ord for TimedEvent {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at_s.total_cmp(&other.at_s).then(self.serial.cmp(&other.serial))
    }
}

impl PartialOrd for TimedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The state of the fleet and of its requests.
#[derive(Debug)]
pub(crate) struct ReplicaFleet<'a> {
    pub(crate) options: &'a ScalingOptions,
    requests: &'a [DayRequest],
    events: BinaryHeap<Reverse<TimedEvent>>,
    serial: u64,
    pub(crate) prefill: RoleFleet<PromptEngine>,
    pub(crate) decode: RoleFleet<DecodeEngine>,
    pub(crate) prefill_queue: VecDeque<usize>,
    decode_queue: VecDeque<usize>,
    /// For each request, when its first token was sent.
    first_token_s: Vec<f64>,
    pub(crate) metrics: IntervalMetrics,
    /// Seconds of all replicas until the end of the day.
    pub(crate) replica_s: f64,
    /// Requests that ended, and those that met the targets.
    pub(crate) ended: u64,
    pub(crate) within_ttft: u64,
    pub(crate) within_tpot: u64,
    pub(crate) within_both: u64,
    finished: Vec<AttemptIndex>,
}

impl<'a> ReplicaFleet<'a> {
    pub(crate) fn new(
        options: &'a ScalingOptions,
        requests: &'a [DayRequest],
        initial: WantedReplicas,
    ) -> Self {
        let mut fleet = Self {
            options,
            requests,
            events: BinaryHeap::new(),
            serial: 0,
            prefill: RoleFleet::default(),
            decode: RoleFleet::default(),
            prefill_queue: VecDeque::new(),
            decode_queue: VecDeque::new(),
            first_token_s: vec![f64::INFINITY; requests.len()],
            metrics: IntervalMetrics::default(),
            replica_s: 0.0,
            ended: 0,
            within_ttft: 0,
            within_tpot: 0,
            within_both: 0,
            finished: Vec::new(),
        };
        for _ in 0..initial.prefill {
            let position = fleet.prefill.create(0.0);
            fleet.prefill.replicas[position].state = ReplicaState::Ready;
        }
        for _ in 0..initial.decode {
            let position = fleet.decode.create(0.0);
            fleet.decode.replicas[position].state = ReplicaState::Ready;
        }
        fleet
    }

    pub(crate) fn next_event_s(&self) -> f64 {
        self.events.peek().map_or(f64::INFINITY, |Reverse(next)| next.at_s)
    }

    fn schedule(&mut self, at_s: f64, event: FleetEvent) {
        self.serial += 1;
        self.events.push(Reverse(TimedEvent { at_s, serial: self.serial, event }));
    }

    /// Integrates the metrics up to `now`.
    pub(crate) fn advance(&mut self, now: f64) {
        let step_s = self.metrics.advance(now, self.prefill_queue.len(), self.decode_queue.len());
        if now <= self.options.day_s {
            self.replica_s += step_s * (self.prefill.live.len() + self.decode.live.len()) as f64;
        }
    }

    pub(crate) fn on_arrival(&mut self, now: f64, request: usize) {
        self.advance(now);
        self.metrics.record_arrival(&self.requests[request]);
        self.prefill_queue.push_back(request);
        self.start_prompts(now);
    }

    /// Applies the next event.
    pub(crate) fn on_next_event(&mut self) {
        let Some(Reverse(TimedEvent { at_s: now, event, .. })) = self.events.pop() else { return };
        self.advance(now);
        match event {
            FleetEvent::PromptComputed { replica, request } => self.on_prompt_computed(now, replica, request),
            FleetEvent::KvTransferred { request } => self.on_kv_transferred(now, request),
            FleetEvent::SequenceEnded { replica, batch_epoch } => {
                if self.decode.replicas[replica].engine.batch_epoch == batch_epoch {
                    self.on_sequence_ended(now, replica);
                }
            }
            FleetEvent::ReplicaReady { role, replica } => self.on_ready(now, role, replica),
        }
    }

    /// Queued requests that have missed the target of the first token.
    pub(crate) fn overdue(&self, now: f64) -> f64 {
        let due_s = now - self.options.ttft_target_s;
        self.prefill_queue.partition_point(|&request| self.requests[request].at_s < due_s) as f64
    }

    fn start_prompts(&mut self, now: f64) {
        while !self.prefill_queue.is_empty() {
            let engines = &self.prefill.replicas;
            let Some(replica) = self.prefill.ready().find(|&position| !engines[position].engine.is_busy)
            else {
                return;
            };
            let Some(request) = self.prefill_queue.pop_front() else { return };
            self.start_prompt(now, replica, request);
        }
    }

    fn start_prompt(&mut self, now: f64, replica: usize, request: usize) {
        let DayRequest { input_tokens, cached_share, .. } = self.requests[request];
        let engine = &mut self.prefill.replicas[replica].engine;
        let warmth = 1.0 - (-engine.seen_tokens / self.options.warm_tokens.max(1.0)).exp();
        let input = f64::from(input_tokens);
        let cached = (input * f64::from(cached_share) * warmth).floor();
        engine.is_busy = true;
        engine.seen_tokens += input;
        engine.prompt_tokens += input;
        engine.cached_tokens += cached;
        let new = (input - cached) as usize;
        let service = &self.options.engines.service;
        let service_s = service.prefill_base_s + service.prefill_compute_s(new, cached as usize);
        self.metrics.record_prompt_start(new as f64, cached);
        self.schedule(now + service_s, FleetEvent::PromptComputed { replica, request });
    }

    fn on_prompt_computed(&mut self, now: f64, replica: usize, request: usize) {
        self.prefill.replicas[replica].engine.is_busy = false;
        self.metrics.prefill_busy.add(-1.0);
        let input_tokens = self.requests[request].input_tokens as usize;
        let service = &self.options.engines.service;
        let transfer_s = service.transfer_s(service.last_transfer_tokens(input_tokens, input_tokens));
        self.schedule(now + transfer_s, FleetEvent::KvTransferred { request });
        if let ReplicaState::Draining { flip_to } = self.prefill.replicas[replica].state {
            self.prefill.end(replica);
            self.continue_flip(now, ReplicaRole::Decode, flip_to);
        }
        self.start_prompts(now);
    }

    fn on_kv_transferred(&mut self, now: f64, request: usize) {
        if self.requests[request].output_tokens <= 1 {
            self.record_first_token(now, request);
            self.record_end(now, request);
            return;
        }
        self.decode_queue.push_back(request);
        self.start_sequences(now);
    }

    /// Assigns sequences to the ready engine with the smallest batch, as far as one has capacity.
    fn start_sequences(&mut self, now: f64) {
        while let Some(&request) = self.decode_queue.front() {
            let DayRequest { input_tokens, output_tokens, .. } = self.requests[request];
            let tokens = u64::from(input_tokens) + u64::from(output_tokens);
            let engines = &self.options.engines;
            let fits = |position: &usize| {
                let engine = &self.decode.replicas[*position].engine;
                let load = engine.load();
                load.running == 0
                    || (load.running < engines.max_running && engine.free_tokens(engines) >= tokens)
            };
            let smallest = |&position: &usize| self.decode.replicas[position].engine.load().running;
            let Some(replica) = self.decode.ready().filter(fits).min_by_key(smallest) else { return };
            self.decode_queue.pop_front();
            let engine = &mut self.decode.replicas[replica].engine;
            let attempt = AttemptIndex::new(request);
            engine.add(DecodeSequence { attempt, tokens, output_tokens: output_tokens - 1 });
            self.finished.clear();
            engine.admit(now, engines, &mut self.finished);
            self.metrics.decode_running.add(1.0);
            self.metrics.kv_tokens.add(tokens as f64);
            self.record_first_token(now, request);
            self.schedule_end(replica);
        }
    }

    fn schedule_end(&mut self, replica: usize) {
        let engine = &self.decode.replicas[replica].engine;
        let batch_epoch = engine.batch_epoch;
        if let Some(at_s) = engine.next_end(&self.options.engines) {
            self.schedule(at_s, FleetEvent::SequenceEnded { replica, batch_epoch });
        }
    }

    fn on_sequence_ended(&mut self, now: f64, replica: usize) {
        let mut finished = std::mem::take(&mut self.finished);
        finished.clear();
        self.decode.replicas[replica].engine.remove_finished(now, &self.options.engines, &mut finished);
        for attempt in &finished {
            let request = attempt.get();
            let DayRequest { input_tokens, output_tokens, .. } = self.requests[request];
            self.metrics.decode_running.add(-1.0);
            self.metrics.kv_tokens.add(-(f64::from(input_tokens) + f64::from(output_tokens)));
            self.record_end(now, request);
        }
        self.finished = finished;
        self.schedule_end(replica);
        self.end_if_drained(now, replica);
        self.start_sequences(now);
    }

    fn end_if_drained(&mut self, now: f64, replica: usize) {
        let Some(ReplicaState::Draining { flip_to }) = self.decode.replicas.get(replica).map(|one| one.state)
        else {
            return;
        };
        if self.decode.replicas[replica].engine.load().running == 0 {
            // Its tokens are counted before it is gone.
            self.metrics.generated += self.decode.replicas[replica].engine.generated;
            self.decode.replicas[replica].engine.generated = 0.0;
            self.decode.end(replica);
            self.continue_flip(now, ReplicaRole::Prefill, flip_to);
        }
    }

    fn continue_flip(&mut self, now: f64, role: ReplicaRole, flip_to: Option<usize>) {
        if let Some(replica) = flip_to {
            let flip_s = self.options.flip_s.unwrap_or(self.options.start_s);
            self.schedule(now + flip_s, FleetEvent::ReplicaReady { role, replica });
        }
    }

    fn on_ready(&mut self, now: f64, role: ReplicaRole, replica: usize) {
        let (state, ready_s) = match role {
            ReplicaRole::Prefill => {
                let replica = &mut self.prefill.replicas[replica];
                (&mut replica.state, &mut replica.ready_s)
            }
            ReplicaRole::Decode => {
                let replica = &mut self.decode.replicas[replica];
                (&mut replica.state, &mut replica.ready_s)
            }
        };
        // It may have been removed while it started.
        if *state == ReplicaState::Starting {
            (*state, *ready_s) = (ReplicaState::Ready, now);
            self.start_prompts(now);
            self.start_sequences(now);
        }
    }

    fn record_first_token(&mut self, now: f64, request: usize) {
        self.first_token_s[request] = now;
        let ttft_s = now - self.requests[request].at_s;
        self.metrics.record_first_token(ttft_s, self.options.ttft_target_s);
    }

    fn record_end(&mut self, now: f64, request: usize) {
        let DayRequest { at_s, output_tokens, .. } = self.requests[request];
        let first_s = self.first_token_s[request];
        let is_within_ttft = first_s - at_s <= self.options.ttft_target_s;
        let tpot_s = (now - first_s) / f64::from(output_tokens.saturating_sub(1).max(1));
        let is_within_tpot = tpot_s <= self.options.tpot_target_s;
        self.metrics.record_end(tpot_s, self.options.tpot_target_s, now - at_s, f64::from(output_tokens));
        self.ended += 1;
        self.within_ttft += u64::from(is_within_ttft);
        self.within_tpot += u64::from(is_within_tpot);
        self.within_both += u64::from(is_within_ttft && is_within_tpot);
    }

    /// Creates, removes and flips replicas until as many as wanted are ready or starting.
    pub(crate) fn apply(&mut self, now: f64, wanted: WantedReplicas) {
        for _ in 0..wanted.prefill_to_decode {
            if let Some(replica) = self.prefill.next_removed() {
                let created = self.decode.create(now);
                self.remove_prefill(now, replica, Some(created));
            }
        }
        for _ in 0..wanted.decode_to_prefill {
            if let Some(replica) = self.decode.next_removed() {
                let created = self.prefill.create(now);
                self.remove_decode(now, replica, Some(created));
            }
        }
        while self.prefill.current() > wanted.prefill as usize {
            let Some(replica) = self.prefill.next_removed() else { break };
            self.remove_prefill(now, replica, None);
        }
        while self.decode.current() > wanted.decode as usize {
            let Some(replica) = self.decode.next_removed() else { break };
            self.remove_decode(now, replica, None);
        }
        let ready_s = now + self.options.start_s;
        while self.prefill.current() < wanted.prefill as usize {
            let replica = self.prefill.create(now);
            self.schedule(ready_s, FleetEvent::ReplicaReady { role: ReplicaRole::Prefill, replica });
        }
        while self.decode.current() < wanted.decode as usize {
            let replica = self.decode.create(now);
            self.schedule(ready_s, FleetEvent::ReplicaReady { role: ReplicaRole::Decode, replica });
        }
    }

    fn remove_prefill(&mut self, now: f64, replica: usize, flip_to: Option<usize>) {
        if self.prefill.replicas[replica].engine.is_busy {
            self.prefill.replicas[replica].state = ReplicaState::Draining { flip_to };
        } else {
            self.prefill.end(replica);
            self.continue_flip(now, ReplicaRole::Decode, flip_to);
        }
    }

    fn remove_decode(&mut self, now: f64, replica: usize, flip_to: Option<usize>) {
        self.decode.replicas[replica].state = ReplicaState::Draining { flip_to };
        self.end_if_drained(now, replica);
    }
}
