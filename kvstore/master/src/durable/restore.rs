//! Restores a master from its files.
//!
//! A state is complete if one snapshot is readable, and all later records up to the end of the log. A snapshot's batches are from
//! different times, so the log must also reach the time of the last one. Otherwise see [`super::salvage`].

use std::fmt;
use std::path::Path;

use moongate_master_core::MasterCoreOptions;
use moongate_oplog::snapshot::SnapshotReader;
use moongate_oplog::{LogRecoveryReport, OplogError, snapshot};

use super::parallel_replay::{ReplayThreads, replay};
use super::salvage::DamagedFolder;
use super::{DurableJournal, salvage};
use crate::record;
use crate::recovery::{RecoveryOutcome, StateDamage};
use crate::state::MasterState;

/// Counts and result of a restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestoreReport {
    pub keys: u64,
    /// Number of log records that were applied.
    pub replayed_facts: u64,
    /// Number of records that could not be applied because what they refer to is gone.
    pub skipped_facts: u64,
    /// Last record of the snapshot that was used.
    pub snapshot: Option<u64>,
    /// How much of the previous state was restored.
    pub recovery: RecoveryOutcome,
}

/// A journal, with the state that was restored from it.
#[derive(Debug)]
pub struct RestoredJournal {
    pub journal: DurableJournal,
    pub state: MasterState,
    pub report: RestoreReport,
}

/// A state loaded from a folder.
#[derive(Debug)]
pub enum LoadedState {
    /// All confirmed changes are present.
    Complete(Box<RestoredJournal>),
    /// Changes are lost: the state has what can be verified. The files are unchanged.
    Partial(Box<RestoredJournal>),
    /// The machine has crashed and the last changes may be lost. The files are unchanged, damaged or not.
    MachineDied(Option<StateDamage>),
}

/// A snapshot, or the empty state, to which records can be applied.
pub(super) struct ReplayBase {
    pub(super) state: MasterState,
    pub(super) restored: RestoreReport,
    /// The last record that the snapshot needs from the log. `None` if it was written by an older release, which did not store this.
    needs_through: Option<u64>,
}

impl ReplayBase {
    pub(super) fn empty(settings: &MasterCoreOptions) -> Self {
        let (state, restored) = (MasterState::empty(settings), RestoreReport::default());
        state.master.begin_bulk_replay();
        Self { state, restored, needs_through: Some(0) }
    }

    /// Whether the log has all records that follow.
    fn has_following_log(&self, opened: &LogRecoveryReport) -> bool {
        let from = self.state.last_record.saturating_add(1);
        opened.contiguous_from.max(opened.first) <= from
            && from <= opened.next
            && self.needs_through.is_none_or(|number| number < opened.next)
    }
}

