//! The clocks, the store's callers, the masters' callers and the trouble.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use fastrand::Rng;
use moongate_master::ha::{Answer, Ask, Due, InSync, Listing, Tenure};

use crate::master::{Master, PATIENCE, Record, TIMES};
use crate::store::Store;

pub(crate) const MASTERS: usize = 3;
/// The store's place among those who can be cut off.
pub(crate) const STORE: usize = MASTERS;
/// Microseconds of trouble, and of peace after it.
const TROUBLED: u64 = 30_000_000;
const PEACE: u64 = 12_000_000;
const STEP: u64 = 50_000;

#[derive(Clone, Copy)]
pub(crate) struct Trouble {
    /// Crashes, cuts and sleeps.
    pub(crate) happens: bool,
    /// Leaders answer before their followers have acknowledged.
    pub(crate) impatient: bool,
    /// Clocks of masters run so slowly that no margin suffices.
    pub(crate) overstays: bool,
    /// Followers acknowledge what is not on their disks.
    pub(crate) hasty: bool,
    /// Leaders go on with followers that may have other records.
    pub(crate) trusting: bool,
}

impl Default for Trouble {
    fn default() -> Self {
        Self { happens: true, ..Self::NONE }
    }
}

impl Trouble {
    pub(crate) const NONE: Self =
        Self { happens: false, impatient: false, overstays: false, hasty: false, trusting: false };
}

pub(crate) enum Event {
    Step(usize, u64),
    /// A question reaches the store: master, life, number, sent.
    Asked(usize, u64, u64, Duration, Ask),
    Answered(usize, u64, u64, Duration, Answer),
    /// The same for a list: master, life, number, what.
    List(usize, u64, u64, (Tenure, Option<i64>, InSync)),
    Listed(usize, u64, u64, Option<Listing>, i64),
    /// Bytes on a connection, towards a master. The flag tells whether it is the leader.
    Message(u64, usize, u64, bool, Vec<u8>),
    Call,
    Mischief,
    Heal(usize, usize),
    Restart(usize),
}

pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) rng: Rng,
    pub(crate) trouble: Trouble,
    pub(crate) now: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    numbers: u64,
    pub(crate) store: Store,
    pub(crate) masters: Vec<Master>,
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

