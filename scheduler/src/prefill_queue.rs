//! The prefills of one engine that have no first token yet.

use std::collections::VecDeque;

use crate::prefill_time_learner::PrefillWork;
use crate::request::Seconds;
use crate::scheduler::AttemptId;

/// Requests are sent so long before the engine is free for them, or before their pages should be there: how long reading takes can be
/// seen then, within this.
const OBSERVABLE_LEAD: Seconds = 0.1;

/// An engine that reads this share more or less than predicted had another time for it, or reads at another pace.
const FETCH_TOLERANCE: f64 = 0.05;

/// A prefill that was sent.
#[derive(Debug)]
pub(crate) struct PendingPrefill {
    pub(crate) attempt: AttemptId,
    /// Uncached tokens, as booked.
    pub(crate) tokens: u64,
    pub(crate) work: PrefillWork,
    pub(crate) service: Seconds,
    /// From the end of its computation to its first token.
    pub(crate) handover: Seconds,
    /// When its pages have been fetched.
    pub(crate) ready: Seconds,
    /// What is fetched.
    pub(crate) store_read: Option<PrefillStoreRead>,
    /// Its first token will not be told: it is believed to be computed when it should be.
    pub(crate) unobserved: bool,
}

/// What a prefill reads from the shared store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillStoreRead {
    /// When that begins.
    pub(crate) from: Seconds,
    /// Tokens that should be read.
    pub(crate) tokens: u64,
    /// Seconds for each, by the engine's rules.
    pub(crate) per_token: Seconds,
    /// Whether the engine reads only until the prompt's turn comes.
    pub(crate) truncates_fetch: bool,
}

impl PendingPrefill {
    /// What the engine has done and how long that took, if it told how many tokens it did not have to compute and was `free_at` for it.
    fn observed_work(&self, now: Seconds, free_at: Seconds, cached: Option<u64>) -> (PrefillWork, Seconds) {
        let total = self.work.computed_tokens + self.work.cached_tokens;
        let cached = cached.map_or(self.work.cached_tokens, |cached| cached.min(total));
        let work =
            PrefillWork { computed_tokens: (total - cached).max(1), cached_tokens: cached, ..self.work };
        let begun = free_at.max(self.ready);
        let Some(reading) = self.store_read else { return (work, now - begun) };
        let read = (reading.tokens + cached).saturating_sub(self.work.cached_tokens);
        let predicted = reading.tokens as f64;
        let (off, believed) = (read as f64 - predicted, self.ready - reading.from);
        let work_of_both = PrefillWork { fetch_seconds: read as f64 * reading.per_token, ..work };
        if read == 0 {
            (work, now - begun)
        } else if reading.truncates_fetch && off.abs() > FETCH_TOLERANCE * predicted {
            // It took all the time there was.
            (work_of_both, now - reading.from)
        } else if self.ready + believed + OBSERVABLE_LEAD >= free_at {
            // What is missing in the store is not read.
            let believed = believed * (read as f64 / predicted).min(1.0);
            (work_of_both, now - free_at.max(reading.from + believed) + believed)
        } else {
            (work, now - begun)
        }
    }
}

/// Prefills in order of sending, with the times at which they should be done. The engine computes one at a time; it is free for the
/// next one before the first token of the last is seen, because the KV cache is handed over meanwhile. Whoever waits for its pages is
/// overtaken.
#[derive(Debug, Default)]
pub(crate) struct PrefillQueue {
    waiting: VecDeque<PendingPrefill>,
    tokens: u64,
    /// When the engine became free for the first of them.
    free_at: Seconds,
    /// When the first of them should be computed.
    head_end: Seconds,
    /// When all of them should be computed.
    end: Seconds,
    /// The first time, from and until when, in which all that are left wait for their pages.
    idle: Option<(Seconds, Seconds)>,
    /// When the pages of each are there, and its computation. Kept so that nothing is allocated.
    by_ready: Vec<(Seconds, Seconds)>,
}

