//! What one engine was sent and has not finished, and when it will be done with it.

use std::collections::VecDeque;

use crate::cluster::{Load, Reported};
use crate::estimate::Estimate;
use crate::request::Seconds;
use crate::scheduler::Ticket;
use crate::service::ServiceModel;

/// The book of one engine. Its prefills are one queue, computed one after the other in order of sending.
#[derive(Debug)]
pub(crate) struct EngineBook {
    pub(crate) available: bool,
    pub(crate) service: ServiceModel,
    in_flight: u32,
    decode_tokens: u64,
    queue: PrefillQueue,
    /// When the link to the shared store is free.
    fetch_free_at: Seconds,
    report: Option<Report>,
}

/// An engine's own words, and what was known here when they came.
#[derive(Debug, Clone, Copy)]
struct Report {
    at: Seconds,
    said: Reported,
    /// Work that other gateways sent there.
    foreign: Seconds,
    /// Work in the own queue then, and sent since.
    own: Seconds,
}

/// Prefills without a first token.
#[derive(Debug, Default)]
struct PrefillQueue {
    waiting: VecDeque<Queued>,
    tokens: u64,
    /// When the engine became free for the first of them.
    free_at: Seconds,
    /// When the first of them should be done.
    head_end: Seconds,
    /// When all of them should be done.
    end: Seconds,
}

#[derive(Debug)]
struct Queued {
    ticket: Ticket,
    /// Uncached tokens.
    tokens: u64,
    service: Seconds,
    /// When its pages have been fetched.
    ready: Seconds,
}

/// A prefill that is over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Computed {
    /// From when the engine was free for it and its pages were there.
    pub(crate) took: Seconds,
    /// As predicted when it was sent.
    pub(crate) expected: Seconds,
}

impl EngineBook {
    pub(crate) fn new(service: ServiceModel) -> Self {
        Self {
            available: true,
            service,
            in_flight: 0,
            decode_tokens: 0,
            queue: PrefillQueue::default(),
            fetch_free_at: 0.0,
            report: None,
        }
    }

    pub(crate) fn load(&self, now: Seconds) -> Load {
        Load {
            available: self.available,
            in_flight: self.in_flight,
            pending_prefill_tokens: self.queue.tokens,
            active_decode_tokens: self.decode_tokens,
            reported: self
                .report
                .map(|report| Reported { age: report.said.age + (now - report.at).max(0.0), ..report.said }),
            prefill_wait: self.prefill_wait(now),
            fetch_wait: (self.fetch_free_at - now).max(0.0),
            service: self.service,
        }
    }

    fn prefill_wait(&self, now: Seconds) -> Seconds {
        let own = self.queue.wait(now);
        match self.report {
            // What others sent stands in the same queue; the engine has worked since the report.
            Some(report) if report.foreign > 0.0 => own.max(report.foreign + report.own - (now - report.at)),
            _ => own,
        }
    }

    /// Enters a request that comes to this engine, for prefill or for decode.
    pub(crate) fn enter(&mut self) {
        self.in_flight += 1;
    }

    /// Strikes a request out that [`EngineBook::enter`] entered.
    pub(crate) fn leave(&mut self) {
        self.in_flight -= 1;
    }

    pub(crate) fn hold_decode(&mut self, tokens: u64) {
        self.decode_tokens += tokens;
    }

    pub(crate) fn release_decode(&mut self, tokens: u64) {
        self.decode_tokens -= tokens;
    }

    pub(crate) fn push_prefill(&mut self, now: Seconds, ticket: Ticket, tokens: u64, estimate: &Estimate) {
        let ready = now + estimate.fetch;
        if estimate.fetched_tokens > 0 {
            self.fetch_free_at = self.fetch_free_at.max(ready);
        }
        if let Some(report) = &mut self.report {
            report.own += estimate.service;
        }
        self.queue.push(now, Queued { ticket, tokens, service: estimate.service, ready });
    }

    /// Takes a prefill out whose first token has come; `None` if it is not (or no longer) in the queue.
    pub(crate) fn computed(&mut self, now: Seconds, ticket: Ticket) -> Option<Computed> {
        let (_, queued) = self.queue.remove(ticket)?;
        let begun = self.queue.free_at.max(queued.ready);
        self.queue.free_at = now;
        self.queue.predict();
        Some(Computed { took: now - begun, expected: queued.service })
    }

    /// Takes a prefill out that ended without a first token.
    pub(crate) fn abandoned(&mut self, now: Seconds, ticket: Ticket) {
        if let Some((position, _)) = self.queue.remove(ticket) {
            if position == 0 {
                self.queue.free_at = now;
            }
            self.queue.predict();
        }
    }

