//! The engines as one machine: what a gateway can ask of them, and what happens then.

use super::clock::{Calendar, Event};
use super::decode::{DecodeEngine, Sequence};
use super::memory::Memory;
use super::outcome::{Outcome, State};
use super::prefill::{Computed, Later, PrefillEngine, Prompt};
use super::settings::Settings;
use super::workload::{Source, Workload};

/// One try to serve a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt {
    pub(crate) request: u32,
    pub(crate) prefill: usize,
    pub(crate) decode: usize,
    pub(crate) computed: Computed,
    /// Lost with an engine; what is still planned for it does not happen.
    dead: bool,
}

/// What the engines tell of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    /// An engine has computed its prompt. A gateway does not see this where the KV cache is handed over.
    Computed(u32),
    /// The client has its first token.
    FirstToken(u32),
    /// The answer is complete.
    Ended(u32),
    /// An engine died with it: attempt, engine as in `Failure`.
    Lost(u32, usize),
    /// An engine has died or is back: engine as in `Failure`, whether it is up.
    Turned(usize, bool),
}

/// Engines, caches, clock, and the record of what happened.
#[derive(Debug)]
pub(crate) struct Fleet<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) workload: &'a Workload,
    pub(crate) calendar: Calendar,
    pub(crate) prefills: Vec<PrefillEngine>,
    pub(crate) decodes: Vec<DecodeEngine>,
    pub(crate) memory: Memory,
    pub(crate) attempts: Vec<Attempt>,
    pub(crate) outcome: Outcome,
    pub(crate) source: Source,
    /// What the controlling side has not heard of yet.
    pub(crate) notices: Vec<Notice>,
    /// Factor on each request's service time. The same for every policy.
    noise: Vec<f64>,
    later: Vec<Later>,
    done: Vec<(u32, Computed)>,
    joined: Vec<u32>,
}

impl<'a> Fleet<'a> {
    pub(crate) fn new(settings: &'a Settings, workload: &'a Workload, seed: u64) -> Self {
        let slow = |number| if number == 0 { settings.slow_engine } else { 1.0 };
        let decodes = if settings.decode == 0 { settings.prefill } else { settings.decode };
        Self {
            settings,
            workload,
            calendar: Calendar::default(),
            prefills: (0..settings.prefill).map(|number| PrefillEngine::new(number, slow(number))).collect(),
            decodes: (0..decodes).map(|_| DecodeEngine::default()).collect(),
            memory: Memory::new(settings, workload.tokens_of()),
            attempts: Vec::with_capacity(workload.requests.len()),
            outcome: Outcome::new(settings, workload),
            source: workload.source.clone(),
            notices: Vec::new(),
            noise: noise(workload.requests.len(), settings.noise_sigma, seed),
            later: Vec::new(),
            done: Vec::new(),
            joined: Vec::new(),
        }
    }

    /// A new attempt at a request. It does nothing until it is sent.
    pub(crate) fn attempt(&mut self, request: u32) -> u32 {
        let attempt = Attempt { request, prefill: 0, decode: 0, computed: Computed::default(), dead: false };
        self.attempts.push(attempt);
        u32::try_from(self.attempts.len() - 1).unwrap_or(u32::MAX)
    }

    /// Sends an attempt to its engines.
    pub(crate) fn send(&mut self, now: f64, attempt: u32, (prefill, decode): (usize, usize), priority: i64) {
        let record = &mut self.attempts[attempt as usize];
        (record.prefill, record.decode) = (prefill, decode);
        let request = record.request;
        if !self.prefills[prefill].up {
            self.lose(attempt, prefill);
            return;
        }
        self.outcome.sent(now, request, prefill);
        let prompt = prompt(self.workload, request);
        self.prefills[prefill].enqueue(
            now,
            (attempt, priority),
            prompt,
            &mut self.memory,
            self.settings,
            &mut self.later,
        );
        self.begin(now, prefill);
    }

    /// What an event does to the engines.
    pub(crate) fn happen(&mut self, now: f64, event: Event) {
        match event {
            Event::Fetched(engine, turn, life) => self.fetched(now, engine as usize, turn, life),
            Event::Begin(engine) => self.begin(now, engine as usize),
            Event::Passed(engine, life) => self.passed(now, engine as usize, life),
            Event::HandedOver(attempt) => self.handed_over(now, attempt),
            Event::Decoded(engine, turn) => self.decoded(now, engine as usize, turn),
            Event::Die(engine) => self.die(now, engine as usize),
            Event::Return(engine) => self.come_back(engine as usize),
            Event::Arrive(_) | Event::Poll | Event::Wake(..) | Event::Tick | Event::Freed(_) => {}
        }
    }

    /// A request is over. Whoever waits for its end comes now, or when it is due.
    pub(crate) fn finish(&mut self, now: f64, request: u32, state: State) {
        self.outcome.finished(now, request, state);
        for &next in self.workload.successors(request) {
            let due = self.workload.requests[next as usize].due_s;
            self.calendar.plan(due.max(now), Event::Arrive(next));
        }
    }

    fn fetched(&mut self, now: f64, engine: usize, turn: u32, life: u32) {
        let prefill = &mut self.prefills[engine];
        if prefill.life != life {
            return;
        }
        if let Some(arrived) = prefill.fetched(now, turn, self.settings, &mut self.later) {
            let request = self.attempts[arrived.attempt as usize].request;
            let blocks = self.workload.blocks(request);
            let (behind, count) = (arrived.behind as usize, arrived.blocks as usize);
            self.memory.fetched(now, engine, &blocks[behind..behind + count]);
        }
        self.begin(now, engine);
    }

