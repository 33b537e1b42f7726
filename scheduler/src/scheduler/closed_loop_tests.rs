//! Clients that send their next request when the last one has its answer, in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::tests::{scheduler, submission};
use super::*;
use crate::policy::PolicyName;

const CLIENTS: u64 = 32;

/// Seconds in which an engine answers a prompt of any length.
const ANSWER: Seconds = 0.0003;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ClosedLoopEvent {
    NextRequest,
    FirstToken(AttemptId),
    Poll,
}

/// A gateway on one core, of which each event takes time, before two prefills and a decode.
struct ClosedLoop {
    scheduler: Scheduler,
    /// By time in nanoseconds.
    events: BinaryHeap<Reverse<(u64, ClosedLoopEvent)>>,
    now: Seconds,
    sent: u64,
    arrived: BTreeMap<AttemptId, Seconds>,
}

impl ClosedLoop {
    fn new() -> Self {
        let scheduler = scheduler(PolicyName::Predictive, &["p0", "p1", "d0"]);
        let mut closed_loop =
            Self { scheduler, events: BinaryHeap::new(), now: 0.0, sent: 0, arrived: BTreeMap::new() };
        (0..CLIENTS).for_each(|client| closed_loop.push(client as f64 * 1e-6, ClosedLoopEvent::NextRequest));
        closed_loop
    }

    fn push(&mut self, at: Seconds, event: ClosedLoopEvent) {
        self.events.push(Reverse(((at * 1e9) as u64, event)));
    }

    /// Serves this many requests with prompts of about `tokens`; returns the longest time to a first token.
    fn serve(&mut self, requests: u64, tokens: u32, gateway: Seconds) -> Seconds {
        let (mut answered, mut longest): (u64, Seconds) = (0, 0.0);
        while answered < requests {
            let Reverse((at, event)) = self.events.pop().unwrap();
            let at = at as f64 * 1e-9;
            self.now = self.now.max(at);
            match event {
                ClosedLoopEvent::NextRequest => {
                    let attempt = AttemptId(self.sent);
                    self.sent += 1;
                    self.arrived.insert(attempt, at);
                    let tokens = tokens + (self.sent % 10) as u32;
                    self.scheduler.submit(self.now, attempt, submission(tokens));
                    self.now += gateway / 2.0;
                }
                ClosedLoopEvent::FirstToken(attempt) => {
                    self.scheduler.first_token(self.now, attempt, Some(0));
                    self.scheduler.ended(self.now, attempt);
                    self.now += gateway / 2.0;
                    answered += 1;
                    longest = longest.max(self.now - self.arrived.remove(&attempt).unwrap());
                    self.push(self.now, ClosedLoopEvent::NextRequest);
                }
                ClosedLoopEvent::Poll => {}
            }
            self.poll();
        }
        longest
    }

    fn poll(&mut self) {
        let mut events = Vec::new();
        self.scheduler.poll(self.now, 7, &mut events);
        for event in events {
            let SchedulerEvent::Send { attempt, .. } = event else { panic!("{event:?}") };
            self.push(self.now + ANSWER, ClosedLoopEvent::FirstToken(attempt));
        }
        if let Some(next) = self.scheduler.next_poll_at() {
            self.push(next.max(self.now + 1e-6), ClosedLoopEvent::Poll);
        }
    }
}

#[test]
fn times_of_short_prompts_queue_no_long_ones() {
    let mut closed_loop = ClosedLoop::new();
    closed_loop.serve(30_000, 50, 66e-6);
    let longest = closed_loop.serve(5_000, 8_000, 120e-6);
    // 32 requests of which each takes the gateway 120 us.
    assert!(longest < 0.02, "{longest}");
    let longest = closed_loop.serve(5_000, 50, 66e-6);
    assert!(longest < 0.02, "{longest}");
}
