//! The event loop of the simulation: clocks, requests to the coordinator, calls and faults.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use fastrand::Rng;
use moongate_master::ha::{
    ElectionAction, ElectionResponse, ElectorOutput, InSyncSet, InSyncUpdateOutcome, LeaderTerm,
};

use super::coordinator::SimulatedCoordinator;
use super::master::{SILENCE_TIMEOUT, SimulatedMaster, SimulatedRecord, TIMES};

pub(crate) const MASTERS: usize = 3;
/// Index of the coordinator in partitions.
pub(crate) const STORE: usize = MASTERS;
/// Duration of the period with faults, and of the one without, in microseconds.
const FAULT_PERIOD_US: u64 = 30_000_000;
const QUIET_PERIOD_US: u64 = 12_000_000;
const STEP: u64 = 50_000;

#[derive(Clone, Copy)]
pub(crate) struct HaFaultPlan {
    pub(crate) enabled: bool,
    /// Defect: leaders reply before their followers have acknowledged.
    pub(crate) skips_follower_acks: bool,
    /// Defect: the masters' clocks run slower than the lease margin allows.
    pub(crate) slow_clocks: bool,
    /// Defect: followers acknowledge records that are not on their disks.
    pub(crate) acks_before_write: bool,
    /// Defect: leaders resume followers that may have other records.
    pub(crate) skips_epoch_check: bool,
}

impl Default for HaFaultPlan {
    fn default() -> Self {
        Self { enabled: true, ..Self::NONE }
    }
}

impl HaFaultPlan {
    pub(crate) const NONE: Self = Self {
        enabled: false,
        skips_follower_acks: false,
        slow_clocks: false,
        acks_before_write: false,
        skips_epoch_check: false,
    };
}

pub(crate) enum HaSimulationEvent {
    Step(usize, u64),
    /// A request reaches the coordinator: master, process, number, send time.
    ActionSent(usize, u64, u64, Duration, ElectionAction),
    ResponseReceived(usize, u64, u64, Duration, ElectionResponse),
    /// An in-sync update reaches the coordinator: master, process, number, arguments.
    InSyncUpdateSent(usize, u64, u64, (LeaderTerm, Option<i64>, InSyncSet)),
    InSyncUpdateDone(usize, u64, u64, Option<InSyncUpdateOutcome>, i64),
    /// Bytes on a connection reach a master. The flag is set if it is the leader.
    Message(u64, usize, u64, bool, Vec<u8>),
    Call,
    InjectFault,
    Heal(usize, usize),
    Restart(usize),
}

pub(crate) struct HaSimulation {
    pub(crate) seed: u64,
    pub(crate) rng: Rng,
    pub(crate) faults: HaFaultPlan,
    pub(crate) now: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, HaSimulationEvent>,
    numbers: u64,
    pub(crate) store: SimulatedCoordinator,
    pub(crate) masters: Vec<SimulatedMaster>,
    /// Pairs that cannot reach each other.
    pub(crate) cuts: BTreeSet<(usize, usize)>,
    /// Arrival time of the last bytes in each direction of a connection.
    pub(crate) arrivals: BTreeMap<(u64, bool), u64>,
    /// Whether masters keep their state across a crash.
    pub(crate) durable: bool,
    pub(crate) acknowledged: BTreeSet<u64>,
    pub(crate) elected: usize,
    pub(crate) crashes: usize,
    pub(crate) refused: usize,
    /// Numbers of full copies and of resumed logs.
    pub(crate) copied: usize,
    pub(crate) resumed: usize,
}

