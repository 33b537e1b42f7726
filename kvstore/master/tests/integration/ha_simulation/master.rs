//! A simulated master: its decisions are the real ones, its state is a set of numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use moongate_master::ha::follower::{ReplicationFollower, ReplicationSink};
use moongate_master::ha::{ElectionTimings, HaMember, InSyncSet, InSyncTracker, LeaderElector, LeaderTerm};
use moongate_master::{EpochHistory, LogPosition};

pub(crate) const TIMES: ElectionTimings = ElectionTimings { lease: Duration::from_secs(3) };
/// A leader removes a follower, and a follower leaves a leader, after this time without a frame.
pub(crate) const SILENCE_TIMEOUT: Duration = Duration::from_millis(800);

/// A log record, or a record of a full state.
#[derive(Clone, Copy)]
pub(crate) enum SimulatedRecord {
    Value(u64),
    /// A new epoch that starts with this record.
    Epoch(u64),
    /// In a full state: an epoch and its first record.
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
        let number = |offset: usize| u64::from_le_bytes(*bytes[offset..].first_chunk().unwrap());
        match bytes[0] {
            0 => Self::Value(number(1)),
            1 => Self::Epoch(number(1)),
            _ => Self::EpochStart(number(1), number(9)),
        }
    }
}

/// The state that the records produce.
#[derive(Clone, Default)]
pub(crate) struct SimulatedState {
    /// Values of the full copy.
    base: BTreeSet<u64>,
    /// Number of the record before the first of `records`.
    before: u64,
    records: Vec<SimulatedRecord>,
    pub(crate) epochs: EpochHistory,
}

impl SimulatedState {
    pub(crate) fn last(&self) -> u64 {
        self.before + self.records.len() as u64
    }

    pub(crate) fn values(&self) -> BTreeSet<u64> {
        let value = |record: &SimulatedRecord| {
            if let SimulatedRecord::Value(value) = record { Some(*value) } else { None }
        };
        self.base.iter().copied().chain(self.records.iter().filter_map(value)).collect()
    }

    /// All records of a full copy.
    pub(crate) fn parts(&self) -> Vec<SimulatedRecord> {
        let epochs = self.epochs.iter().map(|epoch| SimulatedRecord::EpochStart(epoch.id, epoch.first));
        self.values().into_iter().map(SimulatedRecord::Value).chain(epochs).collect()
    }

    /// The records from this one on, if they exist.
    pub(crate) fn from(&self, first: u64) -> Option<&[SimulatedRecord]> {
        self.records.get(first.checked_sub(self.before + 1)? as usize..)
    }

    pub(crate) fn position(&self) -> Option<LogPosition> {
        self.epochs.current().map(|epoch| LogPosition { epoch, number: self.last() })
    }

    pub(crate) fn append(&mut self, record: SimulatedRecord) {
        self.records.push(record);
        if let SimulatedRecord::Epoch(id) = record {
            self.epochs.begin(id, self.last());
        }
    }

    /// Drops the records after `last`, which never reached the disk.
    fn truncate(&mut self, last: u64) {
        self.records.truncate((last - self.before) as usize);
        self.epochs.truncate(last);
    }
}

/// The current state, and a full copy that will replace it.
#[derive(Default)]
pub(crate) struct SimulatedReplica {
    pub(crate) current: SimulatedState,
    pub(crate) loading: Option<SimulatedState>,
    /// Whether records can be appended to `current`.
    pub(crate) accepts_records: bool,
    /// Last record of `current` that is certainly on disk.
    pub(crate) written: u64,
    /// Injected defect: it acknowledges records that are not on its disk.
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
            SimulatedRecord::Epoch(_) => panic!("an epoch record in a full state"),
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

/// The leader's side of a replication connection.
pub(crate) struct SimulatedSession {
    pub(crate) member: HaMember,
    pub(crate) peer: usize,
    /// Records of the full state that are still to be sent.
    pub(crate) state: Option<Vec<SimulatedRecord>>,
    /// Number of the next record to send.
    pub(crate) next: u64,
    /// Whether the follower has joined the in-sync tracker.
    pub(crate) joined: bool,
    pub(crate) sent_at: Duration,
}

/// State that only a leader has.
pub(crate) struct SimulatedLeader {
    pub(crate) leader_term: LeaderTerm,
    pub(crate) tracker: InSyncTracker,
    pub(crate) sessions: BTreeMap<u64, SimulatedSession>,
    /// Pending calls: record number and value.
    pub(crate) pending_callers: Vec<(u64, u64)>,
    /// Revision of the stored set; `None` if it has to be read.
    pub(crate) revision: Option<i64>,
    /// The in-sync update in flight: its number, the set, and when it was sent.
    pub(crate) update_in_flight: Option<(u64, InSyncSet, Duration)>,
}

/// The follower's side of a replication connection.
pub(crate) struct SimulatedLink {
    pub(crate) id: u64,
    pub(crate) leader: usize,
    pub(crate) term: i64,
    pub(crate) follower: ReplicationFollower,
    pub(crate) last_heard_at: Duration,
}

pub(crate) struct SimulatedMaster {
    pub(crate) member: HaMember,
    /// Incremented with every process; events for earlier processes are dropped.
    pub(crate) process_number: u64,
    pub(crate) alive: bool,
    pub(crate) asleep_until: u64,
    /// Its clock: microseconds at the start of the simulation, and its rate.
    offset: u64,
    rate: f64,
    pub(crate) elector: LeaderElector,
    /// The request without a response: its number, and when it was sent.
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

    /// The master's clock at the simulation time `now`.
    pub(crate) fn clock(&self, now: u64) -> Duration {
        Duration::from_micros(self.offset + (now as f64 * self.rate) as u64)
    }

    /// Whether it would reply to a call.
    pub(crate) fn serves(&self, now: u64) -> bool {
        self.alive && self.leader_state.is_some() && self.elector.leading(self.clock(now)).is_some()
    }

    /// The process ends and unwritten records are lost, except for at most `torn` ones that reached the disk anyway.
    pub(crate) fn crash(&mut self, torn: u64) {
        self.alive = false;
        self.process_number += 1;
        (self.pending_action, self.leader_state, self.link) = (None, None, None);
        self.replica.loading = None;
        let last = self.replica.current.last().min(self.replica.written + torn);
        self.replica.current.truncate(last);
        self.replica.written = last;
    }

    /// Loses the state: the master becomes a new member.
    pub(crate) fn lose_disk(&mut self, incarnation: u64) {
        self.member.incarnation = incarnation;
        self.replica = SimulatedReplica {
            acks_before_write: self.replica.acks_before_write,
            ..SimulatedReplica::default()
        };
    }

    pub(crate) fn restart(&mut self) {
        self.replica.accepts_records = true;
        self.alive = true;
        self.elector = LeaderElector::new(self.member.clone(), self.member.address.clone(), TIMES, false);
    }

    /// Becomes leader with the current state.
    pub(crate) fn begin_to_lead(&mut self, leader_term: LeaderTerm, epoch: u64) {
        assert!(self.link.is_none());
        (self.replica.loading, self.replica.accepts_records) = (None, false);
        self.replica.current.append(SimulatedRecord::Epoch(epoch));
        self.leader_state = Some(SimulatedLeader {
            leader_term,
            tracker: InSyncTracker::new(self.member.clone()),
            sessions: BTreeMap::new(),
            pending_callers: Vec::new(),
            revision: Some(leader_term.term),
            update_in_flight: None,
        });
    }
}
