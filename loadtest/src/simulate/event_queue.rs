//! The event queue of the simulation.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use moongate_scheduler::InstanceIndex;

use super::indices::{AttemptIndex, DecodeIndex, GatewayIndex, PrefillIndex, WorkloadIndex};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum SimulationEvent {
    /// A request reaches a gateway.
    RequestArrived(WorkloadIndex),
    /// A request has been passed on to the gateway that decides for all.
    TicketArrived(WorkloadIndex),
    /// A read from the shared store ends.
    FetchEnded {
        engine: PrefillIndex,
        engine_epoch: u32,
        fetch_epoch: u32,
    },
    /// An engine may start a pass.
    StartPass(PrefillIndex),
    /// An engine's pass ends.
    PassEnded {
        engine: PrefillIndex,
        engine_epoch: u32,
    },
    /// A prompt's KV cache has reached the decode engine.
    KvTransferred(AttemptIndex),
    /// A sequence ends.
    SequenceEnded {
        engine: DecodeIndex,
        batch_epoch: u32,
    },
    /// Gateways poll the engines' load.
    Poll,
    /// A gateway's scheduler requested a poll. `serial` numbers its requests.
    SchedulerWakeup {
        gateway: GatewayIndex,
        serial: u32,
    },
    /// The next background request is sent, if the fleet is idle.
    BackgroundTick,
    /// The sender of the closed loop checks what it can send.
    SenderTick,
    /// A request of the closed loop frees its in-flight slot.
    InFlightSlotFreed,
    EngineFailed(InstanceIndex),
    EngineRecovered(InstanceIndex),
}

#[derive(Debug, Clone, Copy)]
struct ScheduledEvent {
    at: f64,
    serial: u64,
    event: SimulationEvent,
}

impl Ord for ScheduledEvent {
    /// The earliest is the greatest; of equal times, the one that was scheduled first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at).then(other.serial.cmp(&self.serial))
    }
}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for ScheduledEvent {}

/// Scheduled events in order of time.
#[derive(Debug, Default)]
pub(crate) struct SimulationEventQueue {
    heap: BinaryHeap<ScheduledEvent>,
    serial: u64,
}

impl SimulationEventQueue {
    pub(crate) fn schedule(&mut self, at: f64, event: SimulationEvent) {
        self.serial += 1;
        self.heap.push(ScheduledEvent { at, serial: self.serial, event });
    }

    pub(crate) fn next(&mut self) -> Option<(f64, SimulationEvent)> {
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_then_of_planning() {
        let mut calendar = SimulationEventQueue::default();
        calendar.schedule(2.0, SimulationEvent::Poll);
        calendar.schedule(1.0, SimulationEvent::SenderTick);
        calendar.schedule(1.0, SimulationEvent::RequestArrived(WorkloadIndex::new(7)));
        let order: Vec<(f64, SimulationEvent)> = std::iter::from_fn(|| calendar.next()).collect();
        assert_eq!(
            order,
            [
                (1.0, SimulationEvent::SenderTick),
                (1.0, SimulationEvent::RequestArrived(WorkloadIndex::new(7))),
                (2.0, SimulationEvent::Poll)
            ]
        );
    }
}
