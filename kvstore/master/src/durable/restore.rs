//! From files to a master.
//!
//! A state is complete if a snapshot can be read, and all records after it up to the end of the log. A snapshot's pieces are of different
//! moments, so the log must also reach the last of them. Otherwise see [`super::salvage`].

use std::fmt;
use std::path::Path;

use moongate_kvcore::Settings;
use moongate_oplog::{Error, Opened, snapshot};

use super::recovery::{Recovery, StateDamage};
use super::{Durable, salvage};
use crate::record;
use crate::state::State;

/// What became of a master's state when it was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Objects that are there again.
    pub keys: u64,
    /// Facts of the log that were made true again.
    pub facts: u64,
    /// Facts that did not fit: they are about what is gone by now.
    pub left_out: u64,
    /// The last record of the snapshot that was used.
    pub snapshot: Option<u64>,
    /// What was found of the state before.
    pub recovery: Recovery,
}

/// What became of a folder's state.
#[derive(Debug)]
pub enum Loaded {
    /// It has all that was answered for.
    Complete(Box<(Durable, State, Restored)>),
    /// Changes are lost: it has what can be proven. The files are as they were.
    Partial(Box<(Durable, State, Restored)>),
    /// The machine has died, and the last changes may be lost. The files are as they were, damaged or not.
    MachineDied(Option<StateDamage>),
}

/// A snapshot, or the beginning, that records can follow.
pub(super) struct Base {
    pub(super) state: State,
    pub(super) restored: Restored,
    /// The record up to which the log is needed for it. None if an older release wrote it, and did not say.
    needs_through: Option<u64>,
}

impl Base {
    fn beginning(settings: &Settings) -> Self {
        let (state, restored) = (State::empty(settings), Restored::default());
        Self { state, restored, needs_through: Some(0) }
    }

    /// Whether the log has all that follows it.
    fn is_followed(&self, opened: &Opened) -> bool {
        let from = self.state.last.saturating_add(1);
        opened.unbroken_from.max(opened.first) <= from
            && from <= opened.next
            && self.needs_through.is_none_or(|number| number < opened.next)
    }
}

impl Durable {
    pub(super) fn restore(self, opened: &Opened, settings: &Settings) -> Result<Loaded, Error> {
        let mut damage = opened.damage.as_ref().map(StateDamage::from);
        let (mut best, mut newest) = (None, None);
        for (number, path) in snapshot::list(&self.folder)? {
            newest = newest.max(Some(number));
            match self.base(number, &path, settings) {
                Ok(base) if base.is_followed(opened) => return self.complete(base, damage, opened),
                Ok(base) => _ = best.get_or_insert(base),
                Err(error @ Error::Damaged { .. }) => {
                    let damage = damage.get_or_insert_default();
                    damage.damaged_snapshots += 1;
                    if damage.what.is_empty() {
                        damage.what = error.to_string();
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let beginning = Base::beginning(settings);
        // Snapshots that can be read say that more was written than the log has.
        if best.is_none() && newest.is_none_or(|number| number < opened.next) && beginning.is_followed(opened)
        {
            return self.complete(beginning, damage, opened);
        }
        let mut damage = damage.unwrap_or_default();
        if damage.what.is_empty() {
            damage.what = match newest {
                Some(number) if number >= opened.next => {
                    damage.missing_records = number - opened.next + 1;
                    "the log ends before the newest snapshot"
                }
                Some(_) => "the log does not reach from a snapshot to its end",
                None => "there is no snapshot, and the log does not go back to the beginning",
            }
            .to_owned();
        }
        let needs = best.as_ref().and_then(|it: &Base| it.needs_through);
        let goes_on = newest.max(needs).is_none_or(|number| number < opened.next);
        salvage::salvage(self, best, opened, goes_on, damage, settings)
    }

    fn base(&self, number: u64, path: &Path, settings: &Settings) -> Result<Base, Error> {
        let state = State { last: number, ..State::empty(settings) };
        let mut restored = Restored { snapshot: Some(number), ..Restored::default() };
        let mut needs_through = None;
        snapshot::read(&self.folder, path, |entry| match record::needs_through(entry) {
            Some(number) => needs_through = Some(number),
            None => restored.applied(state.apply(entry)),
        })?;
        Ok(Base { state, restored, needs_through })
    }

    fn complete(self, base: Base, damage: Option<StateDamage>, opened: &Opened) -> Result<Loaded, Error> {
        let Base { mut state, mut restored, .. } = base;
        self.replay(&mut state, &mut restored, u64::MAX)?;
        restored.keys = state.master.key_count();
        restored.recovery = match (damage, opened.torn_bytes) {
            (Some(damage), _) => Recovery::Spared(damage),
            (None, 0) => Recovery::Intact,
            (None, bytes) => Recovery::TornTail { bytes },
        };
        Ok(Loaded::Complete(Box::new((self, state, restored))))
    }

    /// Makes the records after the state's last one true, up to a number.
    pub(super) fn replay(
        &self,
        state: &mut State,
        restored: &mut Restored,
        through: u64,
    ) -> Result<(), Error> {
        let mut reader = self.log.reader(state.last.saturating_add(1))?;
        while state.last < through
            && let Some((_, record)) = reader.next()?
        {
            restored.applied(state.next(record));
            restored.facts += 1;
        }
        Ok(())
    }
}

impl Restored {
    /// Whether acknowledged changes are missing: the log is absent, or parts of it are.
    pub fn lacks_log(&self) -> bool {
        !self.recovery.is_complete() || self.snapshot.is_none() && self.facts == 0
    }

    /// Logs what was lost.
    pub(crate) fn warn(&self, folder: &Path) {
        let folder = folder.display();
        match &self.recovery {
            Recovery::Intact => {}
            Recovery::MachineDied => tracing::warn!(%folder, "begins {}", self.recovery),
            Recovery::TornTail { bytes } => {
                tracing::warn!(%folder, bytes, records = 0, "cut off what a crash left of a change that was not answered");
            }
            Recovery::Spared(damage) => {
                let StateDamage { unreadable_bytes, missing_records, .. } = damage;
                tracing::warn!(
                    %folder, bytes = unreadable_bytes, records = missing_records,
                    "files of the state are damaged; nothing is lost: {damage}"
                );
            }
            Recovery::Damaged(damage) => {
                let StateDamage { unreadable_bytes, missing_records, .. } = damage;
                tracing::warn!(
                    %folder, bytes = unreadable_bytes, records = missing_records, keys = self.keys,
                    "changes of the state are lost; only objects that are proven are served: {damage}"
                );
            }
        }
    }

    fn applied(&mut self, fits: bool) {
        self.left_out += u64::from(!fits);
    }
}

impl fmt::Display for Restored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keys, facts, snapshot, recovery, .. } = self;
        let from = if snapshot.is_some() { "a snapshot and " } else { "" };
        write!(f, "{keys} keys from {from}{facts} logged changes: {recovery}")
    }
}
