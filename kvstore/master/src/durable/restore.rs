//! From files to a master.
//!
//! A state is complete if a snapshot can be read, and all records after it up to the end of the log. A snapshot's pieces are of different
//! moments, so the log must also reach the last of them. Otherwise see [`super::salvage`].

use std::fmt;
use std::path::Path;

use moongate_master_core::MasterCoreOptions;
use moongate_oplog::{LogRecoveryReport, OplogError, snapshot};

use super::recovery::{RecoveryOutcome, StateDamage};
use super::{DurableJournal, salvage};
use crate::record;
use crate::state::MasterState;

/// What became of a master's state when it was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestoreReport {
    /// Objects that are there again.
    pub keys: u64,
    /// Facts of the log that were made true again.
    pub replayed_facts: u64,
    /// Facts that did not fit: they are about what is gone by now.
    pub skipped_facts: u64,
    /// The last record of the snapshot that was used.
    pub snapshot: Option<u64>,
    /// What was found of the state before.
    pub recovery: RecoveryOutcome,
}

/// What became of a folder's state.
#[derive(Debug)]
pub enum LoadedState {
    /// It has all that was answered for.
    Complete(Box<(DurableJournal, MasterState, RestoreReport)>),
    /// Changes are lost: it has what can be proven. The files are as they were.
    Partial(Box<(DurableJournal, MasterState, RestoreReport)>),
    /// The machine has died, and the last changes may be lost. The files are as they were, damaged or not.
    MachineDied(Option<StateDamage>),
}

/// A snapshot, or the beginning, that records can follow.
pub(super) struct ReplayBase {
    pub(super) state: MasterState,
    pub(super) restored: RestoreReport,
    /// The record up to which the log is needed for it. None if an older release wrote it, and did not say.
    needs_through: Option<u64>,
}

impl ReplayBase {
    fn beginning(settings: &MasterCoreOptions) -> Self {
        let (state, restored) = (MasterState::empty(settings), RestoreReport::default());
        Self { state, restored, needs_through: Some(0) }
    }

    /// Whether the log has all that follows it.
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
        let beginning = ReplayBase::beginning(settings);
        // Snapshots that can be read say that more was written than the log has.
        if best.is_none()
            && newest.is_none_or(|number| number < opened.next)
            && beginning.has_following_log(opened)
        {
            return self.complete(beginning, damage, opened);
        }
        let mut damage = damage.unwrap_or_default();
        if damage.description.is_empty() {
            damage.description = match newest {
                Some(number) if number >= opened.next => {
                    damage.missing_records = number - opened.next + 1;
                    "the log ends before the newest snapshot"
                }
                Some(_) => "the log does not reach from a snapshot to its end",
                None => "there is no snapshot, and the log does not go back to the beginning",
            }
            .to_owned();
        }
        let needs = best.as_ref().and_then(|it: &ReplayBase| it.needs_through);
        let goes_on = newest.max(needs).is_none_or(|number| number < opened.next);
        salvage::salvage(self, best, opened, goes_on, damage, settings)
    }

    fn base(&self, number: u64, path: &Path, settings: &MasterCoreOptions) -> Result<ReplayBase, OplogError> {
        let state = MasterState { last_record: number, ..MasterState::empty(settings) };
        let mut restored = RestoreReport { snapshot: Some(number), ..RestoreReport::default() };
        let mut needs_through = None;
        snapshot::read(&self.folder, path, |entry| match record::needs_through(entry) {
            Some(number) => needs_through = Some(number),
            None => restored.applied(state.apply(entry)),
        })?;
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
        restored.keys = state.master.key_count();
        restored.recovery = match (damage, opened.torn_bytes) {
            (Some(damage), _) => RecoveryOutcome::IntactDespiteDamage(damage),
            (None, 0) => RecoveryOutcome::Intact,
            (None, bytes) => RecoveryOutcome::TornTail { bytes },
        };
        Ok(LoadedState::Complete(Box::new((self, state, restored))))
    }

    /// Makes the records after the state's last one true, up to a number.
    pub(super) fn replay(
        &self,
        state: &mut MasterState,
        restored: &mut RestoreReport,
        through: u64,
    ) -> Result<(), OplogError> {
        let mut reader = self.log.reader(state.last_record.saturating_add(1))?;
        while state.last_record < through
            && let Some((_, record)) = reader.next()?
        {
            restored.applied(state.apply_next(record));
            restored.replayed_facts += 1;
        }
        Ok(())
    }
}

impl RestoreReport {
    /// Whether acknowledged changes are missing: the log is absent, or parts of it are.
    pub fn lacks_log(&self) -> bool {
        !self.recovery.is_complete() || self.snapshot.is_none() && self.replayed_facts == 0
    }

    /// Logs what was lost.
    pub(crate) fn log_losses(&self, folder: &Path) {
        let folder = folder.display();
        match &self.recovery {
            RecoveryOutcome::Intact => {}
            RecoveryOutcome::MachineDied => tracing::warn!(%folder, "begins {}", self.recovery),
            RecoveryOutcome::TornTail { bytes } => {
                tracing::warn!(%folder, bytes, records = 0, "cut off what a crash left of a change that was not answered");
            }
            RecoveryOutcome::IntactDespiteDamage(damage) => {
                let StateDamage { unreadable_bytes, missing_records, .. } = damage;
                tracing::warn!(
                    %folder, bytes = unreadable_bytes, records = missing_records,
                    "files of the state are damaged; nothing is lost: {damage}"
                );
            }
            RecoveryOutcome::Damaged(damage) => {
                let StateDamage { unreadable_bytes, missing_records, .. } = damage;
                tracing::warn!(
                    %folder, bytes = unreadable_bytes, records = missing_records, keys = self.keys,
                    "changes of the state are lost; only objects that are proven are served: {damage}"
                );
            }
        }
    }

    fn applied(&mut self, fits: bool) {
        self.skipped_facts += u64::from(!fits);
    }
}

impl fmt::Display for RestoreReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keys, replayed_facts: facts, snapshot, recovery, .. } = self;
        let from = if snapshot.is_some() { "a snapshot and " } else { "" };
        write!(f, "{keys} keys from {from}{facts} logged changes: {recovery}")
    }
}
