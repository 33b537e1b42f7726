//! The clocks, the store's callers, the masters' callers and the trouble.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use fastrand::Rng;
use moongate_master::ha::{
    ElectionAction, ElectionResponse, ElectorOutput, InSyncSet, InSyncUpdateOutcome, LeaderTerm,
};

use crate::coordinator::SimulatedCoordinator;
use crate::master::{SILENCE_TIMEOUT, SimulatedMaster, SimulatedRecord, TIMES};

pub(crate) const MASTERS: usize = 3;
/// The store's place among those who can be cut off.
pub(crate) const STORE: usize = MASTERS;
/// Microseconds of trouble, and of peace after it.
const FAULT_PERIOD_US: u64 = 30_000_000;
const QUIET_PERIOD_US: u64 = 12_000_000;
const STEP: u64 = 50_000;

#[derive(Clone, Copy)]
pub(crate) struct HaFaultPlan {
    /// Crashes, cuts and sleeps.
    pub(crate) enabled: bool,
    /// Leaders answer before their followers have acknowledged.
    pub(crate) skips_follower_acks: bool,
    /// Clocks of masters run so slowly that no margin suffices.
    pub(crate) slow_clocks: bool,
    /// Followers acknowledge what is not on their disks.
    pub(crate) acks_before_write: bool,
    /// Leaders go on with followers that may have other records.
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
    /// A question reaches the store: master, life, number, sent.
    ActionSent(usize, u64, u64, Duration, ElectionAction),
    ResponseReceived(usize, u64, u64, Duration, ElectionResponse),
    /// The same for a list: master, life, number, what.
    InSyncUpdateSent(usize, u64, u64, (LeaderTerm, Option<i64>, InSyncSet)),
    InSyncUpdateDone(usize, u64, u64, Option<InSyncUpdateOutcome>, i64),
    /// Bytes on a connection, towards a master. The flag tells whether it is the leader.
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
    /// Who cannot reach whom.
    pub(crate) cuts: BTreeSet<(usize, usize)>,
    /// When the last bytes of each connection's direction arrive.
    pub(crate) arrivals: BTreeMap<(u64, bool), u64>,
    /// Whether masters keep their state over a crash.
    pub(crate) durable: bool,
    pub(crate) acknowledged: BTreeSet<u64>,
    pub(crate) elected: usize,
    pub(crate) crashes: usize,
    pub(crate) refused: usize,
    /// Whole copies and logs that were gone on with.
    pub(crate) copied: usize,
    pub(crate) resumed: usize,
}