impl PrefillQueue {
    /// How many there are.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.waiting.len()).unwrap_or(u32::MAX)
    }

    /// Uncached tokens of all.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Uncached tokens of those behind the first.
    pub(crate) fn waiting_tokens(&self) -> u64 {
        self.tokens - self.waiting.front().map_or(0, |head| head.tokens)
    }

    /// All tokens of the first.
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

    /// Notes that a prefill's first token will not be told.
    pub(crate) fn mark_unobserved(&mut self, ticket: AttemptId) {
        if let Some(queued) = self.waiting.iter_mut().find(|queued| queued.attempt == ticket) {
            queued.unobserved = true;
        }
    }

    /// Takes out the prefills that should be computed by now and will not tell.
    pub(crate) fn advance(&mut self, now: Seconds) {
        while let Some(head) = self.waiting.front().filter(|head| head.unobserved && self.head_end <= now) {
            self.tokens -= head.tokens;
            self.free_at = self.head_end;
            self.waiting.pop_front();
            self.predict(now, self.free_at);
        }
    }

    /// Takes out a prefill whose first token has come, with what the engine says that it took from caches. Answers what it was and how
    /// long it took.
    pub(crate) fn complete(
        &mut self,
        now: Seconds,
        ticket: AttemptId,
        cached: Option<u64>,
    ) -> Option<(PrefillWork, Seconds)> {
        let (_, queued) = self.remove(ticket)?;
        let done = queued.observed_work(now, self.free_at, cached);
        // Its pages may have come sooner than thought.
        let begun = self.free_at.max(queued.ready).min(now);
        self.free_at = (now - queued.handover).max(begun);
        self.predict(now, self.free_at);
        Some(done)
    }

    /// Takes out a prefill that ended otherwise.
    pub(crate) fn abort(&mut self, now: Seconds, ticket: AttemptId) {
        if let Some((position, _)) = self.remove(ticket) {
            if position == 0 {
                self.free_at = now;
            }
            self.predict(now, self.free_at);
        }
    }

    fn remove(&mut self, ticket: AttemptId) -> Option<(usize, PendingPrefill)> {
        let position = self.waiting.iter().position(|queued| queued.attempt == ticket)?;
        let queued = self.waiting.remove(position)?;
        self.tokens -= queued.tokens;
        Some((position, queued))
    }

    /// Computes anew when the queued prefills end, if the engine becomes `free_at` for them.
    fn predict(&mut self, now: Seconds, free_at: Seconds) {
        if let Some(head) = self.waiting.front() {
            self.head_end = free_at.max(head.ready) + head.service;
        }
        self.by_ready.clear();
        self.by_ready.extend(self.waiting.iter().map(|queued| (queued.ready, queued.service)));
        self.by_ready.sort_by(|left, right| left.0.total_cmp(&right.0));
        self.end = free_at;
        self.idle = None;
        for &(ready, service) in &self.by_ready {
            if ready > self.end.max(now) && self.idle.is_none() {
                self.idle = Some((self.end, ready));
            }
            self.end = self.end.max(ready) + service;
        }
    }

    /// When the engine has nothing to compute because all that are left wait for their pages: how long until then, and for how long.
    pub(crate) fn idle(&self, now: Seconds) -> Option<(Seconds, Seconds)> {
        let (from, until) = self.idle.filter(|(_, until)| *until > now)?;
        Some(((from - now).max(0.0), until - from.max(now)))
    }

    /// How long ago the first token of the first should have come.
    fn overdue(&self, now: Seconds) -> Seconds {
        self.waiting.front().map_or(0.0, |head| (now - self.head_end - head.handover).max(0.0))
    }

    /// Until all are computed. A head whose first token is late is still being computed: for how long depends on how much
    /// predictions are off in general, `spread` (a share of what was predicted).
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

    fn queued(ticket: u64, service: Seconds, handover: Seconds, ready: Seconds) -> PendingPrefill {
        let work = PrefillWork { computed_tokens: 100, handover_tokens: 100, ..PrefillWork::default() };
        let ticket = AttemptId(ticket);
        PendingPrefill {
            attempt: ticket,
            tokens: 100,
            work,
            service,
            handover,
            ready,
            store_read: None,
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
        // Late: the first is due, the second has still to run.
        assert_eq!(queue.wait(14.0, 0.0), 3.0);
        assert_eq!(queue.wait(14.0, 0.25), 4.0);
        assert_eq!(queue.complete(14.0, AttemptId(1), None).unwrap().1, 4.0);
        assert_eq!(queue.wait(15.0, 0.0), 2.0);
        assert_eq!(queue.complete(17.0, AttemptId(2), None).unwrap().1, 3.0);
        assert_eq!(queue.wait(17.0, 0.0), 0.0);
        assert!(queue.is_empty());
    }

    #[test]
    fn the_next_begins_while_the_last_is_handed_over() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, queued(1, 2.0, 0.5, 0.0));
        assert_eq!(queue.wait(2.2, 0.0), 0.0);
        queue.push(2.2, queued(2, 3.0, 0.5, 2.2));
        assert_eq!(queue.wait(2.2, 0.0), 3.0);
        assert_eq!(queue.complete(2.5, AttemptId(1), None).unwrap().1, 2.5);
        // It was free at 2.0, but the second came at 2.2.
        assert!((queue.complete(5.7, AttemptId(2), None).unwrap().1 - 3.5).abs() < 1e-9);
    }

    #[test]
    fn a_prefill_waits_for_its_pages() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, queued(1, 1.0, 0.0, 4.0));
        assert_eq!(queue.wait(0.0, 0.0), 5.0);
        assert_eq!(queue.complete(6.0, AttemptId(1), None).unwrap().1, 2.0);
    }

    /// A thousand tokens, of which 800 are read from the store, in 0.8 s by the rules; thought to take twice as long.
    fn reading(sent: Seconds, cuts_short: bool) -> PendingPrefill {
        let work =
            PrefillWork { computed_tokens: 200, cached_tokens: 800, handover_tokens: 0, fetch_seconds: 0.0 };
        let reading =
            PrefillStoreRead { from: sent, tokens: 800, per_token: 0.001, truncates_fetch: cuts_short };
        PendingPrefill { work, store_read: Some(reading), ..queued(1, 1.0, 0.0, sent + 1.6) }
    }

    #[test]
    fn reading_counts_from_its_begin_where_it_was_waited_for() {
        let done = |free_at, now, cached| reading(0.0, false).observed_work(now, free_at, cached);
        let work =
            PrefillWork { computed_tokens: 200, cached_tokens: 800, handover_tokens: 0, fetch_seconds: 0.8 };
        assert_eq!(done(0.0, 4.0, Some(800)), (work, 4.0));
        // The engine was free just after the pages should have been there: 1.3 s more than the computation.
        let (seen, took) = done(1.7, 4.0, None);
        assert!(seen == work && (took - (2.3 + 1.6)).abs() < 1e-9, "{took}");
        // Whether it took even twice as long, nobody can see.
        assert_eq!(done(3.5, 4.5, None), (PrefillWork { fetch_seconds: 0.0, ..work }, 1.0));
        // Half of it was gone from the store.
        let (seen, took) = done(0.0, 2.0, Some(400));
        assert!(
            seen == PrefillWork {
                computed_tokens: 600,
                cached_tokens: 400,
                handover_tokens: 0,
                fetch_seconds: 0.4
            } && took == 2.0
        );
        assert_eq!(
            done(0.0, 1.0, Some(0)).0,
            PrefillWork { computed_tokens: 1000, cached_tokens: 0, handover_tokens: 0, fetch_seconds: 0.0 }
        );
    }

    #[test]
    fn an_engine_that_stops_reading_shows_its_pace() {
        let done = |cached| reading(0.0, true).observed_work(5.0, 4.0, Some(cached));
        assert_eq!(
            done(200),
            (
                PrefillWork {
                    computed_tokens: 800,
                    cached_tokens: 200,
                    handover_tokens: 0,
                    fetch_seconds: 0.2
                },
                5.0
            )
        );
        // All came in time: it may have been far faster.
        assert_eq!(done(799).1, 1.0);
    }

    #[test]
    fn who_waits_for_pages_is_overtaken() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, queued(1, 1.0, 0.0, 0.0));
        queue.push(0.0, queued(2, 1.0, 0.0, 4.0));
        assert_eq!((queue.wait(0.0, 0.0), queue.idle(0.5), queue.idle(4.0)), (5.0, Some((0.5, 3.0)), None));
        assert_eq!(queue.idle(2.0), Some((0.0, 2.0)));
        queue.push(1.0, queued(3, 2.0, 0.0, 1.0));
        assert_eq!((queue.wait(1.0, 0.0), queue.idle(1.0)), (4.0, Some((2.0, 1.0))));
        // It does not end in time, so the other one waits.
        queue.push(1.0, queued(4, 2.0, 0.0, 1.0));
        assert_eq!((queue.wait(1.0, 0.0), queue.idle(1.0)), (5.0, None));
    }

    #[test]
    fn pages_that_come_sooner_than_thought_leave_the_engine_free() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, reading(0.0, false));
        assert_eq!(queue.complete(1.2, AttemptId(1), Some(800)).unwrap().1, 1.2);
        queue.push(1.2, queued(2, 1.0, 0.0, 1.2));
        assert!((queue.wait(1.2, 0.0) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn what_comes_to_a_late_engine_queues_behind_its_head() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, queued(1, 1.0, 0.0, 0.0));
        queue.push(2.0, queued(2, 1.0, 0.0, 2.0));
        assert_eq!(queue.wait(3.0, 0.0), 1.0);
    }

    #[test]
    fn a_prefill_that_will_not_tell_is_believed_to_be_computed() {
        let mut queue = PrefillQueue::default();
        for ticket in 1..=3 {
            queue.push(0.0, queued(ticket, 2.0, 0.0, 0.0));
        }
        queue.mark_unobserved(AttemptId(1));
        queue.mark_unobserved(AttemptId(3));
        queue.advance(1.9);
        assert_eq!(queue.tokens(), 300);
        // The second tells, so it is waited for, and the third behind it.
        queue.advance(9.0);
        assert_eq!((queue.tokens(), queue.wait(9.0, 0.0)), (200, 2.0));
        assert_eq!(queue.complete(9.0, AttemptId(2), None).unwrap().1, 7.0);
        queue.advance(11.0);
        assert!(queue.is_empty());
        // It is over for the engine, too, when its request ends.
        queue.abort(12.0, AttemptId(3));
        assert_eq!(queue.wait(12.0, 0.0), 0.0);
    }

    #[test]
    fn an_abandoned_prefill_leaves_the_rest_its_place() {
        let mut queue = PrefillQueue::default();
        for (ticket, service) in [(1, 2.0), (2, 3.0), (3, 4.0)] {
            queue.push(0.0, queued(ticket, service, 0.0, 0.0));
        }
        queue.abort(1.0, AttemptId(2));
        assert_eq!(queue.wait(1.0, 0.0), 5.0);
        queue.abort(1.0, AttemptId(1));
        assert_eq!(queue.wait(1.0, 0.0), 4.0);
        queue.abort(1.0, AttemptId(1));
        assert_eq!(queue.tokens(), 100);
    }
}
