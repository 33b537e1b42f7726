//! A follower's side of replication: from frames to a copy of the leader's state.

use std::io;

use super::frame::{Frame, Records, Start};

/// Where a follower keeps what it was told.
///
/// Until the new state is whole the one before stays: a follower may be listed as in sync for it.
pub trait Copy {
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
    fn whole(&mut self) -> io::Result<()>;

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
pub enum Unfollowed {
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
enum Phase {
    /// No answer yet.
    Greeting,
    /// The state is coming.
    Loading,
    /// It is whole as soon as this record is there.
    Closing(u64),
    /// The copy is whole.
    Following,
}

/// One connection to a leader.
#[derive(Debug)]
pub struct Follower {
    term: i64,
    phase: Phase,
    /// The last record that the copy has.
    last: u64,
    /// What the leader was told that the copy has.
    has: Option<u64>,
}

impl Follower {
    /// A follower of the leader with this term, with what its greeting says: the epoch and the number of its last record.
    pub fn new(term: i64, has: Option<(u64, u64)>) -> Self {
        let has = has.map(|(_, number)| number);
        Self { term, phase: Phase::Greeting, last: 0, has }
    }

    /// The leader said this. Returns up to which record to acknowledge, if anything.
    ///
    /// # Errors
    /// [`Unfollowed`]. The connection is of no more use.
    pub fn take(&mut self, frame: Frame<'_>, copy: &mut impl Copy) -> Result<Option<u64>, Unfollowed> {
        match (frame, self.phase) {
            (Frame::Welcome { term, .. }, Phase::Greeting) if term != self.term => {
                return Err(Unfollowed::Term(term, self.term));
            }
            (Frame::Welcome { start: Start::Snapshot(number), .. }, Phase::Greeting) => {
                (self.phase, self.last) = (Phase::Loading, number);
                copy.begin(number)?;
            }
            (Frame::Welcome { start: Start::Resume(number), .. }, Phase::Greeting)
                if self.has == Some(number) =>
            {
                (self.phase, self.last) = (Phase::Following, number);
            }
            (Frame::State(mut records), Phase::Loading) => records.try_for_each(|it| copy.part(it))?,
            (Frame::Whole(number), Phase::Loading) => self.phase = Phase::Closing(number),
            (Frame::Facts(first, records), Phase::Loading | Phase::Closing(_) | Phase::Following) => {
                self.records(first, records, copy)?;
            }
            (Frame::Idle(number), Phase::Following) if number != self.last => {
                return Err(Unfollowed::Gap(number, self.last));
            }
            (Frame::Idle(_), Phase::Following) => {}
            (frame, _) => return Err(Unfollowed::Unexpected(name(&frame))),
        }
        if let Phase::Closing(number) = self.phase
            && self.last >= number
        {
            copy.whole()?;
            self.phase = Phase::Following;
        }
        if self.phase != Phase::Following {
            return Ok(None);
        }
        copy.commit()?;
        Ok(Some(self.last))
    }

    fn records(&mut self, first: u64, records: Records<'_>, copy: &mut impl Copy) -> Result<(), Unfollowed> {
        if first != self.last.saturating_add(1) {
            return Err(Unfollowed::Gap(first, self.last.saturating_add(1)));
        }
        for record in records {
            self.last = self.last.saturating_add(1);
            copy.record(self.last, record);
        }
        Ok(())
    }
}

fn name(frame: &Frame<'_>) -> &'static str {
    match frame {
        Frame::Hello { .. } => "a greeting",
        Frame::Welcome { .. } => "a welcome",
        Frame::State(_) => "a part of its state",
        Frame::Whole(_) => "the end of its state",
        Frame::Facts(..) => "records",
        Frame::Idle(_) => "that nothing is new",
        Frame::Acknowledged(_) => "an acknowledgement",
    }
}
