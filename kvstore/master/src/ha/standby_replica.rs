//! The state that a master has while another leads.

use std::io;
use std::sync::Arc;

use moongate_master_core::MasterCoreOptions;

use super::follower::ReplicationSink;
use super::member_folder::{MemberFolder, StateCopyWriter};
use crate::durable::DurableJournal;
use crate::journal::Journal as _;
use crate::state::MasterState;

/// A follower's copy of the leader's state.
#[derive(Debug)]
pub struct StandbyReplica {
    settings: MasterCoreOptions,
    state: MasterState,
    /// Whether `state` has been changed by records alone. One that was led from takes no records any more.
    accepts_records: bool,
    /// The state that shall take its place, when it is whole.
    pending_copy: Option<PendingStateCopy>,
    /// Where the state is kept, if it is.
    disk: Option<MemberFolder>,
    /// Records that did not fit: they are about what is gone by now.
    skipped_records: u64,
}

#[derive(Debug)]
struct PendingStateCopy {
    state: MasterState,
    files: Option<StateCopyWriter>,
}

impl StandbyReplica {
    /// An empty state, in memory only.
    pub fn new(settings: MasterCoreOptions) -> Self {
        let state = MasterState::empty(&settings);
        Self { settings, state, accepts_records: true, pending_copy: None, disk: None, skipped_records: 0 }
    }

    /// The state that was on a disk, and goes on there.
    pub fn on_disk(settings: MasterCoreOptions, disk: MemberFolder, state: MasterState) -> Self {
        Self { state, disk: Some(disk), ..Self::new(settings) }
    }

    /// The epoch and the number of the last record that it has, if records can follow on it.
    pub fn position(&self) -> Option<(u64, u64)> {
        self.state.position().filter(|_| self.accepts_records)
    }

    /// Takes the state to lead from it, and its log; an empty one stays.
    pub fn take_state(&mut self) -> (MasterState, Option<Arc<DurableJournal>>) {
        (self.pending_copy, self.accepts_records) = (None, false);
        if let Some(disk) = &mut self.disk {
            disk.abort_snapshot();
        }
        let state = std::mem::replace(&mut self.state, MasterState::empty(&self.settings));
        (state, self.disk.as_ref().map(|disk| Arc::clone(disk.durable())))
    }

    /// Puts back what was led.
    pub fn return_state(&mut self, state: MasterState) {
        self.state = state;
    }

    /// Where the state is kept.
    pub fn disk(&self) -> Option<&MemberFolder> {
        self.disk.as_ref()
    }

    /// Forgets a state that was not received to its end.
    pub fn discard_pending_copy(&mut self) {
        self.pending_copy = None;
    }

    /// Nothing follows any more. What is kept on a disk is whole after this.
    pub fn close(&mut self) {
        self.pending_copy = None;
        if let Some(Err(error)) = self.disk.as_mut().map(MemberFolder::close) {
            tracing::error!(%error, "the last changes may not be saved");
        }
    }

    fn pending_copy(&mut self) -> io::Result<&mut PendingStateCopy> {
        self.pending_copy.as_mut().ok_or_else(|| io::Error::other("no state has begun"))
    }
}

impl ReplicationSink for StandbyReplica {
    fn begin(&mut self, number: u64) -> io::Result<()> {
        self.skipped_records = 0;
        // Files that were begun before have to be gone first.
        self.pending_copy = None;
        let files = self.disk.as_ref().map(|disk| disk.begin_copy(number)).transpose()?;
        let state = MasterState { last_record: number, ..MasterState::empty(&self.settings) };
        self.pending_copy = Some(PendingStateCopy { state, files });
        Ok(())
    }

    fn part(&mut self, record: &[u8]) -> io::Result<()> {
        let loading = self.pending_copy()?;
        let fits = loading.state.apply(record);
        if let Some(files) = &mut loading.files {
            files.part(record)?;
        }
        self.skipped_records += u64::from(!fits);
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        let Some(PendingStateCopy { state, files }) = self.pending_copy.take() else { return Ok(()) };
        if let (Some(disk), Some(files)) = (&mut self.disk, files) {
            disk.finish_copy(files)?;
        }
        let (keys, last) = (state.master.key_count(), state.last_record);
        tracing::info!(keys, last, left_out = self.skipped_records, "has the leader's state");
        (self.state, self.accepts_records) = (state, true);
        Ok(())
    }

    fn record(&mut self, _: u64, record: &[u8]) {
        let fits = if let Some(loading) = &mut self.pending_copy {
            if let Some(files) = &loading.files {
                files.record(record);
            }
            loading.state.apply_next(record)
        } else {
            if let Some(disk) = &self.disk {
                disk.durable().append(record);
            }
            self.state.apply_next(record)
        };
        self.skipped_records += u64::from(!fits);
    }

    fn commit(&mut self) -> io::Result<()> {
        let Some(disk) = &mut self.disk else { return Ok(()) };
        disk.durable().commit(self.state.last_record)?;
        disk.poll_snapshot(&self.state);
        Ok(())
    }
}
