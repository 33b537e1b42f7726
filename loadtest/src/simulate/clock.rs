//! What happens when.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Something that happens at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Event {
    /// A request reaches a gateway.
    Arrive(u32),
    /// A read from the shared store ends: engine, turn, life.
    Fetched(u32, u32, u32),
    /// An engine may begin a pass.
    Begin(u32),
    /// An engine's pass ends: engine, life.
    Passed(u32, u32),
    /// A prompt's KV cache has reached the decode engine: attempt.
    HandedOver(u32),
    /// A sequence ends: decode engine, turn.
    Decoded(u32, u32),
    /// Gateways read the engines' load.
    Poll,
    /// A gateway's scheduler wanted to be called: gateway, serial number of the wish.
    Wake(u32, u32),
    /// The closed loop's sender looks what it can send.
    Tick,
    /// A request leaves the closed loop's books.
    Freed(u32),
    /// An engine dies; counted as in `Failure`.
    Die(u32),
    /// … and comes back.
    Return(u32),
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    at: f64,
    serial: u64,
    event: Event,
}

impl Ord for Entry {
    /// The earliest is the greatest; of equal times, the one that was planned first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at).then(other.serial.cmp(&self.serial))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

/// The plan of what is to come.
#[derive(Debug, Default)]
pub(crate) struct Calendar {
    heap: BinaryHeap<Entry>,
    serial: u64,
}

impl Calendar {
    pub(crate) fn plan(&mut self, at: f64, event: Event) {
        self.serial += 1;
        self.heap.push(Entry { at, serial: self.serial, event });
    }

    pub(crate) fn next(&mut self) -> Option<(f64, Event)> {
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_then_of_planning() {
        let mut calendar = Calendar::default();
        calendar.plan(2.0, Event::Poll);
        calendar.plan(1.0, Event::Tick);
        calendar.plan(1.0, Event::Arrive(7));
        let order: Vec<(f64, Event)> = std::iter::from_fn(|| calendar.next()).collect();
        assert_eq!(order, [(1.0, Event::Tick), (1.0, Event::Arrive(7)), (2.0, Event::Poll)]);
    }
}