    /// Begins a pass if the engine is idle and somebody's turn has come.
    fn begin(&mut self, now: f64, engine: usize) {
        let prefill = &mut self.prefills[engine];
        if prefill.idle() {
            while prefill.room(self.settings) > 0 {
                let Some(next) = prefill.next(now, self.settings, &mut self.later) else { break };
                let request = self.attempts[next.attempt() as usize].request;
                let prompt = prompt(self.workload, request);
                if next.new > 0 {
                    let behind = next.behind() as usize;
                    self.memory.fetched(now, engine, &prompt.blocks[behind..behind + next.new as usize]);
                }
                prefill.admit(&next, prompt, self.noise[request as usize], &mut self.memory, self.settings);
            }
            if let Some(seconds) = prefill.pass(self.settings) {
                let (engine, life) = (number(engine), prefill.life);
                self.calendar.plan(now + seconds, Event::Passed(engine, life));
            }
        }
        let life = prefill.life;
        for later in self.later.drain(..) {
            let (at, event) = match later {
                Later::Fetched(at, turn) => (at, Event::Fetched(number(engine), turn, life)),
                Later::Begin(at) => (at, Event::Begin(number(engine))),
            };
            self.calendar.plan(at, event);
        }
    }

    fn passed(&mut self, now: f64, engine: usize, life: u32) {
        if self.prefills[engine].life != life {
            return;
        }
        let mut done = std::mem::take(&mut self.done);
        self.prefills[engine].passed(&mut done);
        for (attempt, computed) in done.drain(..) {
            let record = &mut self.attempts[attempt as usize];
            record.computed = computed;
            self.notices.push(Notice::Computed(attempt));
            let request = record.request;
            self.memory.computed(now, engine, self.workload.blocks(request));
            if self.settings.decode == 0 {
                self.attempts[attempt as usize].decode = engine;
                self.handed_over(now, attempt);
            } else {
                let input = self.workload.requests[request as usize].input_tokens as usize;
                let new = input - computed.cached_tokens() as usize;
                let service = &self.settings.service;
                let at = now + service.transfer_s(service.last_handed_over(input, new));
                self.calendar.plan(at, Event::HandedOver(attempt));
            }
        }
        self.done = done;
        self.begin(now, engine);
    }

    fn handed_over(&mut self, now: f64, attempt: u32) {
        let record = self.attempts[attempt as usize];
        if record.dead {
            return;
        }
        if self.decodes[record.decode].down {
            self.lose(attempt, self.settings.prefill + record.decode);
            return;
        }
        let request = &self.workload.requests[record.request as usize];
        self.decodes[record.decode].add(Sequence {
            attempt,
            tokens: u64::from(request.input_tokens) + u64::from(request.output_tokens),
            // The first token came with the prompt's KV cache.
            output_tokens: request.output_tokens.saturating_sub(1),
        });
        self.admit(now, record.decode);
    }

    fn admit(&mut self, now: f64, decode: usize) {
        let engine = &mut self.decodes[decode];
        engine.admit(now, self.settings, &mut self.joined);
        if let Some(at) = engine.next_end(self.settings) {
            self.calendar.plan(at, Event::Decoded(number(decode), engine.turn));
        }
        for attempt in self.joined.drain(..) {
            let record = self.attempts[attempt as usize];
            self.outcome.first_token(now, record.request, &record.computed);
            self.notices.push(Notice::FirstToken(attempt));
            if let Source::Closed(sender) = &mut self.source {
                let at = now + sender.lag_s(record.computed.service_s);
                self.calendar.plan(at, Event::Freed(record.request));
            }
        }
    }

    fn decoded(&mut self, now: f64, decode: usize, turn: u32) {
        let engine = &mut self.decodes[decode];
        if engine.turn != turn || engine.down {
            return;
        }
        let mut done = Vec::new();
        engine.ended(now, self.settings, &mut done);
        for attempt in done {
            self.notices.push(Notice::Ended(attempt));
            let request = self.attempts[attempt as usize].request;
            self.finish(now, request, State::Served);
        }
        self.admit(now, decode);
    }

    fn lose(&mut self, attempt: u32, engine: usize) {
        self.attempts[attempt as usize].dead = true;
        self.notices.push(Notice::Lost(attempt, engine));
    }

    fn die(&mut self, now: f64, engine: usize) {
        let lost = if engine < self.settings.prefill {
            self.memory.lost(now, engine);
            let lost = self.prefills[engine].die();
            if self.settings.decode == 0 {
                lost.into_iter().chain(self.decodes[engine].die()).collect()
            } else {
                lost
            }
        } else {
            self.decodes[engine - self.settings.prefill].die()
        };
        self.notices.push(Notice::Turned(engine, false));
        for attempt in lost {
            self.lose(attempt, engine);
        }
    }

    fn come_back(&mut self, engine: usize) {
        match engine.checked_sub(self.settings.prefill) {
            Some(decode) => self.decodes[decode].down = false,
            None => {
                self.prefills[engine].up = true;
                if self.settings.decode == 0 {
                    self.decodes[engine].down = false;
                }
            }
        }
        self.notices.push(Notice::Turned(engine, true));
    }
}

fn number(engine: usize) -> u32 {
    u32::try_from(engine).unwrap_or(u32::MAX)
}

fn prompt(workload: &Workload, request: u32) -> Prompt<'_> {
    Prompt {
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
