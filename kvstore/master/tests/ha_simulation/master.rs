//! One master: its decisions are the real ones, its state is a set of numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use moongate_master::EpochHistory;
use moongate_master::ha::follower::{ReplicationFollower, ReplicationSink};
use moongate_master::ha::{ElectionTimings, HaMember, InSyncSet, InSyncTracker, LeaderElector, LeaderTerm};

pub(crate) const TIMES: ElectionTimings = ElectionTimings { lease: Duration::from_secs(3) };
/// How long a leader waits for a silent follower, and a follower for a silent leader.
pub(crate) const SILENCE_TIMEOUT: Duration = Duration::from_millis(800);

/// A record, or a part of a state.
#[derive(Clone, Copy)]
pub(crate) enum SimulatedRecord {
    Value(u64),
    /// An epoch begins.
    Epoch(u64),
    /// In a state: an epoch, and where it began.
    EpochStart(u64, u64),
}

impl SimulatedRecord {
    pub(crate) fn write(self) -> Vec<u8> {
        let (kind, one, other) = match self {
            Self::Value(value) => (0, value, 0),
            Self::Epoch(id) => (1, id, 0),
            Self::EpochStart(id, first) => (2, id, first),
        };
        [&[kind][..], &u64::to_le_bytes(one), &u64::to_le_bytes(other)].concat()
    }

    fn read(bytes: &[u8]) -> Self {
        let number = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
        match bytes[0] {
            0 => Self::Value(number(1)),
            1 => Self::Epoch(number(1)),
            _ => Self::EpochStart(number(1), number(9)),
        }
    }
}

/// What the records amount to.
#[derive(Clone, Default)]
pub(crate) struct SimulatedState {
    /// What a whole copy had.
    base: BTreeSet<u64>,
    /// The record before the first of `records`.
    before: u64,
    records: Vec<SimulatedRecord>,
    pub(crate) epochs: EpochHistory,
}

impl SimulatedState {
    pub(crate) fn last(&self) -> u64 {
        self.before + self.records.len() as u64
    }

    pub(crate) fn values(&self) -> BTreeSet<u64> {
        let value =
            |it: &SimulatedRecord| if let SimulatedRecord::Value(value) = it { Some(*value) } else { None };
        self.base.iter().copied().chain(self.records.iter().filter_map(value)).collect()
    }

    /// The whole of it.
    pub(crate) fn parts(&self) -> Vec<SimulatedRecord> {
        let epochs = self.epochs.iter().map(|(id, first)| SimulatedRecord::EpochStart(id, first));
        self.values().into_iter().map(SimulatedRecord::Value).chain(epochs).collect()
    }

    /// The records from this one on, if there are.
    pub(crate) fn from(&self, first: u64) -> Option<&[SimulatedRecord]> {
        self.records.get(first.checked_sub(self.before + 1)? as usize..)
    }

    pub(crate) fn position(&self) -> Option<(u64, u64)> {
        self.epochs.current().map(|id| (id, self.last()))
    }

    pub(crate) fn append(&mut self, record: SimulatedRecord) {
        self.records.push(record);
        if let SimulatedRecord::Epoch(id) = record {
            self.epochs.begin(id, self.last());
        }
    }

    /// Later records never reached the disk.
    fn truncate(&mut self, last: u64) {
        self.records.truncate((last - self.before) as usize);
        self.epochs.truncate(last);
    }
}

/// A state and the one that shall take its place.
#[derive(Default)]
pub(crate) struct SimulatedReplica {
    pub(crate) current: SimulatedState,
    pub(crate) loading: Option<SimulatedState>,
    /// Whether records can follow on `current`.
    pub(crate) accepts_records: bool,
    /// Up to which record the disk has `current` for certain.
    pub(crate) written: u64,
    /// It acknowledges what its disk does not have.
    pub(crate) acks_before_write: bool,
}

impl ReplicationSink for SimulatedReplica {
    fn begin(&mut self, number: u64) -> io::Result<()> {
        self.loading = Some(SimulatedState { before: number, ..SimulatedState::default() });
        Ok(())
    }

