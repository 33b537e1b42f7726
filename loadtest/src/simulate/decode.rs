//! A decode engine: a batch that generates in lockstep, and a queue for sequences that do not fit.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::indices::AttemptIndex;
use super::settings::SimulationOptions;

#[derive(Debug, Clone, Copy)]
pub(crate) struct DecodeSequence {
    pub(crate) attempt: AttemptIndex,
    /// Tokens that it occupies when it is complete.
    pub(crate) tokens: u64,
    pub(crate) output_tokens: u32,
}

/// A sequence of the batch. The first one to end is the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct BatchedSequence {
    /// Step after which it ends.
    last_step: u64,
    attempt: AttemptIndex,
    tokens: u64,
}

/// Load of a decode engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DecodeLoad {
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    /// Tokens of the running sequences.
    pub(crate) tokens: u64,
}

/// All sequences of the batch generate one token per step; a step takes longer the more there are.
#[derive(Debug, Default)]
pub(crate) struct DecodeEngine {
    /// Received, but without capacity yet.
    waiting: VecDeque<DecodeSequence>,
    /// Ordered by the step after which they end.
    batch: BinaryHeap<Reverse<BatchedSequence>>,
    used_tokens: u64,
    /// Steps done up to `since`, including the fraction of the current one.
    steps: f64,
    since: f64,
    /// Tokens generated up to `since`.
    pub(crate) generated: f64,
    /// Seconds per step while a prompt is computed between the steps.
    step_beside_prompt_s: Option<f64>,
    /// Incremented whenever the batch changes, so that outdated end events are ignored.
    pub(crate) batch_epoch: u32,
    pub(crate) down: bool,
}

impl DecodeEngine {
    /// Seconds per step now.
    fn step_s(&self, settings: &SimulationOptions) -> f64 {
        self.step_beside_prompt_s.unwrap_or_else(|| self.undisturbed_step_s(settings))
    }

    fn undisturbed_step_s(&self, settings: &SimulationOptions) -> f64 {
        settings.service.decode_step_s(self.batch.len() as u64, self.used_tokens)
    }

    /// Starts to compute a prompt in this many passes, each of which is also a step of the batch. Returns the duration,
    /// which is longer than that of the prompt alone.
    pub(crate) fn start_prompt(
        &mut self,
        now: f64,
        (seconds, passes): (f64, f64),
        settings: &SimulationOptions,
    ) -> f64 {
        self.advance(now, settings);
        let step_s = if self.batch.is_empty() { 0.0 } else { self.undisturbed_step_s(settings) };
        let duration = seconds + passes * step_s;
        self.step_beside_prompt_s = Some(duration / passes);
        self.batch_epoch += 1;
        duration
    }

    pub(crate) fn end_prompt(&mut self, now: f64, settings: &SimulationOptions) {
        self.advance(now, settings);
        self.step_beside_prompt_s = None;
        self.batch_epoch += 1;
    }

    /// Tokens of the KV cache that no sequence occupies.
    pub(crate) fn free_tokens(&self, settings: &SimulationOptions) -> u64 {
        settings.decode_tokens.saturating_sub(self.used_tokens)
    }

    /// Counts the steps up to `now`.
    pub(crate) fn advance(&mut self, now: f64, settings: &SimulationOptions) {
        if !self.batch.is_empty() {
            let steps = (now - self.since) / self.step_s(settings);
            self.steps += steps;
            self.generated += steps * self.batch.len() as f64;
        }
        self.since = now;
    }

    pub(crate) fn load(&self) -> DecodeLoad {
        DecodeLoad { running: self.batch.len(), waiting: self.waiting.len(), tokens: self.used_tokens }
    }

    pub(crate) fn add(&mut self, sequence: DecodeSequence) {
        self.waiting.push_back(sequence);
    }

    /// Starts waiting sequences as far as there is capacity, and appends them to `joined`.
    pub(crate) fn admit(&mut self, now: f64, settings: &SimulationOptions, joined: &mut Vec<AttemptIndex>) {
        while let Some(&next) = self.waiting.front() {
            let full = self.batch.len() >= settings.max_running
                || self.used_tokens + next.tokens > settings.decode_tokens;
            // A sequence larger than the engine runs alone.
            if full && !self.batch.is_empty() {
                return;
            }
            self.waiting.pop_front();
            self.advance(now, settings);
            self.used_tokens += next.tokens;
            let last_step = self.steps.ceil() as u64 + u64::from(next.output_tokens);
            let DecodeSequence { attempt, tokens, .. } = next;
            self.batch.push(Reverse(BatchedSequence { last_step, attempt, tokens }));
            self.batch_epoch += 1;
            joined.push(next.attempt);
        }
    }

