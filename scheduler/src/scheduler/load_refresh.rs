//! Keeps the loads of all engines up to date. In a large fleet most of them have not changed between two decisions.

use super::Scheduler;
use crate::fleet::InstanceIndex;
use crate::seconds::Seconds;

/// From this number of engines on, a decision refreshes only those that have changed, unless [`MAX_LOAD_AGE_PER_ENGINE`] has passed.
const LARGE_FLEET: usize = 128;

/// Age up to which the loads of engines without an event are used, for each engine of the fleet: their waits are too long by at most that
/// time, and what was learned from other engines in that time is not applied. Refreshing an engine takes a two-hundredth of it.
const MAX_LOAD_AGE_PER_ENGINE: Seconds = 8e-6;

/// Events that are recorded until the next refresh; after more of them, all engines are refreshed.
const MAX_CHANGED: usize = 4096;

/// Which loads are to be refreshed, and which have been.
#[derive(Debug)]
pub(super) struct LoadRefresh {
    /// Time of the latest refresh of all engines.
    all_at: Seconds,
    /// Engines with events since the loads were refreshed.
    changed: Vec<InstanceIndex>,
    /// Engines whose loads were refreshed since the last round; `None` if all were.
    refreshed: Option<Vec<InstanceIndex>>,
    /// When the load of each engine was refreshed.
    refreshed_at: Vec<Seconds>,
    /// [`LARGE_FLEET`], except in tests.
    pub(super) large_fleet: usize,
}

impl Default for LoadRefresh {
    fn default() -> Self {
        Self {
            all_at: f64::NEG_INFINITY,
            changed: Vec::new(),
            refreshed: None,
            refreshed_at: Vec::new(),
            large_fleet: LARGE_FLEET,
        }
    }
}

impl LoadRefresh {
    /// The engine's state has changed.
    pub(super) fn mark(&mut self, ix: InstanceIndex) {
        if self.changed.len() < MAX_CHANGED {
            self.changed.push(ix);
        } else {
            self.changed.clear();
            self.all_at = f64::NEG_INFINITY;
        }
    }

    /// Engines whose loads differ from those at the last round; `None` if all may.
    pub(super) fn since_last_round(&self) -> Option<&[InstanceIndex]> {
        self.refreshed.as_deref()
    }

    pub(super) fn start_round(&mut self) {
        match &mut self.refreshed {
            Some(refreshed) => refreshed.clear(),
            None => self.refreshed = Some(Vec::new()),
        }
    }

    /// When each load was refreshed.
    pub(super) fn refreshed_at(&self) -> &[Seconds] {
        &self.refreshed_at
    }

    /// The loads of all engines were refreshed.
    fn record_all(&mut self, now: Seconds, engines: usize) {
        self.all_at = now;
        self.changed.clear();
        self.refreshed = None;
        self.refreshed_at.clear();
        self.refreshed_at.resize(engines, now);
    }

    /// The load of an engine was refreshed at once.
    fn record(&mut self, now: Seconds, ix: InstanceIndex) {
        if let Some(refreshed_at) = self.refreshed_at.get_mut(ix.as_usize()) {
            *refreshed_at = now;
        }
        if let Some(refreshed) = &mut self.refreshed {
            refreshed.push(ix);
        }
    }
}

impl Scheduler {
    /// Brings the loads up to date: of all engines, or in a large fleet of those that have changed.
    pub(super) fn refresh_loads(&mut self, now: Seconds) {
        self.now = now;
        self.pending.advance(now);
        let max_age = MAX_LOAD_AGE_PER_ENGINE * self.engines.len() as f64;
        let is_recent = self.loads.len() == self.engines.len() && now - self.load_refresh.all_at < max_age;
        // More events than engines cost as much as all engines.
        let are_few = self.load_refresh.changed.len() < self.engines.len();
        if self.engines.len() >= self.load_refresh.large_fleet && is_recent && are_few {
            while let Some(ix) = self.load_refresh.changed.pop() {
                self.refresh_load(now, ix);
            }
            return;
        }
        self.engines.iter_mut().for_each(|engine| engine.advance(now));
        self.loads.clear();
        let learned = self.groups.by_engine();
        self.loads
            .extend(self.engines.iter().zip(learned).map(|(engine, learned)| engine.load(now, learned)));
        self.load_refresh.record_all(now, self.engines.len());
    }

