//! The event loop: applies due events and notifies the router.

use std::sync::atomic::{AtomicBool, Ordering};

use moongate_scheduler::InstanceIndex;

use super::event_queue::SimulationEvent;
use super::fleet::{FleetNotification, SimulatedFleet};
use super::indices::{GatewayIndex, WorkloadIndex};
use super::multiturn::SenderStep;
use super::outcome::SimulationResult;
use super::settings::SimulationOptions;
use super::workload::{ArrivalMode, SimulatedWorkload};

/// A run without progress for this many simulated seconds is ended.
const STALL_TIMEOUT_S: f64 = 3_600.0;

/// Decides which engines get which requests.
pub(crate) trait RequestRouter {
    fn on_arrival(&mut self, now: f64, request: WorkloadIndex, fleet: &mut SimulatedFleet<'_>);
    /// An engine sends a notification.
    /// A request has been passed on to the gateway that decides for all.
    fn on_ticket(&mut self, now: f64, request: WorkloadIndex, fleet: &mut SimulatedFleet<'_>) {
        let _ = (now, request, fleet);
    }
    /// A background request may be sent. Returns the time until the next one may be.
    fn on_background_tick(&mut self, now: f64, fleet: &mut SimulatedFleet<'_>) -> f64 {
        let _ = (now, fleet);
        f64::INFINITY
    }
    fn on_notification(&mut self, now: f64, notice: FleetNotification, fleet: &mut SimulatedFleet<'_>);
    /// All notifications of this time have been delivered.
    fn after_notifications(&mut self, now: f64, fleet: &mut SimulatedFleet<'_>);
    /// The engines' load is polled.
    fn on_load_poll(&mut self, now: f64, fleet: &mut SimulatedFleet<'_>);
    /// A requested wake-up is due.
    fn on_wakeup(&mut self, now: f64, gateway: GatewayIndex, serial: u32, fleet: &mut SimulatedFleet<'_>);
}

/// Runs a workload to its end, or until `stop` is set. Equal arguments give equal outcomes.
pub(crate) fn run_simulation(
    settings: &SimulationOptions,
    workload: &SimulatedWorkload,
    seed: u64,
    control: &mut dyn RequestRouter,
    stop: &AtomicBool,
) -> SimulationResult {
    let mut fleet = SimulatedFleet::new(settings, workload, seed);
    schedule_initial_events(&mut fleet);
    while fleet.result.open > 0 {
        let Some((now, event)) = fleet.events.next() else { break };
        if now > fleet.result.progress_s + STALL_TIMEOUT_S || stop.load(Ordering::Relaxed) {
            break;
        }
        match event {
            SimulationEvent::RequestArrived(request) => {
                fleet.result.record_arrival(now, request);
                control.on_arrival(now, request, &mut fleet);
            }
            SimulationEvent::TicketArrived(request) => control.on_ticket(now, request, &mut fleet),
            SimulationEvent::Poll => {
                control.on_load_poll(now, &mut fleet);
                fleet.events.schedule(now + settings.poll_s, SimulationEvent::Poll);
            }
            SimulationEvent::SchedulerWakeup { gateway, serial } => {
                control.on_wakeup(now, gateway, serial, &mut fleet);
            }
            SimulationEvent::SenderTick => sender_tick(now, &mut fleet),
            SimulationEvent::BackgroundTick => {
                let pause_s = control.on_background_tick(now, &mut fleet);
                fleet.events.schedule(now + pause_s, SimulationEvent::BackgroundTick);
            }
            SimulationEvent::InFlightSlotFreed => {
                if let ArrivalMode::Closed(sender) = &mut fleet.source {
                    sender.release_in_flight();
                }
            }
            event => fleet.handle_event(now, event),
        }
        deliver_notifications(now, control, &mut fleet);
    }
    fleet.result.busy_s = fleet.prefills.iter().map(|prefill| prefill.busy_s).collect();
    fleet.result
}

/// Delivers all notifications; sending requests may cause more of them.
fn deliver_notifications(now: f64, control: &mut dyn RequestRouter, fleet: &mut SimulatedFleet<'_>) {
    let mut delivered = false;
    let mut notices = std::mem::take(&mut fleet.notifications);
    while !notices.is_empty() {
        for notice in notices.drain(..) {
            control.on_notification(now, notice, fleet);
        }
        std::mem::swap(&mut notices, &mut fleet.notifications);
        delivered = true;
    }
    fleet.notifications = notices;
    if delivered {
        control.after_notifications(now, fleet);
        if !fleet.notifications.is_empty() {
            deliver_notifications(now, control, fleet);
        }
    }
}

fn schedule_initial_events(fleet: &mut SimulatedFleet<'_>) {
    match fleet.source {
        ArrivalMode::Open => {
            for (position, request) in fleet.workload.requests.iter().enumerate() {
                if request.predecessor.is_none() && !request.class.background {
                    let arrived = SimulationEvent::RequestArrived(WorkloadIndex::new(position));
                    fleet.events.schedule(request.due_s, arrived);
                }
            }
        }
        ArrivalMode::Closed(_) => fleet.events.schedule(0.0, SimulationEvent::SenderTick),
    }
    if fleet.workload.requests.iter().any(|request| request.class.background) {
        fleet.events.schedule(0.0, SimulationEvent::BackgroundTick);
    }
    if fleet.settings.poll_s > 0.0 {
        fleet.events.schedule(0.0, SimulationEvent::Poll);
    }
    for failure in &fleet.settings.failures {
        let engine = InstanceIndex(u32::try_from(failure.engine).unwrap_or(u32::MAX));
        fleet.events.schedule(failure.at_s, SimulationEvent::EngineFailed(engine));
        fleet.events.schedule(failure.at_s + failure.for_s, SimulationEvent::EngineRecovered(engine));
    }
}

fn sender_tick(now: f64, fleet: &mut SimulatedFleet<'_>) {
    let ArrivalMode::Closed(sender) = &mut fleet.source else { return };
    let SenderStep { request, pause_s } = sender.tick();
    if let Some(request) = request {
        fleet.events.schedule(now, SimulationEvent::RequestArrived(request));
    }
    if let Some(pause_s) = pause_s {
        fleet.events.schedule(now + pause_s, SimulationEvent::SenderTick);
    }
}
