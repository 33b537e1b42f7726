//! The loop: what is due happens, and the controlling side is told.

use std::sync::atomic::{AtomicBool, Ordering};

use super::clock::Event;
use super::fleet::{Fleet, Notice};
use super::outcome::Outcome;
use super::settings::Settings;
use super::workload::{Source, Workload};

/// A run in which nothing has gone forward for this many simulated seconds is over.
const STUCK_S: f64 = 3_600.0;

/// Who decides where requests go.
pub(crate) trait Control {
    /// A request arrives.
    fn arrive(&mut self, now: f64, request: u32, fleet: &mut Fleet<'_>);
    /// An engine tells something.
    fn notice(&mut self, now: f64, notice: Notice, fleet: &mut Fleet<'_>);
    /// What there was to tell at this time has been told.
    fn settle(&mut self, now: f64, fleet: &mut Fleet<'_>);
    /// The engines' load is read.
    fn poll(&mut self, now: f64, fleet: &mut Fleet<'_>);
    /// A wish to be called has come due.
    fn wake(&mut self, now: f64, gateway: usize, serial: u32, fleet: &mut Fleet<'_>);
}

/// Plays a workload through, or until `stop` is set. Equal arguments give equal outcomes.
pub(crate) fn play(
    settings: &Settings,
    workload: &Workload,
    seed: u64,
    control: &mut dyn Control,
    stop: &AtomicBool,
) -> Outcome {
    let mut fleet = Fleet::new(settings, workload, seed);
    begin(&mut fleet);
    while fleet.outcome.open > 0 {
        let Some((now, event)) = fleet.calendar.next() else { break };
        if now > fleet.outcome.progress_s + STUCK_S || stop.load(Ordering::Relaxed) {
            break;
        }
        match event {
            Event::Arrive(request) => {
                fleet.outcome.arrived(now, request);
                control.arrive(now, request, &mut fleet);
            }
            Event::Poll => {
                control.poll(now, &mut fleet);
                fleet.calendar.plan(now + settings.poll_s, Event::Poll);
            }
            Event::Wake(gateway, serial) => control.wake(now, gateway as usize, serial, &mut fleet),
            Event::Tick => tick(now, &mut fleet),
            Event::Freed(_) => {
                if let Source::Closed(sender) = &mut fleet.source {
                    sender.freed();
                }
            }
            event => fleet.happen(now, event),
        }
        tell(now, control, &mut fleet);
    }
    fleet.outcome.busy_s = fleet.prefills.iter().map(|prefill| prefill.busy_s).collect();
    fleet.outcome
}

/// Tells everything; sending may cause more to tell.
fn tell(now: f64, control: &mut dyn Control, fleet: &mut Fleet<'_>) {
    let mut told = false;
    let mut notices = std::mem::take(&mut fleet.notices);
    while !notices.is_empty() {
        for notice in notices.drain(..) {
            control.notice(now, notice, fleet);
        }
        std::mem::swap(&mut notices, &mut fleet.notices);
        told = true;
    }
    fleet.notices = notices;
    if told {
        control.settle(now, fleet);
        if !fleet.notices.is_empty() {
            tell(now, control, fleet);
        }
    }
}

fn begin(fleet: &mut Fleet<'_>) {
    match fleet.source {
        Source::Open => {
            for (number, request) in (0_u32..).zip(&fleet.workload.requests) {
                if request.after.is_none() {
                    fleet.calendar.plan(request.due_s, Event::Arrive(number));
                }
            }
        }
        Source::Closed(_) => fleet.calendar.plan(0.0, Event::Tick),
    }
    if fleet.settings.poll_s > 0.0 {
        fleet.calendar.plan(0.0, Event::Poll);
    }
    for failure in &fleet.settings.failures {
        let engine = u32::try_from(failure.engine).unwrap_or(u32::MAX);
        fleet.calendar.plan(failure.at_s, Event::Die(engine));
        fleet.calendar.plan(failure.at_s + failure.for_s, Event::Return(engine));
    }
}

fn tick(now: f64, fleet: &mut Fleet<'_>) {
    let Source::Closed(sender) = &mut fleet.source else { return };
    let (request, pause) = sender.tick();
    if let Some(request) = request {
        fleet.calendar.plan(now, Event::Arrive(request));
    }
    if let Some(pause) = pause {
        fleet.calendar.plan(now + pause, Event::Tick);
    }
}