    /// Time at which the next sequence ends.
    pub(crate) fn next_end(&self, settings: &SimulationOptions) -> Option<f64> {
        let &Reverse(BatchedSequence { last_step, .. }) = self.batch.peek()?;
        Some(self.since + f64::max(0.0, last_step as f64 - self.steps) * self.step_s(settings))
    }

    /// Removes the sequences that have ended and appends them to `done`.
    pub(crate) fn remove_finished(
        &mut self,
        now: f64,
        settings: &SimulationOptions,
        done: &mut Vec<AttemptIndex>,
    ) {
        self.advance(now, settings);
        while let Some(&Reverse(BatchedSequence { last_step, attempt, tokens })) = self.batch.peek() {
            // Half a step of tolerance for the rounding of times.
            if (last_step as f64) > self.steps + 0.5 {
                break;
            }
            self.batch.pop();
            self.used_tokens -= tokens;
            self.batch_epoch += 1;
            done.push(attempt);
        }
    }

    /// Fails the engine. Returns the attempts whose sequences are lost.
    pub(crate) fn fail(&mut self) -> Vec<AttemptIndex> {
        self.down = true;
        self.batch_epoch += 1;
        self.used_tokens = 0;
        self.step_beside_prompt_s = None;
        let batch = self.batch.drain().map(|Reverse(sequence)| sequence.attempt);
        let mut lost: Vec<AttemptIndex> =
            batch.chain(self.waiting.drain(..).map(|sequence| sequence.attempt)).collect();
        lost.sort_unstable();
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(number: usize, output_tokens: u32) -> DecodeSequence {
        DecodeSequence { attempt: AttemptIndex::new(number), tokens: 1_000, output_tokens }
    }

    fn attempts<const N: usize>(numbers: [usize; N]) -> Vec<AttemptIndex> {
        numbers.map(AttemptIndex::new).into()
    }

    fn load(running: usize, waiting: usize, tokens: u64) -> DecodeLoad {
        DecodeLoad { running, waiting, tokens }
    }

    #[test]
    fn a_batch_generates_in_step_and_slows_down_with_its_size() {
        let settings = SimulationOptions::eight_plus_four();
        let mut engine = DecodeEngine::default();
        let (mut joined, mut done) = (Vec::new(), Vec::new());
        engine.add(sequence(1, 10));
        engine.admit(0.0, &settings, &mut joined);
        let alone = engine.next_end(&settings).expect("runs");
        assert!((alone - 10.0 * settings.service.decode_step_s(1, 1_000)).abs() < 1e-9);
        engine.add(sequence(2, 100));
        engine.admit(0.0, &settings, &mut joined);
        let both = engine.next_end(&settings).expect("runs");
        assert!((both - 10.0 * settings.service.decode_step_s(2, 2_000)).abs() < 1e-9);
        engine.remove_finished(both, &settings, &mut done);
        assert_eq!((joined, done, engine.load()), (attempts([1, 2]), attempts([1]), load(1, 0, 1_000)));
        assert!(engine.next_end(&settings).expect("runs") > both);
    }

    #[test]
    fn sequences_wait_for_a_prompt_but_get_a_token_with_each_pass() {
        let settings = SimulationOptions::eight_plus_four();
        let mut engine = DecodeEngine::default();
        engine.add(sequence(1, 10));
        engine.admit(0.0, &settings, &mut Vec::new());
        let step = settings.service.decode_step_s(1, 1_000);
        let duration = engine.start_prompt(0.0, (3.0, 2.0), &settings);
        assert!((duration - 3.0 - 2.0 * step).abs() < 1e-9);
        engine.end_prompt(duration, &settings);
        let end = engine.next_end(&settings).expect("runs");
        assert!((end - duration - 8.0 * step).abs() < 1e-9);
    }

    #[test]
    fn sequence_without_capacity_waits() {
        let settings = SimulationOptions { decode_tokens: 1_500, ..SimulationOptions::eight_plus_four() };
        let mut engine = DecodeEngine::default();
        let mut joined = Vec::new();
        for number in [1, 2] {
            engine.add(sequence(number, 10));
        }
        engine.admit(0.0, &settings, &mut joined);
        assert_eq!((joined.clone(), engine.load()), (attempts([1]), load(1, 1, 1_000)));
        let end = engine.next_end(&settings).expect("runs");
        let mut done = Vec::new();
        engine.remove_finished(end, &settings, &mut done);
        engine.admit(end, &settings, &mut joined);
        assert_eq!((done, joined), (attempts([1]), attempts([1, 2])));
    }
}