    pub(crate) fn reported(&mut self, now: Seconds, said: Reported) {
        let running = self.queue.waiting.front().map_or(0, |head| head.tokens);
        let own_waiting = self.queue.tokens - running;
        let foreign_tokens = said.waiting_uncached_tokens.saturating_sub(own_waiting);
        let foreign = self.service.speed * self.service.a * foreign_tokens as f64;
        self.report = Some(Report { at: now, said, foreign, own: self.queue.wait(now) });
    }

    /// Nothing is entered any more.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight == 0
            && self.decode_tokens == 0
            && self.queue.tokens == 0
            && self.queue.waiting.is_empty()
    }
}

impl PrefillQueue {
    fn push(&mut self, now: Seconds, queued: Queued) {
        if self.waiting.is_empty() {
            self.free_at = now;
            self.head_end = now;
            self.end = now;
        }
        let late = (now - self.head_end).max(0.0);
        self.head_end += late;
        self.end += late;
        self.tokens += queued.tokens;
        self.end = self.end.max(queued.ready) + queued.service;
        if self.waiting.is_empty() {
            self.head_end = self.end;
        }
        self.waiting.push_back(queued);
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

    /// Until all are done. A head that takes longer than predicted is believed to end any moment.
    fn wait(&self, now: Seconds) -> Seconds {
        if self.waiting.is_empty() {
            return 0.0;
        }
        (self.head_end - now).max(0.0) + (self.end - self.head_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(service: Seconds, fetch: Seconds) -> Estimate {
        let fetched_tokens = if fetch > 0.0 { 1000 } else { 0 };
        Estimate { wait: 0.0, fetch, service, cached_tokens: fetched_tokens, fetched_tokens }
    }

    fn book() -> EngineBook {
        EngineBook::new(ServiceModel::default())
    }

    #[test]
    fn prefills_queue_behind_each_other() {
        let mut book = book();
        book.push_prefill(10.0, Ticket(1), 100, &estimate(2.0, 0.0));
        book.push_prefill(10.0, Ticket(2), 100, &estimate(3.0, 0.0));
        assert_eq!(book.load(10.0).prefill_wait, 5.0);
        assert_eq!(book.load(11.5).prefill_wait, 3.5);
        // Late: the first is due, the second has still to run.
        assert_eq!(book.load(14.0).prefill_wait, 3.0);
        assert_eq!(book.computed(14.0, Ticket(1)), Some(Computed { took: 4.0, expected: 2.0 }));
        assert_eq!(book.load(15.0).prefill_wait, 2.0);
        assert_eq!(book.computed(17.0, Ticket(2)), Some(Computed { took: 3.0, expected: 3.0 }));
        assert_eq!(book.load(17.0).prefill_wait, 0.0);
        assert_eq!(book.load(17.0).pending_prefill_tokens, 0);
    }

    #[test]
    fn a_fetch_delays_its_prefill_and_the_next_fetch() {
        let mut book = book();
        book.push_prefill(0.0, Ticket(1), 100, &estimate(1.0, 4.0));
        assert_eq!(book.load(0.0).prefill_wait, 5.0);
        assert_eq!(book.load(1.0).fetch_wait, 3.0);
        assert_eq!(book.computed(6.0, Ticket(1)), Some(Computed { took: 2.0, expected: 1.0 }));
    }

    #[test]
    fn an_abandoned_prefill_leaves_the_rest_its_place() {
        let mut book = book();
        book.push_prefill(0.0, Ticket(1), 100, &estimate(2.0, 0.0));
        book.push_prefill(0.0, Ticket(2), 100, &estimate(3.0, 0.0));
        book.push_prefill(0.0, Ticket(3), 100, &estimate(4.0, 0.0));
        book.abandoned(1.0, Ticket(2));
        assert_eq!(book.load(1.0).prefill_wait, 5.0);
        book.abandoned(1.0, Ticket(1));
        assert_eq!(book.load(1.0).prefill_wait, 4.0);
        book.abandoned(1.0, Ticket(1));
        assert_eq!(book.load(1.0).pending_prefill_tokens, 100);
    }

    #[test]
    fn work_of_other_gateways_comes_from_the_report_and_shrinks() {
        let mut book = EngineBook::new(ServiceModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 });
        book.push_prefill(0.0, Ticket(1), 1000, &estimate(1.0, 0.0));
        book.reported(0.0, Reported { waiting_uncached_tokens: 5000, ..Reported::default() });
        assert_eq!(book.load(0.0).prefill_wait, 6.0);
        assert_eq!(book.load(2.0).prefill_wait, 4.0);
        book.push_prefill(2.0, Ticket(2), 1000, &estimate(1.0, 0.0));
        assert_eq!(book.load(2.0).prefill_wait, 5.0);
        book.reported(3.0, Reported { waiting_uncached_tokens: 0, ..Reported::default() });
        assert_eq!(book.load(3.0).prefill_wait, 1.0);
        assert_eq!(book.load(4.0).reported.unwrap().age, 1.0);
    }
}