impl HaSimulation {
    pub(crate) fn new(seed: u64, trouble: HaFaultPlan) -> Self {
        let mut rng = Rng::with_seed(seed);
        let masters = (0..MASTERS).map(|number| {
            let rate = if trouble.slow_clocks { 0.4 } else { 0.8 + 0.4 * rng.f64() };
            let mut master = SimulatedMaster::new(number, rng.u64(0..10_000_000), rate, rng.u64(..));
            master.replica.acks_before_write = trouble.acks_before_write;
            master
        });
        let masters = masters.collect();
        let mut world = Self {
            seed,
            durable: rng.bool(),
            rng,
            faults: trouble,
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
        (0..MASTERS).for_each(|at| world.after(0, HaSimulationEvent::Step(at, 0)));
        world.after(3_000_000, HaSimulationEvent::Call);
        world.after(3_000_000, HaSimulationEvent::InjectFault);
        world
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
        for at in 0..MASTERS {
            self.masters[at].asleep_until = self.now;
            if !self.masters[at].alive {
                self.restart(at);
            }
        }
        self.run_until(FAULT_PERIOD_US + QUIET_PERIOD_US);
        let leaders: Vec<usize> = (0..MASTERS).filter(|at| self.masters[*at].serves(self.now)).collect();
        assert_eq!(leaders.len(), 1, "seed {}: nobody leads although all is well", self.seed);
        assert_eq!(self.store.members().len(), MASTERS, "seed {}: not all are in sync", self.seed);
        self.check(leaders[0]);
        let values = self.masters[leaders[0]].replica.current.values();
        for other in &self.masters {
            let others = other.replica.current.values();
            let foreign = others.difference(&values).next();
            assert_eq!(foreign, None, "seed {}: a master has what its leader never had", self.seed);
        }
    }

    fn run_until(&mut self, end: u64) {
        while let Some(Reverse((at, number))) = self.queue.peek().copied()
            && at < end
        {
            self.queue.pop();
            self.now = at;
            if let Some(event) = self.events.remove(&number) {
                self.handle(number, event);
            }
        }
        self.now = end;
    }

    /// What an event is for sleeps or is gone: it is put off, or forgotten.
    fn handle(&mut self, number: u64, event: HaSimulationEvent) {
        let whom = match &event {
            HaSimulationEvent::Step(at, life)
            | HaSimulationEvent::ResponseReceived(at, life, ..)
            | HaSimulationEvent::InSyncUpdateDone(at, life, ..) => Some((*at, *life)),
            HaSimulationEvent::Message(_, at, life, ..) => Some((*at, *life)),
            _ => None,
        };
        if let Some((at, life)) = whom {
            let master = &self.masters[at];
            if !master.alive || master.process_number != life {
                return;
            }
            if master.asleep_until > self.now {
                self.queue.push(Reverse((master.asleep_until, number)));
                self.events.insert(number, event);
                return;
            }
        }
        match event {
            HaSimulationEvent::Step(at, life) => {
                self.step(at);
                self.after(STEP, HaSimulationEvent::Step(at, life));
            }
            HaSimulationEvent::ActionSent(at, life, number, sent, ask) => {
                let answer = self.store.execute(self.now, &ask);
                if !self.is_cut(at, STORE) {
                    let delay = self.delay();
                    self.after(delay, HaSimulationEvent::ResponseReceived(at, life, number, sent, answer));
                }
            }
            HaSimulationEvent::ResponseReceived(at, _, number, sent, answer) => {
                self.handle_response(at, number, sent, answer);
            }
            HaSimulationEvent::InSyncUpdateSent(at, life, number, list) => {
                self.send_in_sync_update(at, life, number, &list);
            }
            HaSimulationEvent::InSyncUpdateDone(at, _, number, listing, revision) => {
                self.handle_in_sync_update(at, number, listing, revision);
            }
            HaSimulationEvent::Message(connection, at, _, to_leader, bytes) => {
                self.message(connection, at, to_leader, &bytes);
            }
            HaSimulationEvent::Call => self.call(),
            HaSimulationEvent::InjectFault => self.inject_fault(),
            HaSimulationEvent::Heal(one, other) => _ = self.cuts.remove(&(one, other)),
            HaSimulationEvent::Restart(at) if !self.masters[at].alive => self.restart(at),
            HaSimulationEvent::Restart(_) => {}
        }
    }

    /// What a master does again and again.
    pub(crate) fn step(&mut self, at: usize) {
        let clock = self.masters[at].clock(self.now);
        self.elect(at, clock);
        let master = &mut self.masters[at];
        if master.leader_state.as_ref().map(|it| it.tenure)
            != master.elector.leading(clock).map(|(tenure, _)| tenure)
        {
            master.leader_state = None;
        }
        if master.leader_state.is_some() {
            self.lead(at, clock);
        } else {
            self.follow(at, clock);
        }
    }

    fn elect(&mut self, at: usize, clock: Duration) {
        let master = &mut self.masters[at];
        if let Some((_, sent)) = master.pending_action {
            if clock < sent + TIMES.response_timeout() {
                return;
            }
            master.pending_action = None;
            master.elector.handle_response(sent, clock, ElectionResponse::Failed);
        }
        match master.elector.poll(clock) {
            ElectorOutput::Act(ask) => {
                if matches!(ask, ElectionAction::Campaign(_)) {
                    master.link = None;
                    master.replica.loading = None;
                }
                let life = master.process_number;
                let number = self.number();
                self.masters[at].pending_action = Some((number, clock));
                if !self.is_cut(at, STORE) {
                    let delay = self.delay();
                    self.after(delay, HaSimulationEvent::ActionSent(at, life, number, clock, ask));
                }
            }
            // The next step comes soon.
            ElectorOutput::Wait(_) => {}
        }
    }

    fn handle_response(&mut self, at: usize, number: u64, sent: Duration, answer: ElectionResponse) {
        let now = self.now;
        let clock = self.masters[at].clock(now);
        let master = &mut self.masters[at];
        if master.pending_action.is_none_or(|(asked, _)| asked != number) {
            return;
        }
        master.pending_action = None;
        let has_won = matches!(answer, ElectionResponse::CampaignResult(Some(_)));
        master.elector.handle_response(sent, clock, answer);
        if has_won && let Some((tenure, _)) = master.elector.leading(clock) {
            master.begin_to_lead(tenure, self.rng.u64(..));
            self.elected += 1;
            let others = (0..MASTERS).filter(|other| *other != at && self.masters[*other].serves(now));
            assert_eq!(others.count(), 0, "seed {}: two masters lead at once", self.seed);
            self.check(at);
        }
        self.step(at);
    }

    /// Whoever leads has everything that a caller was told of.
    fn check(&self, at: usize) {
        let values = self.masters[at].replica.current.values();
        if let Some(missing) = self.acknowledged.difference(&values).next() {
            panic!("seed {}: {missing} is missing at master {at}", self.seed);
        }
    }

    fn lead(&mut self, at: usize, clock: Duration) {
        let number = self.number();
        let SimulatedMaster { leader_state: Some(lead), process_number: life, .. } = &mut self.masters[at]
        else {
            return;
        };
        lead.quorum.remove_silent(clock, SILENCE_TIMEOUT);
        if lead.listing.as_ref().is_some_and(|(_, _, sent)| clock >= *sent + TIMES.response_timeout()) {
            (lead.listing, lead.revision) = (None, None);
        }
        if lead.listing.is_none()
            && let Some(members) = lead.quorum.pending_in_sync()
        {
            lead.listing = Some((number, members.clone(), clock));
            let (life, list) = (*life, (lead.tenure, lead.revision, members));
            if !self.is_cut(at, STORE) {
                let delay = self.delay();
                self.after(delay, HaSimulationEvent::InSyncUpdateSent(at, life, number, list));
            }
        }
        self.send_updates(at, clock);
        self.reply_to_callers(at);
    }

    /// A list, or the question for its revision, reaches the store. It may do so long after it was given up.
    fn send_in_sync_update(
        &mut self,
        at: usize,
        life: u64,
        number: u64,
        (tenure, revision, members): &(LeaderTerm, Option<i64>, InSyncSet),
    ) {
        let listing = revision.map(|it| self.store.update_in_sync(self.now, *tenure, it, members));
        let seen = self.store.in_sync_revision();
        if !self.is_cut(at, STORE) {
            let delay = self.delay();
            self.after(delay, HaSimulationEvent::InSyncUpdateDone(at, life, number, listing, seen));
        }
    }

    fn handle_in_sync_update(
        &mut self,
        at: usize,
        number: u64,
        listing: Option<InSyncUpdateOutcome>,
        seen: i64,
    ) {
        let master = &mut self.masters[at];
        let Some(lead) = &mut master.leader_state else { return };
        let Some((_, members, _)) = lead.listing.take_if(|(asked, ..)| *asked == number) else { return };
        match listing {
            None => lead.revision = Some(seen),
            Some(InSyncUpdateOutcome::Stored(revision)) => {
                lead.revision = Some(revision);
                lead.quorum.confirm_in_sync(members);
            }
            Some(InSyncUpdateOutcome::Conflict) => lead.revision = None,
            Some(InSyncUpdateOutcome::Deposed) => master.elector.mark_deposed(),
        }
        self.step(at);
    }

    /// Somebody puts something, wherever a master serves.
    fn call(&mut self) {
        let delay = self.rng.u64(20_000..100_000);
        self.after(delay, HaSimulationEvent::Call);
        let (now, value) = (self.now, self.number());
        let is_up = |it: &SimulatedMaster| it.serves(now) && it.asleep_until <= now;
        let Some(at) = self.masters.iter().position(is_up) else {
            self.refused += 1;
            return;
        };
        let master = &mut self.masters[at];
        let state = &mut master.replica.current;
        state.append(SimulatedRecord::Value(value));
        if let Some(lead) = &mut master.leader_state {
            lead.pending_callers.push((state.last(), value));
        }
        self.step(at);
    }

    fn reply_to_callers(&mut self, at: usize) {
        if !self.masters[at].serves(self.now) {
            return;
        }
        let SimulatedMaster { leader_state: Some(lead), replica: kept, .. } = &mut self.masters[at] else {
            return;
        };
        // Its own disk has it first.
        kept.written = kept.current.last();
        let all = self.faults.skips_follower_acks;
        let answered =
            lead.pending_callers.extract_if(.., |(number, _)| all || lead.quorum.is_acknowledged(*number));
        self.acknowledged.extend(answered.map(|(_, value)| value));
    }
}
