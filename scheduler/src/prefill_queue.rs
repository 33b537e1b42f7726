//! Prefills of one engine that have no first token yet.

use std::collections::VecDeque;

use crate::attempt::AttemptId;
use crate::fleet::NextPass;
use crate::prefill_time_learner::PrefillWork;
use crate::seconds::Seconds;

/// Requests are sent up to this much before the engine is free for them or before their blocks are expected; within it,
/// the duration of a store read is observable.
const OBSERVABLE_LEAD: Seconds = 0.1;

/// A read that differs from the prediction by more than this share had another time available, or another speed.
const FETCH_TOLERANCE: f64 = 0.05;

/// A prefill that was sent and has no first token.
#[derive(Debug)]
pub(crate) struct PendingPrefill {
    pub(crate) attempt: AttemptId,
    /// Uncached tokens, as estimated when sent.
    pub(crate) tokens: u64,
    pub(crate) work: PrefillWork,
    pub(crate) service: Seconds,
    /// Seconds from the end of its computation to its first token.
    pub(crate) handover: Seconds,
    /// Time at which its blocks have been fetched.
    pub(crate) ready: Seconds,
    /// Predicted read from the shared store, if any.
    pub(crate) store_read: Option<PrefillStoreRead>,
    /// Whether it shares the pass of the prefill before it.
    pub(crate) shares_pass: bool,
    /// The constant time of a pass.
    pub(crate) pass_constant: Seconds,
    /// Its first token is not observable: it counts as computed at its predicted time.
    pub(crate) unobserved: bool,
}

/// A prefill's predicted read from the shared store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillStoreRead {
    /// Time at which the read starts.
    pub(crate) from: Seconds,
    /// Number of tokens expected to be read.
    pub(crate) tokens: u64,
    /// Seconds per token, by the engine's parameters.
    pub(crate) per_token: Seconds,
    /// Whether the engine reads only until the prompt's turn comes.
    pub(crate) truncates_fetch: bool,
}

impl PendingPrefill {
    /// The engine's work for the prompt and its duration, given the reported number of cached tokens and that the
    /// engine was free from `free_at`.
    fn observed_work(&self, now: Seconds, free_at: Seconds, cached: Option<u64>) -> (PrefillWork, Seconds) {
        let total = self.work.computed_tokens + self.work.cached_tokens;
        let cached = cached.map_or(self.work.cached_tokens, |cached| cached.min(total));
        let work =
            PrefillWork { computed_tokens: (total - cached).max(1), cached_tokens: cached, ..self.work };
        let started = free_at.max(self.ready);
        let Some(store_read) = self.store_read else { return (work, now - started) };
        let read = (store_read.tokens + cached).saturating_sub(self.work.cached_tokens);
        let predicted = store_read.tokens as f64;
        let (off, believed) = (read as f64 - predicted, self.ready - store_read.from);
        let work_of_both = PrefillWork { fetch_seconds: read as f64 * store_read.per_token, ..work };
        if read == 0 {
            (work, now - started)
        } else if store_read.truncates_fetch && off.abs() > FETCH_TOLERANCE * predicted {
            // The read took all the available time.
            (work_of_both, now - store_read.from)
        } else if self.ready + believed + OBSERVABLE_LEAD >= free_at {
            // Blocks that are missing in the store are not read.
            let believed = believed * (read as f64 / predicted).min(1.0);
            (work_of_both, now - free_at.max(store_read.from + believed) + believed)
        } else {
            (work, now - started)
        }
    }
}

/// Prefills in order of sending, with their predicted ends. The engine computes one at a time; it is free for the next
/// one before the first token of the last one arrives, because the KV cache is transferred in the meantime. A prefill
/// that waits for its blocks is overtaken.
#[derive(Debug, Default)]
pub(crate) struct PrefillQueue {
    waiting: VecDeque<PendingPrefill>,
    tokens: u64,
    /// When the engine became free for the first prefill.
    free_at: Seconds,
    /// Predicted end of the first prefill.
    head_end: Seconds,
    /// Predicted end of the last prefill.
    end: Seconds,
    /// The first period in which all remaining prefills wait for their blocks.
    idle: Option<IdlePeriod>,
    /// All prefills by `ready`. Reused to avoid allocations.
    by_ready: Vec<PredictedPrefill>,
}

#[derive(Debug, Clone, Copy)]
struct IdlePeriod {
    start: Seconds,
    end: Seconds,
}

#[derive(Debug, Clone, Copy)]
struct PredictedPrefill {
    /// Time at which its blocks have been fetched.
    ready: Seconds,
    /// Duration of its computation.
    service: Seconds,
}

