//! The state of a standby master.

use std::io;
use std::sync::Arc;

use moongate_master_core::MasterCoreOptions;

use super::follower::ReplicationSink;
use super::member_folder::{MemberFolder, StateCopyWriter};
use crate::durable::DurableJournal;
use crate::epochs::LogPosition;
use crate::journal::Journal as _;
use crate::state::MasterState;

/// A standby's copy of the leader's state.
#[derive(Debug)]
pub struct StandbyReplica {
    settings: MasterCoreOptions,
    state: MasterState,
    /// Whether `state` resulted from the leader's records alone. A state that this master led with accepts no records.
    accepts_records: bool,
    /// A full copy that replaces `state` once it is complete.
    pending_copy: Option<PendingStateCopy>,
    /// The state on disk, with --data_dir only.
    disk: Option<MemberFolder>,
    /// Records that could not be applied because the objects they refer to are gone.
    skipped_records: u64,
}

#[derive(Debug)]
struct PendingStateCopy {
    state: MasterState,
    files: Option<StateCopyWriter>,
}

impl StandbyReplica {
    /// An empty replica, in memory only.
    pub fn new(settings: MasterCoreOptions) -> Self {
        let state = MasterState::empty(&settings);
        Self { settings, state, accepts_records: true, pending_copy: None, disk: None, skipped_records: 0 }
    }

    /// A replica with the state of a folder, which it continues to write to.
    pub fn on_disk(settings: MasterCoreOptions, disk: MemberFolder, state: MasterState) -> Self {
        Self { state, disk: Some(disk), ..Self::new(settings) }
    }

    /// The last record, if further records can be applied.
    pub fn position(&self) -> Option<LogPosition> {
        self.state.position().filter(|_| self.accepts_records)
    }

    /// Takes the state and its log for leadership; an empty state remains.
    pub fn take_state(&mut self) -> (MasterState, Option<Arc<DurableJournal>>) {
        (self.pending_copy, self.accepts_records) = (None, false);
        if let Some(disk) = &mut self.disk {
            disk.abort_snapshot();
        }
        let state = std::mem::replace(&mut self.state, MasterState::empty(&self.settings));
        (state, self.disk.as_ref().map(|disk| Arc::clone(disk.durable())))
    }

    /// Puts back the state after leadership.
    pub fn return_state(&mut self, state: MasterState) {
        self.state = state;
    }

    /// The folder with the state on disk.
    pub fn disk(&self) -> Option<&MemberFolder> {
        self.disk.as_ref()
    }

    /// Drops an incomplete full copy.
    pub fn discard_pending_copy(&mut self) {
        self.pending_copy = None;
    }

    /// Drops an incomplete copy and closes the log, after following has ended.
    pub fn close(&mut self) {
        self.pending_copy = None;
        if let Some(Err(error)) = self.disk.as_mut().map(MemberFolder::close) {
            tracing::error!(%error, "cannot close the log; the last changes may be lost");
        }
    }

    fn pending_copy(&mut self) -> io::Result<&mut PendingStateCopy> {
        self.pending_copy.as_mut().ok_or_else(|| io::Error::other("no full copy is in progress"))
    }
}

impl ReplicationSink for StandbyReplica {
    fn begin(&mut self, number: u64) -> io::Result<()> {
        self.skipped_records = 0;
        // Drop the files of an earlier copy before its folder is reused.
        self.pending_copy = None;
        let files = self.disk.as_ref().map(|disk| disk.begin_copy(number)).transpose()?;
        let state = MasterState { last_record: number, ..MasterState::empty(&self.settings) };
        self.pending_copy = Some(PendingStateCopy { state, files });
        Ok(())
    }

    fn part(&mut self, record: &[u8]) -> io::Result<()> {
        let copy = self.pending_copy()?;
        let was_applied = copy.state.apply(record);
        if let Some(files) = &mut copy.files {
            files.part(record)?;
        }
        self.skipped_records += u64::from(!was_applied);
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        let Some(PendingStateCopy { state, files }) = self.pending_copy.take() else { return Ok(()) };
        if let (Some(disk), Some(files)) = (&mut self.disk, files) {
            disk.finish_copy(files)?;
        }
        let (keys, last) = (state.master.key_count(), state.last_record);
        tracing::info!(
            keys,
            last_record = last,
            skipped_records = self.skipped_records,
            "received the leader's full state"
        );
        (self.state, self.accepts_records) = (state, true);
        Ok(())
    }

    fn record(&mut self, _: u64, record: &[u8]) {
        let was_applied = if let Some(copy) = &mut self.pending_copy {
            if let Some(files) = &copy.files {
                files.record(record);
            }
            copy.state.apply_next(record)
        } else {
            if let Some(disk) = &self.disk {
                disk.durable().append(record);
            }
            self.state.apply_next(record)
        };
        self.skipped_records += u64::from(!was_applied);
    }

    fn commit(&mut self) -> io::Result<()> {
        let Some(disk) = &mut self.disk else { return Ok(()) };
        disk.durable().commit(self.state.last_record)?;
        disk.poll_snapshot(&self.state);
        Ok(())
    }
}