impl DurableJournal {
    pub(super) fn restore(
        self,
        opened: &LogRecoveryReport,
        settings: &MasterCoreOptions,
    ) -> Result<LoadedState, OplogError> {
        let mut damage = opened.damage.as_ref().map(StateDamage::from);
        let (mut best, mut newest) = (None, None);
        for (number, path) in snapshot::list(&self.folder)? {
            newest = newest.max(Some(number));
            match self.base(number, &path, settings) {
                Ok(base) if base.has_following_log(opened) => return self.complete(base, damage, opened),
                Ok(base) => _ = best.get_or_insert(base),
                Err(error @ OplogError::Damaged { .. }) => {
                    let damage = damage.get_or_insert_default();
                    damage.damaged_snapshots += 1;
                    if damage.description.is_empty() {
                        damage.description = error.to_string();
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let empty = ReplayBase::empty(settings);
        // A readable snapshot proves that more was written than the log has.
        if best.is_none()
            && newest.is_none_or(|number| number < opened.next)
            && empty.has_following_log(opened)
        {
            return self.complete(empty, damage, opened);
        }
        let mut damage = damage.unwrap_or_default();
        if damage.description.is_empty() {
            damage.description = match newest {
                Some(number) if number >= opened.next => {
                    damage.missing_records = number - opened.next + 1;
                    "the log ends before the newest snapshot"
                }
                Some(_) => "no snapshot is followed by an unbroken log",
                None => "there is no snapshot, and the start of the log is missing",
            }
            .to_owned();
        }
        let needs = best.as_ref().and_then(|base: &ReplayBase| base.needs_through);
        let is_log_end_present = newest.max(needs).is_none_or(|number| number < opened.next);
        salvage::salvage(self, DamagedFolder { base: best, opened, is_log_end_present, damage }, settings)
    }

    fn base(&self, number: u64, path: &Path, settings: &MasterCoreOptions) -> Result<ReplayBase, OplogError> {
        let state = MasterState { last_record: number, ..MasterState::empty(settings) };
        state.master.begin_bulk_replay();
        let mut needs_through = None;
        let mut reader = SnapshotReader::open(&self.folder, path)?;
        let next_block = |buffer| reader.next_block(buffer);
        let counts = replay(&state, ReplayThreads::default(), u64::MAX, next_block, |entry, _| {
            match record::needs_through(entry) {
                Some(number) => needs_through = Some(number),
                None => return state.apply_aux(entry, number),
            }
            true
        })?;
        let restored = RestoreReport {
            snapshot: Some(number),
            skipped_facts: counts.skipped,
            ..RestoreReport::default()
        };
        Ok(ReplayBase { state, restored, needs_through })
    }

    fn complete(
        self,
        base: ReplayBase,
        damage: Option<StateDamage>,
        opened: &LogRecoveryReport,
    ) -> Result<LoadedState, OplogError> {
        let ReplayBase { mut state, mut restored, .. } = base;
        self.replay(&mut state, &mut restored, u64::MAX)?;
        restored.skipped_facts += state.master.end_bulk_replay(&ReplayThreads::default());
        restored.keys = state.master.key_count();
        restored.recovery = match (damage, opened.torn_bytes) {
            (Some(damage), _) => RecoveryOutcome::IntactDespiteDamage(damage),
            (None, 0) => RecoveryOutcome::Intact,
            (None, bytes) => RecoveryOutcome::TornTail { bytes },
        };
        Ok(LoadedState::Complete(Box::new(RestoredJournal { journal: self, state, report: restored })))
    }

    /// Applies the log records after the last one of a state in a bulk replay, up to and including record `through`.
    pub(super) fn replay(
        &self,
        state: &mut MasterState,
        restored: &mut RestoreReport,
        through: u64,
    ) -> Result<(), OplogError> {
        let mut reader = self.log.block_reader(state.last_record.saturating_add(1))?;
        let next_block = |buffer| reader.next_block(buffer);
        let counts = replay(state, ReplayThreads::default(), through, next_block, |record, number| {
            state.apply_aux(record, number)
        })?;
        state.last_record += counts.records;
        restored.replayed_facts += counts.records;
        restored.skipped_facts += counts.skipped;
        Ok(())
    }
}

impl RestoreReport {
    /// Whether confirmed changes are missing: the log is missing or incomplete.
    pub fn lacks_log(&self) -> bool {
        !self.recovery.is_complete() || self.snapshot.is_none() && self.replayed_facts == 0
    }

    /// Logs what was lost.
    pub(crate) fn log_losses(&self, folder: &Path) {
        let folder = folder.display();
        match &self.recovery {
            RecoveryOutcome::Intact => {}
            RecoveryOutcome::MachineDied => tracing::warn!(%folder, "starting {}", self.recovery),
            RecoveryOutcome::TornTail { bytes } => {
                tracing::warn!(%folder, bytes, records = 0, "truncated a torn record at the end of the log");
            }
            RecoveryOutcome::IntactDespiteDamage(damage) => {
                let StateDamage { unreadable_bytes, missing_records, .. } = damage;
                tracing::warn!(
                    %folder, bytes = unreadable_bytes, records = missing_records,
                    "some files of the state are damaged; nothing is lost: {damage}"
                );
            }
            RecoveryOutcome::Damaged(damage) => {
                let StateDamage { unreadable_bytes, missing_records, .. } = damage;
                tracing::warn!(
                    %folder, bytes = unreadable_bytes, records = missing_records, keys = self.keys,
                    "changes are lost; serving verified objects only: {damage}"
                );
            }
        }
    }
}

impl fmt::Display for RestoreReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keys, replayed_facts: facts, snapshot, recovery, .. } = self;
        let from = if snapshot.is_some() { "a snapshot and " } else { "" };
        write!(f, "{keys} keys from {from}{facts} logged changes: {recovery}")
    }
}