/// An idle period of the engine, seen from now.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ExpectedIdle {
    /// Seconds until it starts.
    pub(crate) wait: Seconds,
    pub(crate) duration: Seconds,
}

impl PrefillQueue {
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.waiting.len()).unwrap_or(u32::MAX)
    }

    /// Sum of the uncached tokens.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Uncached tokens of all but the first prefill.
    pub(crate) fn waiting_tokens(&self) -> u64 {
        self.tokens - self.waiting.front().map_or(0, |head| head.tokens)
    }

    /// All tokens of the first prefill.
    pub(crate) fn head_tokens(&self) -> Option<u64> {
        self.waiting.front().map(|head| head.work.computed_tokens + head.work.cached_tokens)
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn push(&mut self, now: Seconds, queued: PendingPrefill) {
        if self.waiting.is_empty() {
            self.free_at = now;
        }
        let late = self.overdue(now);
        self.tokens += queued.tokens;
        self.waiting.push_back(queued);
        self.predict(now, self.free_at + late);
    }

    /// Marks a prefill whose first token is not observable.
    pub(crate) fn mark_unobserved(&mut self, attempt: AttemptId) {
        if let Some(queued) = self.waiting.iter_mut().find(|queued| queued.attempt == attempt) {
            queued.unobserved = true;
        }
    }

    /// Corrects the time at which a prefill's blocks have been fetched.
    pub(crate) fn set_ready(&mut self, now: Seconds, attempt: AttemptId, ready: Seconds) {
        if let Some(queued) = self.waiting.iter_mut().find(|queued| queued.attempt == attempt) {
            queued.ready = ready;
            self.predict(now, self.free_at);
        }
    }

    /// Removes unobservable prefills whose predicted end has passed.
    pub(crate) fn advance(&mut self, now: Seconds) {
        while let Some(head) = self.waiting.front().filter(|head| head.unobserved && self.head_end <= now) {
            self.tokens -= head.tokens;
            self.free_at = self.head_end;
            self.waiting.pop_front();
            self.predict(now, self.free_at);
        }
    }

    /// Removes a prefill whose first token has arrived, with the number of cached tokens that the engine reported.
    /// Returns its work and duration.
    pub(crate) fn complete(
        &mut self,
        now: Seconds,
        attempt: AttemptId,
        cached: Option<u64>,
    ) -> Option<(PrefillWork, Seconds)> {
        let (position, queued) = self.remove(attempt)?;
        let mut done = queued.observed_work(now, self.free_at, cached);
        done.0.shares_pass = queued.shares_pass && done.1 < queued.pass_constant / 2.0;
        if !done.0.shares_pass {
            done.0.computed_tokens += self.settle_pass(position, &queued);
        }
        // Its blocks may have arrived sooner than predicted.
        let started = self.free_at.max(queued.ready).min(now);
        self.free_at = (now - queued.handover).max(started);
        self.predict(now, self.free_at);
        Some(done)
    }

    /// Removes a prefill that ended without a first token.
    pub(crate) fn abort(&mut self, now: Seconds, attempt: AttemptId) {
        if let Some((position, _)) = self.remove(attempt) {
            if position == 0 {
                self.free_at = now;
            }
            self.predict(now, self.free_at);
        }
    }

    fn remove(&mut self, attempt: AttemptId) -> Option<(usize, PendingPrefill)> {
        let position = self.waiting.iter().position(|queued| queued.attempt == attempt)?;
        let queued = self.waiting.remove(position)?;
        self.tokens -= queued.tokens;
        Some((position, queued))
    }

    /// Attributes a pass to the first of its prefills that completes, which was removed from `position`. Returns the computed tokens of
    /// the others, whose first tokens follow in a moment.
    fn settle_pass(&mut self, position: usize, removed: &PendingPrefill) -> u64 {
        if position > 0 && !removed.shares_pass {
            return 0;
        }
        // The first tokens of a pass arrive in any order.
        if let (Some(head), true) = (self.waiting.front_mut(), position > 0) {
            head.shares_pass = true;
        }
        let pass = self.waiting.iter().take_while(|queued| queued.shares_pass);
        pass.map(|queued| queued.work.computed_tokens).sum()
    }

    /// The last pass, if it has not started. `begin` makes a pass of its first prompt's uncached tokens and duration.
    pub(crate) fn next_pass(&self, begin: impl FnOnce(u64, Seconds) -> NextPass) -> Option<NextPass> {
        // The first prefill is being computed, with those that share its pass.
        let first = self.waiting.iter().skip(1).rposition(|queued| !queued.shares_pass)? + 1;
        let mut prefills = self.waiting.iter().skip(first);
        let queued = prefills.next()?;
        let pass = begin(queued.work.computed_tokens, queued.service);
        Some(prefills.fold(pass, |pass, queued| pass.with(queued.work.computed_tokens, queued.service)))
    }

    /// Recomputes the predicted ends of the queued prefills, if the engine becomes `free_at` for them.
    fn predict(&mut self, now: Seconds, free_at: Seconds) {
        if let Some(head) = self.waiting.front() {
            self.head_end = free_at.max(head.ready) + head.service;
        }
        self.by_ready.clear();
        let predicted =
            |queued: &PendingPrefill| PredictedPrefill { ready: queued.ready, service: queued.service };
        self.by_ready.extend(self.waiting.iter().map(predicted));
        self.by_ready.sort_by(|left, right| left.ready.total_cmp(&right.ready));
        self.end = free_at;
        self.idle = None;
        for &PredictedPrefill { ready, service } in &self.by_ready {
            if ready > self.end.max(now) && self.idle.is_none() {
                self.idle = Some(IdlePeriod { start: self.end, end: ready });
            }
            self.end = self.end.max(ready) + service;
        }
    }

    /// The next idle period because all remaining prefills wait for their blocks.
    pub(crate) fn idle(&self, now: Seconds) -> Option<ExpectedIdle> {
        let IdlePeriod { start, end } = self.idle.filter(|period| period.end > now)?;
        Some(ExpectedIdle { wait: (start - now).max(0.0), duration: end - start.max(now) })
    }

    /// How long ago the first token of the first prefill was due.
    fn overdue(&self, now: Seconds) -> Seconds {
        self.waiting.front().map_or(0.0, |head| (now - self.head_end - head.handover).max(0.0))
    }

    /// Seconds until all are computed. A first prefill whose first token is late is still being computed; its remaining
    /// time depends on the general error of predictions, `spread` (a share of the prediction).
    pub(crate) fn wait(&self, now: Seconds, spread: f64) -> Seconds {
        if self.waiting.is_empty() {
            return 0.0;
        }
        let late = self.overdue(now);
        if late > 0.0 {
            return spread * (now - self.free_at) + (self.end - self.head_end);
        }
        (self.end - now).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(wait: Seconds, duration: Seconds) -> Option<ExpectedIdle> {
        Some(ExpectedIdle { wait, duration })
    }

    fn queued(attempt: u64, service: Seconds, handover: Seconds, ready: Seconds) -> PendingPrefill {
        let work = PrefillWork { computed_tokens: 100, handover_tokens: 100, ..PrefillWork::default() };
        let attempt = AttemptId(attempt);
        PendingPrefill {
            attempt,
            tokens: 100,
            work,
            service,
            handover,
            ready,
            store_read: None,
            shares_pass: false,
            pass_constant: 0.0,
            unobserved: false,
        }
    }

    #[test]
    fn prefills_are_computed_one_after_the_other() {
        let mut queue = PrefillQueue::default();
        queue.push(10.0, queued(1, 2.0, 0.0, 0.0));
        queue.push(10.0, queued(2, 3.0, 0.0, 0.0));
        assert_eq!(queue.wait(10.0, 0.0), 5.0);
        assert_eq!(queue.wait(11.5, 0.0), 3.5);
        // The first is due, the second still has to run.
        assert_eq!(queue.wait(14.0, 0.0), 3.0);
        assert_eq!(queue.wait(14.0, 0.25), 4.0);
        assert_eq!(queue.complete(14.0, AttemptId(1), None).unwrap().1, 4.0);
        assert_eq!(queue.wait(15.0, 0.0), 2.0);
        assert_eq!(queue.complete(17.0, AttemptId(2), None).unwrap().1, 3.0);
        assert_eq!(queue.wait(17.0, 0.0), 0.0);
        assert!(queue.is_empty());
    }

    #[test]
    fn short_prefills_share_a_pass_that_has_not_started() {
        let begin = |new: u64, work| NextPass { room: 500 - new, work };
        let mut queue = PrefillQueue::default();
        let member = |attempt, shares_pass| PendingPrefill {
            shares_pass,
            pass_constant: 1.0,
            ..queued(attempt, if shares_pass { 0.1 } else { 1.1 }, 0.0, 0.0)
        };
        queue.push(0.0, member(1, false));
        assert_eq!(queue.next_pass(begin), None, "the first one's pass has started");
        queue.push(0.0, member(2, false));
        assert_eq!(queue.next_pass(begin), Some(NextPass { room: 400, work: 1.1 }));
        queue.push(0.0, member(3, true));
        let pass = queue.next_pass(begin).unwrap();
        assert!(pass.room == 300 && (pass.work - 1.2).abs() < 1e-9, "{pass:?}");
        assert!((queue.wait(0.0, 0.0) - 2.3).abs() < 1e-9);
        assert!(!queue.complete(1.1, AttemptId(1), None).unwrap().0.shares_pass);
        assert_eq!(queue.next_pass(begin), None, "both are being computed");
        let (work, _) = queue.complete(2.3, AttemptId(2), None).unwrap();
        assert_eq!((work.shares_pass, work.computed_tokens), (false, 200));
        assert!(queue.complete(2.31, AttemptId(3), None).unwrap().0.shares_pass);
    }

    #[test]
    fn first_tokens_of_a_pass_arrive_in_any_order() {
        let mut queue = PrefillQueue::default();
        let member = |attempt, shares_pass| PendingPrefill {
            shares_pass,
            pass_constant: 1.0,
            ..queued(attempt, 1.0, 0.0, 0.0)
        };
        (1..4).for_each(|attempt| queue.push(0.0, member(attempt, attempt > 1)));
        let (work, duration) = queue.complete(1.2, AttemptId(2), None).unwrap();
        assert_eq!((work.shares_pass, work.computed_tokens, duration), (false, 300, 1.2));
        assert!(queue.complete(1.2, AttemptId(3), None).unwrap().0.shares_pass);
        assert!(queue.complete(1.2, AttemptId(1), None).unwrap().0.shares_pass);
    }

    #[test]
    fn a_pass_that_was_not_shared_counts_in_full() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, PendingPrefill { pass_constant: 1.0, ..queued(1, 1.1, 0.0, 0.0) });
        queue.push(0.0, PendingPrefill { pass_constant: 1.0, shares_pass: true, ..queued(2, 0.1, 0.0, 0.0) });
        queue.complete(1.1, AttemptId(1), None);
        let (work, duration) = queue.complete(2.2, AttemptId(2), None).unwrap();
        assert!(!work.shares_pass && (duration - 1.1).abs() < 1e-9, "{duration}");
    }

    #[test]
    fn next_prefill_starts_during_the_transfer() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, queued(1, 2.0, 0.5, 0.0));
        assert_eq!(queue.wait(2.2, 0.0), 0.0);
        queue.push(2.2, queued(2, 3.0, 0.5, 2.2));
        assert_eq!(queue.wait(2.2, 0.0), 3.0);
        assert_eq!(queue.complete(2.5, AttemptId(1), None).unwrap().1, 2.5);
        // The engine was free at 2.0, but the second arrived at 2.2.
        assert!((queue.complete(5.7, AttemptId(2), None).unwrap().1 - 3.5).abs() < 1e-9);
    }

    #[test]
    fn a_prefill_waits_for_its_pages() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, queued(1, 1.0, 0.0, 4.0));
        assert_eq!(queue.wait(0.0, 0.0), 5.0);
        assert_eq!(queue.complete(6.0, AttemptId(1), None).unwrap().1, 2.0);
    }

    /// A thousand tokens, of which 800 are read from the store in 0.8 s by configuration; predicted to take twice as
    /// long.
    fn store_read(sent: Seconds, cuts_short: bool) -> PendingPrefill {
        let work = PrefillWork {
            computed_tokens: 200,
            cached_tokens: 800,
            handover_tokens: 0,
            fetch_seconds: 0.0,
            shares_pass: false,
        };
        let store_read =
            PrefillStoreRead { from: sent, tokens: 800, per_token: 0.001, truncates_fetch: cuts_short };
        PendingPrefill { work, store_read: Some(store_read), ..queued(1, 1.0, 0.0, sent + 1.6) }
    }

    #[test]
    fn read_time_counts_from_its_start_if_observable() {
        let done = |free_at, now, cached| store_read(0.0, false).observed_work(now, free_at, cached);
        let work = PrefillWork {
            computed_tokens: 200,
            cached_tokens: 800,
            handover_tokens: 0,
            fetch_seconds: 0.8,
            shares_pass: false,
        };
        assert_eq!(done(0.0, 4.0, Some(800)), (work, 4.0));
        // The engine became free just after the blocks were expected: 1.3 s more than the computation.
        let (observed, duration) = done(1.7, 4.0, None);
        assert!(observed == work && (duration - (2.3 + 1.6)).abs() < 1e-9, "{duration}");
        // Whether it took even twice as long is not observable.
        assert_eq!(done(3.5, 4.5, None), (PrefillWork { fetch_seconds: 0.0, ..work }, 1.0));
        // Half of it was missing in the store.
        let (observed, duration) = done(0.0, 2.0, Some(400));
        assert!(
            observed
                == PrefillWork {
                    computed_tokens: 600,
                    cached_tokens: 400,
                    handover_tokens: 0,
                    fetch_seconds: 0.4,
                    shares_pass: false
                }
                && duration == 2.0
        );
        assert_eq!(
            done(0.0, 1.0, Some(0)).0,
            PrefillWork {
                computed_tokens: 1000,
                cached_tokens: 0,
                handover_tokens: 0,
                fetch_seconds: 0.0,
                shares_pass: false
            }
        );
    }

    #[test]
    fn truncated_read_reveals_its_speed() {
        let done = |cached| store_read(0.0, true).observed_work(5.0, 4.0, Some(cached));
        assert_eq!(
            done(200),
            (
                PrefillWork {
                    computed_tokens: 800,
                    cached_tokens: 200,
                    handover_tokens: 0,
                    fetch_seconds: 0.2,
                    shares_pass: false
                },
                5.0
            )
        );
        // All arrived in time: the store may have been far faster.
        assert_eq!(done(799).1, 1.0);
    }

    #[test]
    fn prefill_waiting_for_blocks_is_overtaken() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, queued(1, 1.0, 0.0, 0.0));
        queue.push(0.0, queued(2, 1.0, 0.0, 4.0));
        assert_eq!((queue.wait(0.0, 0.0), queue.idle(0.5), queue.idle(4.0)), (5.0, expected(0.5, 3.0), None));
        assert_eq!(queue.idle(2.0), expected(0.0, 2.0));
        queue.push(1.0, queued(3, 2.0, 0.0, 1.0));
        assert_eq!((queue.wait(1.0, 0.0), queue.idle(1.0)), (4.0, expected(2.0, 1.0)));
        // It does not end in time, so the other one waits.
        queue.push(1.0, queued(4, 2.0, 0.0, 1.0));
        assert_eq!((queue.wait(1.0, 0.0), queue.idle(1.0)), (5.0, None));
    }

    #[test]
    fn early_blocks_free_the_engine_early() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, store_read(0.0, false));
        assert_eq!(queue.complete(1.2, AttemptId(1), Some(800)).unwrap().1, 1.2);
        queue.push(1.2, queued(2, 1.0, 0.0, 1.2));
        assert!((queue.wait(1.2, 0.0) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn new_prefill_queues_after_an_overdue_head() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, queued(1, 1.0, 0.0, 0.0));
        queue.push(2.0, queued(2, 1.0, 0.0, 2.0));
        assert_eq!(queue.wait(3.0, 0.0), 1.0);
    }

    #[test]
    fn unobservable_prefill_ends_at_its_predicted_time() {
        let mut queue = PrefillQueue::default();
        for attempt in 1..=3 {
            queue.push(0.0, queued(attempt, 2.0, 0.0, 0.0));
        }
        queue.mark_unobserved(AttemptId(1));
        queue.mark_unobserved(AttemptId(3));
        queue.advance(1.9);
        assert_eq!(queue.tokens(), 300);
        // The second is observable, so the queue waits for it, and for the third after it.
        queue.advance(9.0);
        assert_eq!((queue.tokens(), queue.wait(9.0, 0.0)), (200, 2.0));
        assert_eq!(queue.complete(9.0, AttemptId(2), None).unwrap().1, 7.0);
        queue.advance(11.0);
        assert!(queue.is_empty());
        // The prefill also leaves the engine's queue when its request ends.
        queue.abort(12.0, AttemptId(3));
        assert_eq!(queue.wait(12.0, 0.0), 0.0);
    }

    #[test]
    fn aborted_prefill_frees_its_time() {
        let mut queue = PrefillQueue::default();
        for (attempt, service) in [(1, 2.0), (2, 3.0), (3, 4.0)] {
            queue.push(0.0, queued(attempt, service, 0.0, 0.0));
        }
        queue.abort(1.0, AttemptId(2));
        assert_eq!(queue.wait(1.0, 0.0), 5.0);
        queue.abort(1.0, AttemptId(1));
        assert_eq!(queue.wait(1.0, 0.0), 4.0);
        queue.abort(1.0, AttemptId(1));
        assert_eq!(queue.tokens(), 100);
    }
}