impl HaSimulation {
    pub(crate) fn new(seed: u64, faults: HaFaultPlan) -> Self {
        let mut rng = Rng::with_seed(seed);
        let masters = (0..MASTERS).map(|number| {
            let rate = if faults.slow_clocks { 0.4 } else { 0.8 + 0.4 * rng.f64() };
            let mut master = SimulatedMaster::new(number, rng.u64(0..10_000_000), rate, rng.u64(..));
            master.replica.acks_before_write = faults.acks_before_write;
            master
        });
        let masters = masters.collect();
        let mut simulation = Self {
            seed,
            durable: rng.bool(),
            rng,
            faults,
            now: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            numbers: 0,
            store: SimulatedCoordinator::default(),
            masters,
            cuts: BTreeSet::new(),
            arrivals: BTreeMap::new(),
            acknowledged: BTreeSet::new(),
            elected: 0,
            crashes: 0,
            refused: 0,
            copied: 0,
            resumed: 0,
        };
        (0..MASTERS).for_each(|index| simulation.after(0, HaSimulationEvent::Step(index, 0)));
        simulation.after(3_000_000, HaSimulationEvent::Call);
        simulation.after(3_000_000, HaSimulationEvent::InjectFault);
        simulation
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(crate) fn after(&mut self, delay: u64, event: HaSimulationEvent) {
        let number = self.number();
        self.queue.push(Reverse((self.now + delay, number)));
        self.events.insert(number, event);
    }

    pub(crate) fn delay(&mut self) -> u64 {
        match self.rng.u32(0..200) {
            0 if self.faults.enabled => self.rng.u64(0..2_000_000),
            _ => self.rng.u64(100..3_000),
        }
    }

    pub(crate) fn is_cut(&self, one: usize, other: usize) -> bool {
        self.cuts.contains(&(one.min(other), one.max(other)))
    }

    pub(crate) fn run(&mut self) {
        self.run_until(FAULT_PERIOD_US);
        self.faults.enabled = false;
        self.cuts.clear();
        for index in 0..MASTERS {
            self.masters[index].asleep_until = self.now;
            if !self.masters[index].alive {
                self.restart(index);
            }
        }
        self.run_until(FAULT_PERIOD_US + QUIET_PERIOD_US);
        let leaders: Vec<usize> =
            (0..MASTERS).filter(|index| self.masters[*index].serves(self.now)).collect();
        assert_eq!(leaders.len(), 1, "seed {}: no leader without faults", self.seed);
        assert_eq!(self.store.members().len(), MASTERS, "seed {}: not all are in sync", self.seed);
        self.check(leaders[0]);
        let values = self.masters[leaders[0]].replica.current.values();
        for other in &self.masters {
            let others = other.replica.current.values();
            let foreign = others.difference(&values).next();
            assert_eq!(foreign, None, "seed {}: a master has a value that its leader never had", self.seed);
        }
    }

    fn run_until(&mut self, end: u64) {
        while let Some(Reverse((time, number))) = self.queue.peek().copied()
            && time < end
        {
            self.queue.pop();
            self.now = time;
            if let Some(event) = self.events.remove(&number) {
                self.handle(number, event);
            }
        }
        self.now = end;
    }

    /// Handles an event. Events for a paused master are delayed, those for an ended process dropped.
    fn handle(&mut self, number: u64, event: HaSimulationEvent) {
        let target = match &event {
            HaSimulationEvent::Step(index, process)
            | HaSimulationEvent::ResponseReceived(index, process, ..)
            | HaSimulationEvent::InSyncUpdateDone(index, process, ..) => Some((*index, *process)),
            HaSimulationEvent::Message(_, index, process, ..) => Some((*index, *process)),
            _ => None,
        };
        if let Some((index, process)) = target {
            let master = &self.masters[index];
            if !master.alive || master.process_number != process {
                return;
            }
            if master.asleep_until > self.now {
                self.queue.push(Reverse((master.asleep_until, number)));
                self.events.insert(number, event);
                return;
            }
        }
        match event {
            HaSimulationEvent::Step(index, process) => {
                self.step(index);
                self.after(STEP, HaSimulationEvent::Step(index, process));
            }
            HaSimulationEvent::ActionSent(index, process, number, sent, action) => {
                let response = self.store.execute(self.now, &action);
                if !self.is_cut(index, STORE) {
                    let delay = self.delay();
                    self.after(
                        delay,
                        HaSimulationEvent::ResponseReceived(index, process, number, sent, response),
                    );
                }
            }
            HaSimulationEvent::ResponseReceived(index, _, number, sent, response) => {
                self.handle_response(index, number, sent, response);
            }
            HaSimulationEvent::InSyncUpdateSent(index, process, number, list) => {
                self.send_in_sync_update(index, process, number, &list);
            }
            HaSimulationEvent::InSyncUpdateDone(index, _, number, outcome, revision) => {
                self.handle_in_sync_update(index, number, outcome, revision);
            }
            HaSimulationEvent::Message(connection, index, _, to_leader, bytes) => {
                self.message(connection, index, to_leader, &bytes);
            }
            HaSimulationEvent::Call => self.call(),
            HaSimulationEvent::InjectFault => self.inject_fault(),
            HaSimulationEvent::Heal(one, other) => _ = self.cuts.remove(&(one, other)),
            HaSimulationEvent::Restart(index) if !self.masters[index].alive => self.restart(index),
            HaSimulationEvent::Restart(_) => {}
        }
    }

    /// Runs one step of a master, which is called periodically and after messages.
    pub(crate) fn step(&mut self, index: usize) {
        let clock = self.masters[index].clock(self.now);
        self.elect(index, clock);
        let master = &mut self.masters[index];
        if master.leader_state.as_ref().map(|leader| leader.leader_term)
            != master.elector.leading(clock).map(|(leader_term, _)| leader_term)
        {
            master.leader_state = None;
        }
        if master.leader_state.is_some() {
            self.lead(index, clock);
        } else {
            self.follow(index, clock);
        }
    }

    fn elect(&mut self, index: usize, clock: Duration) {
        let master = &mut self.masters[index];
        if let Some((_, sent)) = master.pending_action {
            if clock < sent + TIMES.response_timeout() {
                return;
            }
            master.pending_action = None;
            master.elector.handle_response(sent, clock, ElectionResponse::Failed);
        }
        match master.elector.poll(clock) {
            ElectorOutput::Act(action) => {
                if matches!(action, ElectionAction::Campaign(_)) {
                    master.link = None;
                    master.replica.loading = None;
                }
                let process = master.process_number;
                let number = self.number();
                self.masters[index].pending_action = Some((number, clock));
                if !self.is_cut(index, STORE) {
                    let delay = self.delay();
                    self.after(delay, HaSimulationEvent::ActionSent(index, process, number, clock, action));
                }
            }
            // The next step is scheduled anyway.
            ElectorOutput::Wait(_) => {}
        }
    }

    fn handle_response(&mut self, index: usize, number: u64, sent: Duration, response: ElectionResponse) {
        let now = self.now;
        let clock = self.masters[index].clock(now);
        let master = &mut self.masters[index];
        if master.pending_action.is_none_or(|(pending, _)| pending != number) {
            return;
        }
        master.pending_action = None;
        let has_won = matches!(response, ElectionResponse::CampaignResult(Some(_)));
        master.elector.handle_response(sent, clock, response);
        if has_won && let Some((leader_term, _)) = master.elector.leading(clock) {
            master.begin_to_lead(leader_term, self.rng.u64(..));
            self.elected += 1;
            let others = (0..MASTERS).filter(|other| *other != index && self.masters[*other].serves(now));
            assert_eq!(others.count(), 0, "seed {}: two masters lead at once", self.seed);
            self.check(index);
        }
        self.step(index);
    }

    /// Checks that a leader has every acknowledged value.
    fn check(&self, index: usize) {
        let values = self.masters[index].replica.current.values();
        if let Some(missing) = self.acknowledged.difference(&values).next() {
            panic!("seed {}: {missing} is missing at master {index}", self.seed);
        }
    }

    fn lead(&mut self, index: usize, clock: Duration) {
        let number = self.number();
        let SimulatedMaster { leader_state: Some(leader_state), process_number: process, .. } =
            &mut self.masters[index]
        else {
            return;
        };
        leader_state.tracker.remove_silent(clock, SILENCE_TIMEOUT);
        if leader_state
            .update_in_flight
            .as_ref()
            .is_some_and(|(_, _, sent)| clock >= *sent + TIMES.response_timeout())
        {
            (leader_state.update_in_flight, leader_state.revision) = (None, None);
        }
        if leader_state.update_in_flight.is_none()
            && let Some(members) = leader_state.tracker.pending_in_sync()
        {
            leader_state.update_in_flight = Some((number, members.clone(), clock));
            let (process, list) = (*process, (leader_state.leader_term, leader_state.revision, members));
            if !self.is_cut(index, STORE) {
                let delay = self.delay();
                self.after(delay, HaSimulationEvent::InSyncUpdateSent(index, process, number, list));
            }
        }
        self.send_updates(index, clock);
        self.reply_to_callers(index);
    }

    /// An in-sync update, or a read of the revision, reaches the coordinator, possibly long after its timeout.
    fn send_in_sync_update(
        &mut self,
        index: usize,
        process: u64,
        number: u64,
        (leader_term, revision, members): &(LeaderTerm, Option<i64>, InSyncSet),
    ) {
        let outcome =
            revision.map(|revision| self.store.update_in_sync(self.now, *leader_term, revision, members));
        let revision = self.store.in_sync_revision();
        if !self.is_cut(index, STORE) {
            let delay = self.delay();
            self.after(delay, HaSimulationEvent::InSyncUpdateDone(index, process, number, outcome, revision));
        }
    }

    fn handle_in_sync_update(
        &mut self,
        index: usize,
        number: u64,
        outcome: Option<InSyncUpdateOutcome>,
        revision: i64,
    ) {
        let master = &mut self.masters[index];
        let Some(leader_state) = &mut master.leader_state else { return };
        let Some((_, members, _)) = leader_state.update_in_flight.take_if(|(pending, ..)| *pending == number)
        else {
            return;
        };
        match outcome {
            None => leader_state.revision = Some(revision),
            Some(InSyncUpdateOutcome::Stored(revision)) => {
                leader_state.revision = Some(revision);
                leader_state.tracker.confirm_in_sync(members);
            }
            Some(InSyncUpdateOutcome::Conflict) => leader_state.revision = None,
            Some(InSyncUpdateOutcome::Deposed) => master.elector.mark_deposed(),
        }
        self.step(index);
    }

    /// A client writes a value at a serving master.
    fn call(&mut self) {
        let delay = self.rng.u64(20_000..100_000);
        self.after(delay, HaSimulationEvent::Call);
        let (now, value) = (self.now, self.number());
        let is_serving = |master: &SimulatedMaster| master.serves(now) && master.asleep_until <= now;
        let Some(index) = self.masters.iter().position(is_serving) else {
            self.refused += 1;
            return;
        };
        let master = &mut self.masters[index];
        let state = &mut master.replica.current;
        state.append(SimulatedRecord::Value(value));
        if let Some(leader_state) = &mut master.leader_state {
            leader_state.pending_callers.push((state.last(), value));
        }
        self.step(index);
    }

    fn reply_to_callers(&mut self, index: usize) {
        if !self.masters[index].serves(self.now) {
            return;
        }
        let SimulatedMaster { leader_state: Some(leader_state), replica, .. } = &mut self.masters[index]
        else {
            return;
        };
        // Its own disk is written first.
        replica.written = replica.current.last();
        let all = self.faults.skips_follower_acks;
        let replied = leader_state
            .pending_callers
            .extract_if(.., |(number, _)| all || leader_state.tracker.is_acknowledged(*number));
        self.acknowledged.extend(replied.map(|(_, value)| value));
    }
}