    fn part(&mut self, record: &[u8]) -> io::Result<()> {
        let state = self.loading.as_mut().unwrap();
        match SimulatedRecord::read(record) {
            SimulatedRecord::Value(value) => _ = state.base.insert(value),
            SimulatedRecord::EpochStart(id, first) => state.epochs.begin(id, first),
            SimulatedRecord::Epoch(_) => panic!("a record among the parts of a state"),
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.current = self.loading.take().unwrap();
        (self.accepts_records, self.written) = (true, self.current.last());
        Ok(())
    }

    fn record(&mut self, number: u64, record: &[u8]) {
        let state = self.loading.as_mut().unwrap_or(&mut self.current);
        state.append(SimulatedRecord::read(record));
        assert_eq!(number, state.last());
    }

    fn commit(&mut self) -> io::Result<()> {
        if !self.acks_before_write {
            self.written = self.current.last();
        }
        Ok(())
    }
}

/// A leader's side of one connection.
pub(crate) struct SimulatedSession {
    pub(crate) member: HaMember,
    pub(crate) peer: usize,
    /// The values of the state that are still to be sent, and what comes after them.
    pub(crate) state: Option<Vec<SimulatedRecord>>,
    /// The next record to send.
    pub(crate) next: u64,
    /// It was asked to join.
    pub(crate) joined: bool,
    pub(crate) sent_at: Duration,
}

/// What only a leader has.
pub(crate) struct SimulatedLeader {
    pub(crate) tenure: LeaderTerm,
    pub(crate) quorum: InSyncTracker,
    pub(crate) sessions: BTreeMap<u64, SimulatedSession>,
    /// Callers that wait: record, value.
    pub(crate) pending_callers: Vec<(u64, u64)>,
    /// The revision of the list; nothing if it must be asked for.
    pub(crate) revision: Option<i64>,
    /// The list that was sent to the store, and when.
    pub(crate) listing: Option<(u64, InSyncSet, Duration)>,
}

/// A follower's side of one connection.
pub(crate) struct SimulatedLink {
    pub(crate) id: u64,
    pub(crate) leader: usize,
    pub(crate) term: i64,
    pub(crate) follower: ReplicationFollower,
    pub(crate) last_heard_at: Duration,
}

pub(crate) struct SimulatedMaster {
    pub(crate) member: HaMember,
    /// Counts its processes; what was meant for an earlier one is not for it.
    pub(crate) process_number: u64,
    pub(crate) alive: bool,
    pub(crate) asleep_until: u64,
    /// Its clock: microseconds at the beginning of the world, and how fast it runs.
    offset: u64,
    rate: f64,
    pub(crate) elector: LeaderElector,
    /// The question that the store has not answered: its number, and when it was sent.
    pub(crate) pending_action: Option<(u64, Duration)>,
    pub(crate) replica: SimulatedReplica,
    pub(crate) leader_state: Option<SimulatedLeader>,
    pub(crate) link: Option<SimulatedLink>,
}

impl SimulatedMaster {
    pub(crate) fn new(number: usize, offset: u64, rate: f64, incarnation: u64) -> Self {
        let member = HaMember { address: number.to_string(), incarnation };
        Self {
            elector: LeaderElector::new(member.clone(), number.to_string(), TIMES, false),
            member,
            process_number: 0,
            alive: true,
            asleep_until: 0,
            offset,
            rate,
            pending_action: None,
            replica: SimulatedReplica { accepts_records: true, ..SimulatedReplica::default() },
            leader_state: None,
            link: None,
        }
    }

    /// What its clock shows.
    pub(crate) fn clock(&self, now: u64) -> Duration {
        Duration::from_micros(self.offset + (now as f64 * self.rate) as u64)
    }

    /// Whether it would answer a caller.
    pub(crate) fn serves(&self, now: u64) -> bool {
        self.alive && self.leader_state.is_some() && self.elector.leading(self.clock(now)).is_some()
    }

    /// Its process is gone, and with it what was not written: `torn` records at most are on the disk of those that may be.
    pub(crate) fn crash(&mut self, torn: u64) {
        self.alive = false;
        self.process_number += 1;
        (self.pending_action, self.leader_state, self.link) = (None, None, None);
        self.replica.loading = None;
        let last = self.replica.current.last().min(self.replica.written + torn);
        self.replica.current.truncate(last);
        self.replica.written = last;
    }

    /// Its disk is gone, or it has none: it will be another member.
    pub(crate) fn lose_disk(&mut self, incarnation: u64) {
        self.member.incarnation = incarnation;
        self.replica = SimulatedReplica {
            acks_before_write: self.replica.acks_before_write,
            ..SimulatedReplica::default()
        };
    }

    /// A new process.
    pub(crate) fn restart(&mut self) {
        self.replica.accepts_records = true;
        self.alive = true;
        self.elector = LeaderElector::new(self.member.clone(), self.member.address.clone(), TIMES, false);
    }

    /// Begins to lead with what it has.
    pub(crate) fn begin_to_lead(&mut self, tenure: LeaderTerm, epoch: u64) {
        assert!(self.link.is_none());
        (self.replica.loading, self.replica.accepts_records) = (None, false);
        self.replica.current.append(SimulatedRecord::Epoch(epoch));
        self.leader_state = Some(SimulatedLeader {
            tenure,
            quorum: InSyncTracker::new(self.member.clone()),
            sessions: BTreeMap::new(),
            pending_callers: Vec::new(),
            revision: Some(tenure.term),
            listing: None,
        });
    }
}
