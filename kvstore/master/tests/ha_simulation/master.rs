//! One master: its decisions are the real ones, its state is a set of numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use moongate_master::Epochs;
use moongate_master::ha::follower::{Copy, Follower};
use moongate_master::ha::{Elector, InSync, Member, Quorum, Tenure, Times};

pub(crate) const TIMES: Times = Times { lease: Duration::from_secs(3) };
/// How long a leader waits for a silent follower, and a follower for a silent leader.
pub(crate) const PATIENCE: Duration = Duration::from_millis(800);

/// A record, or a part of a state.
#[derive(Clone, Copy)]
pub(crate) enum Record {
    Value(u64),
    /// An epoch begins.
    Epoch(u64),
    /// In a state: an epoch, and where it began.
    Began(u64, u64),
}

impl Record {
    pub(crate) fn write(self) -> Vec<u8> {
        let (kind, one, other) = match self {
            Self::Value(value) => (0, value, 0),
            Self::Epoch(id) => (1, id, 0),
            Self::Began(id, first) => (2, id, first),
        };
        [&[kind][..], &u64::to_le_bytes(one), &u64::to_le_bytes(other)].concat()
    }

    fn read(bytes: &[u8]) -> Self {
        let number = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
        match bytes[0] {
            0 => Self::Value(number(1)),
            1 => Self::Epoch(number(1)),
            _ => Self::Began(number(1), number(9)),
        }
    }
}

/// What the records amount to.
#[derive(Clone, Default)]
pub(crate) struct State {
    /// What a whole copy had.
    base: BTreeSet<u64>,
    /// The record before the first of `records`.
    before: u64,
    records: Vec<Record>,
    pub(crate) epochs: Epochs,
}

impl State {
    pub(crate) fn last(&self) -> u64 {
        self.before + self.records.len() as u64
    }

    pub(crate) fn values(&self) -> BTreeSet<u64> {
        let value = |it: &Record| if let Record::Value(value) = it { Some(*value) } else { None };
        self.base.iter().copied().chain(self.records.iter().filter_map(value)).collect()
    }

    /// The whole of it.
    pub(crate) fn parts(&self) -> Vec<Record> {
        let epochs = self.epochs.iter().map(|(id, first)| Record::Began(id, first));
        self.values().into_iter().map(Record::Value).chain(epochs).collect()
    }

    /// The records from this one on, if there are.
    pub(crate) fn from(&self, first: u64) -> Option<&[Record]> {
        self.records.get(first.checked_sub(self.before + 1)? as usize..)
    }

    pub(crate) fn position(&self) -> Option<(u64, u64)> {
        self.epochs.current().map(|id| (id, self.last()))
    }

    pub(crate) fn append(&mut self, record: Record) {
        self.records.push(record);
        if let Record::Epoch(id) = record {
            self.epochs.begin(id, self.last());
        }
    }

    /// Later records never reached the disk.
    fn cut(&mut self, last: u64) {
        self.records.truncate((last - self.before) as usize);
        self.epochs.cut(last);
    }
}

/// A state and the one that shall take its place.
#[derive(Default)]
pub(crate) struct Kept {
    pub(crate) current: State,
    pub(crate) loading: Option<State>,
    /// Whether records can follow on `current`.
    pub(crate) follows: bool,
    /// Up to which record the disk has `current` for certain.
    pub(crate) written: u64,
    /// It acknowledges what its disk does not have.
    pub(crate) hasty: bool,
}

impl Copy for Kept {
    fn begin(&mut self, number: u64) -> io::Result<()> {
        self.loading = Some(State { before: number, ..State::default() });
        Ok(())
    }

    fn part(&mut self, record: &[u8]) -> io::Result<()> {
        let state = self.loading.as_mut().unwrap();
        match Record::read(record) {
            Record::Value(value) => _ = state.base.insert(value),
            Record::Began(id, first) => state.epochs.begin(id, first),
            Record::Epoch(_) => panic!("a record among the parts of a state"),
        }
        Ok(())
    }

    fn whole(&mut self) -> io::Result<()> {
        self.current = self.loading.take().unwrap();
        (self.follows, self.written) = (true, self.current.last());
        Ok(())
    }

    fn record(&mut self, number: u64, record: &[u8]) {
        let state = self.loading.as_mut().unwrap_or(&mut self.current);
        state.append(Record::read(record));
        assert_eq!(number, state.last());
    }

    fn commit(&mut self) -> io::Result<()> {
        if !self.hasty {
            self.written = self.current.last();
        }
        Ok(())
    }
}

/// A leader's side of one connection.
pub(crate) struct Session {
    pub(crate) member: Member,
    pub(crate) peer: usize,
    /// The values of the state that are still to be sent, and what comes after them.
    pub(crate) state: Option<Vec<Record>>,
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
            kept: Kept { follows: true, ..Kept::default() },
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

    /// Its process is gone, and with it what was not written: `torn` records at most are on the disk of those that may be.
    pub(crate) fn crash(&mut self, torn: u64) {
        self.alive = false;
        self.life += 1;
        (self.asking, self.lead, self.link) = (None, None, None);
        self.kept.loading = None;
        let last = self.kept.current.last().min(self.kept.written + torn);
        self.kept.current.cut(last);
        self.kept.written = last;
    }

    /// Its disk is gone, or it has none: it will be another member.
    pub(crate) fn forget(&mut self, incarnation: u64) {
        self.me.incarnation = incarnation;
        self.kept = Kept { hasty: self.kept.hasty, ..Kept::default() };
    }

    /// A new process.
    pub(crate) fn restart(&mut self) {
        self.kept.follows = true;
        self.alive = true;
        self.elector = Elector::new(self.me.clone(), self.me.address.clone(), TIMES, false);
    }

    /// Begins to lead with what it has.
    pub(crate) fn begin_to_lead(&mut self, tenure: Tenure, epoch: u64) {
        assert!(self.link.is_none());
        (self.kept.loading, self.kept.follows) = (None, false);
        self.kept.current.append(Record::Epoch(epoch));
        self.lead = Some(Lead {
            tenure,
            quorum: Quorum::new(self.me.clone()),
            sessions: BTreeMap::new(),
            waiting: Vec::new(),
            revision: Some(tenure.term),
            listing: None,
        });
    }
}
