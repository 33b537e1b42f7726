//! One master: its decisions are the real ones, its state is a set of numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use moongate_master::ha::follower::{Copy, Follower};
use moongate_master::ha::{Elector, InSync, Member, Quorum, Tenure, Times};

pub(crate) const TIMES: Times = Times { lease: Duration::from_secs(3) };
/// How long a leader waits for a silent follower, and a follower for a silent leader.
pub(crate) const PATIENCE: Duration = Duration::from_millis(800);

#[derive(Clone, Default)]
pub(crate) struct State {
    pub(crate) values: BTreeSet<u64>,
    pub(crate) last: u64,
}

/// A state and the one that shall take its place.
#[derive(Default)]
pub(crate) struct Kept {
    pub(crate) current: State,
    pub(crate) loading: Option<State>,
    /// The term of the leader that `current` follows, without a change of its own since.
    pub(crate) term: Option<i64>,
}

impl Copy for Kept {
    fn begin(&mut self, number: u64) {
        self.loading = Some(State { values: BTreeSet::new(), last: number });
    }

    fn part(&mut self, record: &[u8]) {
        let value = u64::from_le_bytes(record.try_into().unwrap());
        self.loading.as_mut().unwrap().values.insert(value);
    }

    fn whole(&mut self, term: i64) {
        self.current = self.loading.take().unwrap();
        self.term = Some(term);
    }

    fn record(&mut self, number: u64, record: &[u8]) {
        let state = self.loading.as_mut().unwrap_or(&mut self.current);
        assert_eq!(number, state.last + 1);
        state.last = number;
        state.values.insert(u64::from_le_bytes(record.try_into().unwrap()));
    }

    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A leader's side of one connection.
pub(crate) struct Session {
    pub(crate) member: Member,
    pub(crate) peer: usize,
    /// The values of the state that are still to be sent, and what comes after them.
    pub(crate) state: Option<Vec<u64>>,
    /// The next record to send.
    pub(crate) next: u64,
    /// It was asked to join.
    pub(crate) joined: bool,
    pub(crate) sent_at: Duration,
}

/// What only a leader has.
pub(crate) struct Lead {
    pub(crate) tenure: Tenure,
    pub(crate) quorum: Quorum,
    /// Records of this tenure, from number `first` on.
    pub(crate) first: u64,
    pub(crate) records: Vec<u64>,
    pub(crate) sessions: BTreeMap<u64, Session>,
    /// Callers that wait: record, value.
    pub(crate) waiting: Vec<(u64, u64)>,
    /// The revision of the list; nothing if it must be asked for.
    pub(crate) revision: Option<i64>,
    /// The list that was sent to the store, and when.
    pub(crate) listing: Option<(u64, InSync, Duration)>,
}

/// A follower's side of one connection.
pub(crate) struct Link {
    pub(crate) id: u64,
    pub(crate) leader: usize,
    pub(crate) term: i64,
    pub(crate) follower: Follower,
    pub(crate) heard: Duration,
}

pub(crate) struct Master {
    pub(crate) me: Member,
    /// Counts its processes; what was meant for an earlier one is not for it.
    pub(crate) life: u64,
    pub(crate) alive: bool,
    pub(crate) asleep_until: u64,
    /// Its clock: microseconds at the beginning of the world, and how fast it runs.
    offset: u64,
    rate: f64,
    pub(crate) elector: Elector,
    /// The question that the store has not answered: its number, and when it was sent.
    pub(crate) asking: Option<(u64, Duration)>,
    pub(crate) kept: Kept,
    pub(crate) lead: Option<Lead>,
    pub(crate) link: Option<Link>,
}

impl Master {
    pub(crate) fn new(number: usize, offset: u64, rate: f64, incarnation: u64) -> Self {
        let me = Member { address: number.to_string(), incarnation };
        Self {
            elector: Elector::new(me.clone(), number.to_string(), TIMES, false),
            me,
            life: 0,
            alive: true,
            asleep_until: 0,
            offset,
            rate,
            asking: None,
            kept: Kept::default(),
            lead: None,
            link: None,
        }
    }

    /// What its clock shows.
    pub(crate) fn clock(&self, now: u64) -> Duration {
        Duration::from_micros(self.offset + (now as f64 * self.rate) as u64)
    }

    /// Whether it would answer a caller.
    pub(crate) fn serves(&self, now: u64) -> bool {
        self.alive && self.lead.is_some() && self.elector.leading(self.clock(now)).is_some()
    }

    pub(crate) fn crash(&mut self) {
        self.alive = false;
        self.life += 1;
        (self.asking, self.lead, self.link) = (None, None, None);
        self.kept.loading = None;
    }

    /// A new process, with its state or without.
    pub(crate) fn restart(&mut self, incarnation: Option<u64>) {
        if let Some(incarnation) = incarnation {
            self.me.incarnation = incarnation;
            self.kept = Kept::default();
        }
        self.kept.term = None;
        self.alive = true;
        self.elector = Elector::new(self.me.clone(), self.me.address.clone(), TIMES, false);
    }

    /// Begins to lead with what it has.
    pub(crate) fn begin_to_lead(&mut self, tenure: Tenure) {
        assert!(self.link.is_none());
        (self.kept.loading, self.kept.term) = (None, None);
        self.lead = Some(Lead {
            tenure,
            quorum: Quorum::new(self.me.clone()),
            first: self.kept.current.last + 1,
            records: Vec::new(),
            sessions: BTreeMap::new(),
            waiting: Vec::new(),
            revision: Some(tenure.term),
            listing: None,
        });
    }
}