impl World {
    pub(crate) fn new(seed: u64, trouble: Trouble) -> Self {
        let mut rng = Rng::with_seed(seed);
        let masters = (0..MASTERS).map(|number| {
            let rate = if trouble.overstays { 0.4 } else { 0.8 + 0.4 * rng.f64() };
            let mut master = Master::new(number, rng.u64(0..10_000_000), rate, rng.u64(..));
            master.kept.hasty = trouble.hasty;
            master
        });
        let masters = masters.collect();
        let mut world = Self {
            seed,
            durable: rng.bool(),
            rng,
            trouble,
            now: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            numbers: 0,
            store: Store::default(),
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
        (0..MASTERS).for_each(|at| world.after(0, Event::Step(at, 0)));
        world.after(3_000_000, Event::Call);
        world.after(3_000_000, Event::Mischief);
        world
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(crate) fn after(&mut self, delay: u64, event: Event) {
        let number = self.number();
        self.queue.push(Reverse((self.now + delay, number)));
        self.events.insert(number, event);
    }

    pub(crate) fn delay(&mut self) -> u64 {
        match self.rng.u32(0..200) {
            0 if self.trouble.happens => self.rng.u64(0..2_000_000),
            _ => self.rng.u64(100..3_000),
        }
    }

    pub(crate) fn is_cut(&self, one: usize, other: usize) -> bool {
        self.cuts.contains(&(one.min(other), one.max(other)))
    }

    pub(crate) fn run(&mut self) {
        self.run_until(TROUBLED);
        self.trouble.happens = false;
        self.cuts.clear();
        for at in 0..MASTERS {
            self.masters[at].asleep_until = self.now;
            if !self.masters[at].alive {
                self.restart(at);
            }
        }
        self.run_until(TROUBLED + PEACE);
        let leaders: Vec<usize> = (0..MASTERS).filter(|at| self.masters[*at].serves(self.now)).collect();
        assert_eq!(leaders.len(), 1, "seed {}: nobody leads although all is well", self.seed);
        assert_eq!(self.store.members().len(), MASTERS, "seed {}: not all are in sync", self.seed);
        self.check(leaders[0]);
        let values = self.masters[leaders[0]].kept.current.values();
        for other in &self.masters {
            let others = other.kept.current.values();
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
    fn handle(&mut self, number: u64, event: Event) {
        let whom = match &event {
            Event::Step(at, life) | Event::Answered(at, life, ..) | Event::Listed(at, life, ..) => {
                Some((*at, *life))
            }
            Event::Message(_, at, life, ..) => Some((*at, *life)),
            _ => None,
        };
        if let Some((at, life)) = whom {
            let master = &self.masters[at];
            if !master.alive || master.life != life {
                return;
            }
            if master.asleep_until > self.now {
                self.queue.push(Reverse((master.asleep_until, number)));
                self.events.insert(number, event);
                return;
            }
        }
        match event {
            Event::Step(at, life) => {
                self.step(at);
                self.after(STEP, Event::Step(at, life));
            }
            Event::Asked(at, life, number, sent, ask) => {
                let answer = self.store.answer(self.now, &ask);
                if !self.is_cut(at, STORE) {
                    let delay = self.delay();
                    self.after(delay, Event::Answered(at, life, number, sent, answer));
                }
            }
            Event::Answered(at, _, number, sent, answer) => self.answered(at, number, sent, answer),
            Event::List(at, life, number, list) => self.list(at, life, number, &list),
            Event::Listed(at, _, number, listing, revision) => self.listed(at, number, listing, revision),
            Event::Message(connection, at, _, to_leader, bytes) => {
                self.message(connection, at, to_leader, &bytes);
            }
            Event::Call => self.call(),
            Event::Mischief => self.mischief(),
            Event::Heal(one, other) => _ = self.cuts.remove(&(one, other)),
            Event::Restart(at) if !self.masters[at].alive => self.restart(at),
            Event::Restart(_) => {}
        }
    }

    /// What a master does again and again.
    pub(crate) fn step(&mut self, at: usize) {
        let clock = self.masters[at].clock(self.now);
        self.elect(at, clock);
        let master = &mut self.masters[at];
        if master.lead.as_ref().map(|it| it.tenure) != master.elector.leading(clock).map(|(tenure, _)| tenure)
        {
            master.lead = None;
        }
        if master.lead.is_some() {
            self.lead(at, clock);
        } else {
            self.follow(at, clock);
        }
    }

    fn elect(&mut self, at: usize, clock: Duration) {
        let master = &mut self.masters[at];
        if let Some((_, sent)) = master.asking {
            if clock < sent + TIMES.patience() {
                return;
            }
            master.asking = None;
            master.elector.answered(sent, clock, Answer::Failed);
        }
        match master.elector.due(clock) {
            Due::Ask(ask) => {
                if matches!(ask, Ask::Campaign(_)) {
                    master.link = None;
                    master.kept.loading = None;
                }
                let life = master.life;
                let number = self.number();
                self.masters[at].asking = Some((number, clock));
                if !self.is_cut(at, STORE) {
                    let delay = self.delay();
                    self.after(delay, Event::Asked(at, life, number, clock, ask));
                }
            }
            // The next step comes soon.
            Due::Wait(_) => {}
        }
    }

    fn answered(&mut self, at: usize, number: u64, sent: Duration, answer: Answer) {
        let now = self.now;
        let clock = self.masters[at].clock(now);
        let master = &mut self.masters[at];
        if master.asking.is_none_or(|(asked, _)| asked != number) {
            return;
        }
        master.asking = None;
        let has_won = matches!(answer, Answer::Won(Some(_)));
        master.elector.answered(sent, clock, answer);
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
        let values = self.masters[at].kept.current.values();
        if let Some(missing) = self.acknowledged.difference(&values).next() {
            panic!("seed {}: {missing} is missing at master {at}", self.seed);
        }
    }

    fn lead(&mut self, at: usize, clock: Duration) {
        let number = self.number();
        let Master { lead: Some(lead), life, .. } = &mut self.masters[at] else { return };
        lead.quorum.give_up(clock, PATIENCE);
        if lead.listing.as_ref().is_some_and(|(_, _, sent)| clock >= *sent + TIMES.patience()) {
            (lead.listing, lead.revision) = (None, None);
        }
        if lead.listing.is_none()
            && let Some(members) = lead.quorum.to_list()
        {
            lead.listing = Some((number, members.clone(), clock));
            let (life, list) = (*life, (lead.tenure, lead.revision, members));
            if !self.is_cut(at, STORE) {
                let delay = self.delay();
                self.after(delay, Event::List(at, life, number, list));
            }
        }
        self.feed(at, clock);
        self.answer_callers(at);
    }

    /// A list, or the question for its revision, reaches the store. It may do so long after it was given up.
    fn list(
        &mut self,
        at: usize,
        life: u64,
        number: u64,
        (tenure, revision, members): &(Tenure, Option<i64>, InSync),
    ) {
        let listing = revision.map(|it| self.store.list(self.now, *tenure, it, members));
        let seen = self.store.list_revision();
        if !self.is_cut(at, STORE) {
            let delay = self.delay();
            self.after(delay, Event::Listed(at, life, number, listing, seen));
        }
    }

    fn listed(&mut self, at: usize, number: u64, listing: Option<Listing>, seen: i64) {
        let master = &mut self.masters[at];
        let Some(lead) = &mut master.lead else { return };
        let Some((_, members, _)) = lead.listing.take_if(|(asked, ..)| *asked == number) else { return };
        match listing {
            None => lead.revision = Some(seen),
            Some(Listing::Stored(revision)) => {
                lead.revision = Some(revision);
                lead.quorum.listed(members);
            }
            Some(Listing::Changed) => lead.revision = None,
            Some(Listing::Deposed) => master.elector.deposed(),
        }
        self.step(at);
    }

    /// Somebody puts something, wherever a master serves.
    fn call(&mut self) {
        let delay = self.rng.u64(20_000..100_000);
        self.after(delay, Event::Call);
        let (now, value) = (self.now, self.number());
        let is_up = |it: &Master| it.serves(now) && it.asleep_until <= now;
        let Some(at) = self.masters.iter().position(is_up) else {
            self.refused += 1;
            return;
        };
        let master = &mut self.masters[at];
        let state = &mut master.kept.current;
        state.append(Record::Value(value));
        if let Some(lead) = &mut master.lead {
            lead.waiting.push((state.last(), value));
        }
        self.step(at);
    }

    fn answer_callers(&mut self, at: usize) {
        if !self.masters[at].serves(self.now) {
            return;
        }
        let Master { lead: Some(lead), kept, .. } = &mut self.masters[at] else { return };
        // Its own disk has it first.
        kept.written = kept.current.last();
        let all = self.trouble.impatient;
        let answered = lead.waiting.extract_if(.., |(number, _)| all || lead.quorum.has(*number));
        self.acknowledged.extend(answered.map(|(_, value)| value));
    }
}
