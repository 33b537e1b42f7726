//! The follower side of replication: applies the leader's frames to a copy of its state.

use std::io;

use super::frame::{ReplicationFrame, ReplicationRecords, ReplicationStart};
use crate::epochs::LogPosition;

/// Storage of a follower's copy.
/// The old state stays until the new one is complete: the follower may be in the in-sync set because of it.
pub trait ReplicationSink {
    /// Starts a full copy, which contains all records up to this one and maybe some later ones.
    ///
    /// # Errors
    /// The copy cannot be stored.
    fn begin(&mut self, number: u64) -> io::Result<()>;

    /// Adds a record of the full copy.
    ///
    /// # Errors
    /// As above.
    fn part(&mut self, record: &[u8]) -> io::Result<()>;

    /// Replaces the old state with the new one, after [`Self::record`] was called for all records that it needs.
    ///
    /// # Errors
    /// As above. The old state stays.
    fn finish(&mut self) -> io::Result<()>;

    /// Appends the next record of the log.
    fn record(&mut self, number: u64, record: &[u8]);

    /// Makes all appended records as durable as this copy can.
    ///
    /// # Errors
    /// As above.
    fn commit(&mut self) -> io::Result<()>;
}

/// Errors that end replication from this leader.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// The frame is not allowed in this phase.
    #[error("unexpected {0} frame from the leader")]
    Unexpected(&'static str),
    /// The leader's term differs from the coordinator's.
    #[error("leader term {leader} does not match the coordinator's {coordinator}")]
    Term { leader: i64, coordinator: i64 },
    /// A record is missing between two frames.
    #[error("gap in the log: got record {received}, expected {expected}")]
    Gap { received: u64, expected: u64 },
    /// The copy could not be written.
    #[error("cannot write the copy: {0}")]
    Copy(#[from] io::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FollowerPhase {
    Handshake,
    /// The leader sends its full state.
    Loading,
    /// The full state is complete once this record has arrived.
    CatchingUp(u64),
    Following,
}

/// Protocol state of one connection to a leader.
#[derive(Debug)]
pub struct ReplicationFollower {
    term: i64,
    phase: FollowerPhase,
    /// Number of the copy's last record.
    last: u64,
    /// Last record that was reported to the leader in the hello frame.
    reported_last: Option<u64>,
}

impl ReplicationFollower {
    /// A follower of the leader with this term. `last_record` is what its hello frame reports.
    pub fn new(term: i64, last_record: Option<LogPosition>) -> Self {
        let reported_last = last_record.map(|position| position.number);
        Self { term, phase: FollowerPhase::Handshake, last: 0, reported_last }
    }

    /// Handles a frame from the leader. Returns the record to acknowledge, if any.
    ///
    /// # Errors
    /// [`FollowError`]. The connection must be closed.
    pub fn handle_frame(
        &mut self,
        frame: ReplicationFrame<'_>,
        copy: &mut impl ReplicationSink,
    ) -> Result<Option<u64>, FollowError> {
        match (frame, self.phase) {
            (ReplicationFrame::Welcome { term, .. }, FollowerPhase::Handshake) if term != self.term => {
                return Err(FollowError::Term { leader: term, coordinator: self.term });
            }
            (
                ReplicationFrame::Welcome { start: ReplicationStart::Snapshot(number), .. },
                FollowerPhase::Handshake,
            ) => {
                (self.phase, self.last) = (FollowerPhase::Loading, number);
                copy.begin(number)?;
            }
            (
                ReplicationFrame::Welcome { start: ReplicationStart::Resume(number), .. },
                FollowerPhase::Handshake,
            ) if self.reported_last == Some(number) => {
                (self.phase, self.last) = (FollowerPhase::Following, number);
            }
            (ReplicationFrame::State(mut records), FollowerPhase::Loading) => {
                records.try_for_each(|record| copy.part(record))?;
            }
            (ReplicationFrame::StateComplete(number), FollowerPhase::Loading) => {
                self.phase = FollowerPhase::CatchingUp(number);
            }
            (
                ReplicationFrame::Records(first, records),
                FollowerPhase::Loading | FollowerPhase::CatchingUp(_) | FollowerPhase::Following,
            ) => {
                self.records(first, records, copy)?;
            }
            (ReplicationFrame::Heartbeat(number), FollowerPhase::Following) if number != self.last => {
                return Err(FollowError::Gap { received: number, expected: self.last });
            }
            (ReplicationFrame::Heartbeat(_), FollowerPhase::Following) => {}
            (frame, _) => return Err(FollowError::Unexpected(name(&frame))),
        }
        if let FollowerPhase::CatchingUp(number) = self.phase
            && self.last >= number
        {
            copy.finish()?;
            self.phase = FollowerPhase::Following;
        }
        if self.phase != FollowerPhase::Following {
            return Ok(None);
        }
        copy.commit()?;
        Ok(Some(self.last))
    }

    fn records(
        &mut self,
        first: u64,
        records: ReplicationRecords<'_>,
        copy: &mut impl ReplicationSink,
    ) -> Result<(), FollowError> {
        if first != self.last.saturating_add(1) {
            return Err(FollowError::Gap { received: first, expected: self.last.saturating_add(1) });
        }
        for record in records {
            self.last = self.last.saturating_add(1);
            copy.record(self.last, record);
        }
        Ok(())
    }
}

fn name(frame: &ReplicationFrame<'_>) -> &'static str {
    match frame {
        ReplicationFrame::Hello { .. } => "hello",
        ReplicationFrame::Welcome { .. } => "welcome",
        ReplicationFrame::State(_) => "state",
        ReplicationFrame::StateComplete(_) => "state complete",
        ReplicationFrame::Records(..) => "records",
        ReplicationFrame::Heartbeat(_) => "heartbeat",
        ReplicationFrame::Acknowledged(_) => "acknowledged",
    }
}
