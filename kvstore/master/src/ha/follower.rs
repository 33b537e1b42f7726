//! A follower's side of replication: from frames to a copy of the leader's state.

use std::io;

use super::frame::{ReplicationFrame, ReplicationRecords, ReplicationStart};

/// Where a follower keeps what it was told.
///
/// Until the new state is whole the one before stays: a follower may be listed as in sync for it.
pub trait ReplicationSink {
    /// A whole state follows, with all records up to this one and maybe some of the later ones.
    ///
    /// # Errors
    /// When it cannot be kept. So for the others.
    fn begin(&mut self, number: u64) -> io::Result<()>;

    /// A part of it.
    ///
    /// # Errors
    /// As above.
    fn part(&mut self, record: &[u8]) -> io::Result<()>;

    /// The new state takes the place of the one before: [`Self::record`] was called for all records that it needs.
    ///
    /// # Errors
    /// As above. Then the state before stays.
    fn finish(&mut self) -> io::Result<()>;

    /// A record, in order.
    fn record(&mut self, number: u64, record: &[u8]);

    /// What was recorded survives whatever the copy promises to survive.
    ///
    /// # Errors
    /// As above.
    fn commit(&mut self) -> io::Result<()>;
}

/// Why a leader is not followed any more.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// It says what it must not say now.
    #[error("the leader sent {0} where it must not")]
    Unexpected(&'static str),
    /// It has another term than the store tells.
    #[error("the leader has term {0}, the store says {1}")]
    Term(i64, i64),
    /// A record is missing.
    #[error("record {0} came where {1} was due")]
    Gap(u64, u64),
    /// The copy cannot be kept.
    #[error("changes cannot be kept: {0}")]
    Copy(#[from] io::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FollowerPhase {
    /// No answer yet.
    Handshake,
    /// The state is coming.
    Loading,
    /// It is whole as soon as this record is there.
    CatchingUp(u64),
    /// The copy is whole.
    Following,
}

/// One connection to a leader.
#[derive(Debug)]
pub struct ReplicationFollower {
    term: i64,
    phase: FollowerPhase,
    /// The last record that the copy has.
    last: u64,
    /// What the leader was told that the copy has.
    reported_last: Option<u64>,
}

impl ReplicationFollower {
    /// A follower of the leader with this term, with what its greeting says: the epoch and the number of its last record.
    pub fn new(term: i64, has: Option<(u64, u64)>) -> Self {
        let reported_last = has.map(|(_, number)| number);
        Self { term, phase: FollowerPhase::Handshake, last: 0, reported_last }
    }

    /// The leader said this. Returns up to which record to acknowledge, if anything.
    ///
    /// # Errors
    /// [`FollowError`]. The connection is of no more use.
    pub fn handle_frame(
        &mut self,
        frame: ReplicationFrame<'_>,
        copy: &mut impl ReplicationSink,
    ) -> Result<Option<u64>, FollowError> {
        match (frame, self.phase) {
            (ReplicationFrame::Welcome { term, .. }, FollowerPhase::Handshake) if term != self.term => {
                return Err(FollowError::Term(term, self.term));
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
                records.try_for_each(|it| copy.part(it))?;
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
                return Err(FollowError::Gap(number, self.last));
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
            return Err(FollowError::Gap(first, self.last.saturating_add(1)));
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
        ReplicationFrame::Hello { .. } => "a greeting",
        ReplicationFrame::Welcome { .. } => "a welcome",
        ReplicationFrame::State(_) => "a part of its state",
        ReplicationFrame::StateComplete(_) => "the end of its state",
        ReplicationFrame::Records(..) => "records",
        ReplicationFrame::Heartbeat(_) => "that nothing is new",
        ReplicationFrame::Acknowledged(_) => "an acknowledgement",
    }
}