    /// Brings the load of one engine up to date.
    pub(super) fn refresh_load(&mut self, now: Seconds, ix: InstanceIndex) {
        if let (Some(load), Some(book), Some(learned)) =
            (self.loads.get_mut(ix.as_usize()), self.engines.get_mut(ix.as_usize()), self.groups.models(ix))
        {
            book.advance(now);
            *load = book.load(now, learned);
            self.load_refresh.record(now, ix);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{scheduler, submission};
    use super::*;
    use crate::attempt::AttemptId;
    use crate::fleet::ReportedLoad;
    use crate::policy::PolicyName;
    use crate::scheduler::SchedulerEvent;

    /// An event at one moment; engines and requests by number.
    #[derive(Debug, Clone)]
    enum FleetEvent {
        Submit { tokens: u32 },
        End { request: usize },
        Report { engine: u32, running: u32 },
        Availability { engine: u32, available: bool },
    }

    fn events() -> impl Strategy<Value = Vec<FleetEvent>> {
        let event = prop_oneof![
            4 => (1..50_000_u32).prop_map(|tokens| FleetEvent::Submit { tokens }),
            2 => (0..20_usize).prop_map(|request| FleetEvent::End { request }),
            1 => (0..6_u32, 0..4_u32).prop_map(|(engine, running)| FleetEvent::Report { engine, running }),
            1 => (0..6_u32, prop::bool::weighted(0.7))
                .prop_map(|(engine, available)| FleetEvent::Availability { engine, available }),
        ];
        prop::collection::vec(event, 1..12)
    }

    struct Replay {
        scheduler: Scheduler,
        submitted: u64,
        sent: Vec<AttemptId>,
    }

    impl Replay {
        fn new(large_fleet: usize) -> Self {
            let mut scheduler = scheduler(PolicyName::Predictive, &["p0", "p1", "p2", "w3", "d4", "d5"]);
            scheduler.load_refresh.large_fleet = large_fleet;
            Self { scheduler, submitted: 0, sent: Vec::new() }
        }

        /// All prompts that were sent have been computed; then everything is refreshed.
        fn compute_all(&mut self, now: Seconds) {
            for attempt in &self.sent {
                self.scheduler.first_token(now, *attempt, Some(0));
            }
            self.scheduler.loads(now);
        }

        fn apply(&mut self, now: Seconds, event: &FleetEvent) -> Vec<SchedulerEvent> {
            match *event {
                FleetEvent::Submit { tokens } => {
                    self.submitted += 1;
                    self.scheduler.submit(now, AttemptId(self.submitted), submission(tokens));
                }
                FleetEvent::End { request } => {
                    if request < self.sent.len() {
                        let attempt = self.sent.remove(request);
                        self.scheduler.ended(now, attempt);
                    }
                }
                FleetEvent::Report { engine, running } => {
                    let reported = ReportedLoad {
                        running,
                        used_tokens: 900,
                        capacity_tokens: 99_000,
                        ..ReportedLoad::default()
                    };
                    self.scheduler.report(now, InstanceIndex(engine), reported);
                }
                FleetEvent::Availability { engine, available } => {
                    self.scheduler.set_available(InstanceIndex(engine), available);
                }
            }
            let mut events = Vec::new();
            self.scheduler.poll(now, self.submitted, &mut events);
            self.sent.extend(events.iter().filter_map(|event| match event {
                SchedulerEvent::Send { attempt, .. } => Some(*attempt),
                SchedulerEvent::Reject { .. } => None,
            }));
            events
        }
    }

    proptest! {
        #[test]
        fn refreshing_what_has_changed_is_enough(moments in prop::collection::vec(events(), 1..6)) {
            let (mut all, mut changed) = (Replay::new(usize::MAX), Replay::new(0));
            for (number, events) in (0..).zip(&moments) {
                let now = 0.03 * f64::from(number);
                all.compute_all(now);
                changed.compute_all(now);
                for event in events {
                    prop_assert_eq!(all.apply(now, event), changed.apply(now, event));
                    prop_assert_eq!(all.scheduler.loads(now), changed.scheduler.loads(now));
                }
            }
        }
    }

    #[test]
    fn events_without_a_decision_take_no_memory() {
        let mut scheduler = scheduler(PolicyName::Predictive, &["w0", "w1"]);
        for _ in 0..3 * MAX_CHANGED {
            scheduler.report(1.0, InstanceIndex(1), ReportedLoad { running: 3, ..ReportedLoad::default() });
        }
        assert!(scheduler.load_refresh.changed.len() <= MAX_CHANGED);
        assert_eq!(scheduler.loads(1.0)[1].external_sequences, 3);
    }
}
