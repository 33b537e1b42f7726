//! The prefills of one engine that have no first token yet.

use std::collections::VecDeque;

use crate::learn::Work;
use crate::request::Seconds;
use crate::scheduler::Ticket;

/// A prefill that was sent.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) ticket: Ticket,
    /// Uncached tokens, as booked.
    pub(crate) tokens: u64,
    pub(crate) work: Work,
    pub(crate) service: Seconds,
    /// From the end of its computation to its first token.
    pub(crate) handover: Seconds,
    /// When its pages have been fetched.
    pub(crate) ready: Seconds,
    /// Its first token will not be told: it is believed to be computed when it should be.
    pub(crate) unseen: bool,
}

/// Prefills in order of sending, with the times at which they should be done. The engine computes one at a time; it is free for the
/// next one before the first token of the last is seen, because the KV cache is handed over meanwhile.
#[derive(Debug, Default)]
pub(crate) struct PrefillQueue {
    waiting: VecDeque<Queued>,
    tokens: u64,
    /// When the engine became free for the first of them.
    free_at: Seconds,
    /// When the first of them should be computed.
    head_end: Seconds,
    /// When all of them should be computed.
    end: Seconds,
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
        self.waiting.front().map(|head| head.work.new + head.work.cached)
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn push(&mut self, now: Seconds, queued: Queued) {
        if self.waiting.is_empty() {
            self.free_at = now;
            self.head_end = self.free_at.max(queued.ready) + queued.service;
            self.end = self.head_end;
        } else {
            let late = self.late(now);
            self.end = (self.end + late).max(now).max(queued.ready) + queued.service;
            self.head_end += late;
        }
        self.tokens += queued.tokens;
        self.waiting.push_back(queued);
    }

    /// Notes that a prefill's first token will not be told.
    pub(crate) fn unseen(&mut self, ticket: Ticket) {
        if let Some(queued) = self.waiting.iter_mut().find(|queued| queued.ticket == ticket) {
            queued.unseen = true;
        }
    }

    /// Takes out the prefills that should be computed by now and will not tell.
    pub(crate) fn advance(&mut self, now: Seconds) {
        while let Some(head) = self.waiting.front().filter(|head| head.unseen && self.head_end <= now) {
            self.tokens -= head.tokens;
            self.free_at = self.head_end;
            self.waiting.pop_front();
            self.predict();
        }
    }

    /// Takes out a prefill whose first token has come. Answers what it was and how long it took.
    pub(crate) fn computed(&mut self, now: Seconds, ticket: Ticket) -> Option<(Work, Seconds)> {
        let (_, queued) = self.remove(ticket)?;
        let begun = self.free_at.max(queued.ready);
        self.free_at = (now - queued.handover).max(begun);
        self.predict();
        Some((queued.work, now - begun))
    }

    /// Takes out a prefill that ended otherwise.
    pub(crate) fn abandoned(&mut self, now: Seconds, ticket: Ticket) {
        if let Some((position, _)) = self.remove(ticket) {
            if position == 0 {
                self.free_at = now;
            }
            self.predict();
        }
    }

    fn remove(&mut self, ticket: Ticket) -> Option<(usize, Queued)> {
        let position = self.waiting.iter().position(|queued| queued.ticket == ticket)?;
        let queued = self.waiting.remove(position)?;
        self.tokens -= queued.tokens;
        Some((position, queued))
    }

    /// Computes anew when the queued prefills end.
    fn predict(&mut self) {
        let mut free_at = self.free_at;
        for (position, queued) in self.waiting.iter().enumerate() {
            free_at = free_at.max(queued.ready) + queued.service;
            if position == 0 {
                self.head_end = free_at;
            }
        }
        self.end = free_at;
    }

    /// How long ago the first token of the first should have come.
    fn late(&self, now: Seconds) -> Seconds {
        self.waiting.front().map_or(0.0, |head| (now - self.head_end - head.handover).max(0.0))
    }

    /// Until all are computed. A head whose first token is late is still being computed: for how long depends on how much
    /// predictions are off in general, `spread` (a share of what was predicted).
    pub(crate) fn wait(&self, now: Seconds, spread: f64) -> Seconds {
        if self.waiting.is_empty() {
            return 0.0;
        }
        let late = self.late(now);
        if late > 0.0 {
            return spread * (now - self.free_at) + (self.end - self.head_end);
        }
        (self.end - now).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queued(ticket: u64, service: Seconds, handover: Seconds, ready: Seconds) -> Queued {
        let work = Work { new: 100, cached: 0, handed_over: 100 };
        Queued { ticket: Ticket(ticket), tokens: 100, work, service, handover, ready, unseen: false }
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
        assert_eq!(queue.computed(14.0, Ticket(1)).unwrap().1, 4.0);
        assert_eq!(queue.wait(15.0, 0.0), 2.0);
        assert_eq!(queue.computed(17.0, Ticket(2)).unwrap().1, 3.0);
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
        assert_eq!(queue.computed(2.5, Ticket(1)).unwrap().1, 2.5);
        // It was free at 2.0, but the second came at 2.2.
        assert!((queue.computed(5.7, Ticket(2)).unwrap().1 - 3.5).abs() < 1e-9);
    }

    #[test]
    fn a_prefill_waits_for_its_pages() {
        let mut queue = PrefillQueue::default();
        queue.push(0.0, queued(1, 1.0, 0.0, 4.0));
        assert_eq!(queue.wait(0.0, 0.0), 5.0);
        assert_eq!(queue.computed(6.0, Ticket(1)).unwrap().1, 2.0);
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
        queue.unseen(Ticket(1));
        queue.unseen(Ticket(3));
        queue.advance(1.9);
        assert_eq!(queue.tokens(), 300);
        // The second tells, so it is waited for, and the third behind it.
        queue.advance(9.0);
        assert_eq!((queue.tokens(), queue.wait(9.0, 0.0)), (200, 2.0));
        assert_eq!(queue.computed(9.0, Ticket(2)).unwrap().1, 7.0);
        queue.advance(11.0);
        assert!(queue.is_empty());
        // It is over for the engine, too, when its request ends.
        queue.abandoned(12.0, Ticket(3));
        assert_eq!(queue.wait(12.0, 0.0), 0.0);
    }

    #[test]
    fn an_abandoned_prefill_leaves_the_rest_its_place() {
        let mut queue = PrefillQueue::default();
        for (ticket, service) in [(1, 2.0), (2, 3.0), (3, 4.0)] {
            queue.push(0.0, queued(ticket, service, 0.0, 0.0));
        }
        queue.abandoned(1.0, Ticket(2));
        assert_eq!(queue.wait(1.0, 0.0), 5.0);
        queue.abandoned(1.0, Ticket(1));
        assert_eq!(queue.wait(1.0, 0.0), 4.0);
        queue.abandoned(1.0, Ticket(1));
        assert_eq!(queue.tokens(), 100);
    }
}
