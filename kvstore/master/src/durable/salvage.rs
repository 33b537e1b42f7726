//! What can be proven when changes are lost.
//!
//! A change that cannot be read may have been anything: the removal of an object, and that its space was given to another. So no object
//! from before the damage is proven, whatever a snapshot or earlier records say: it is absent. What follows the last damage without a
//! gap, up to the end of the log, is proven: a record that an object can be read has all of its places, they were its own when that was
//! written, and whatever happened to it since is there too. If records are missing at the end, nothing is proven.
//!
//! Segments, quotas and transfer metadata are taken from before the damage. They prove nothing alone: every client counts as silent
//! until it has mounted its memory again, and one that comes with other memory loses its objects, as after any restart. Tasks, copies
//! and drain jobs are given up.

use std::collections::BTreeSet;

use mooncake_wire::types::Uuid;
use moongate_kvcore::{Effects, Fact, Settings, SnapshotCursor};
use moongate_oplog::{Error, Log, Opened, Options, snapshot};

use super::recovery::{Recovery, StateDamage};
use super::restore::{Base, Loaded, Restored};
use super::{Beside, Durable, Keeper, Pace};
use crate::state::State;

/// Numbers of KV events that are left out after a loss: those that lost changes may have reserved.
const EVENTS_LEFT_OUT: u64 = 1 << 32;

/// Facts about nodes and tenants, made true in another master.
struct Registry<'a> {
    state: &'a State,
    left_out: u64,
}

impl Effects for Registry<'_> {
    fn fact(&mut self, fact: Fact<'_>) {
        let is_wanted = matches!(
            fact,
            Fact::SegmentMounted { .. }
                | Fact::SegmentStatus { .. }
                | Fact::ClientSilent { .. }
                | Fact::ClientBack { .. }
                | Fact::DiskMounted { .. }
                | Fact::TenantQuota { .. }
        );
        if is_wanted {
            self.left_out += u64::from(self.state.master.apply(&fact).is_err());
        }
    }
}

/// Clients that are not silent.
struct HeardClients(BTreeSet<Uuid>);

impl Effects for HeardClients {
    fn fact(&mut self, fact: Fact<'_>) {
        if let Fact::ClientBack { client, .. } = fact {
            self.0.insert(client);
        }
    }
}

/// Builds a state of what is proven. `base` is a state before the damage; `goes_on`: whether the log's end is the end of what was
/// written.
pub(super) fn salvage(
    durable: Durable,
    base: Option<Base>,
    opened: &Opened,
    goes_on: bool,
    mut damage: StateDamage,
    settings: &Settings,
) -> Result<Loaded, Error> {
    let mut before = match base {
        Some(base) => base.state,
        None => State::empty(settings),
    };
    let readable_to = opened.damage.as_ref().map_or(0, |it| it.readable_to);
    if readable_to > before.last && opened.first <= before.last.saturating_add(1) {
        durable.replay(&mut before, &mut Restored::default(), readable_to)?;
    }
    let before_keys = before.master.key_count();
    let mut state = State::empty(settings);
    before.beside.tell(|record| _ = state.apply(record));
    let mut registry = Registry { state: &state, left_out: 0 };
    before.master.snapshot(SnapshotCursor::default(), 1, &mut registry);
    let mut restored = Restored { left_out: registry.left_out, ..Restored::default() };
    drop(before);
    // Without damage to the log itself, a snapshot shows that its end is missing.
    let is_proven = goes_on && (opened.damage.is_some() || opened.first > 1);
    state.last = if is_proven { opened.unbroken_from.max(opened.first) - 1 } else { opened.next - 1 };
    durable.replay(&mut state, &mut restored, u64::MAX)?;
    state.beside.reserve_events(state.beside.events().saturating_add(EVENTS_LEFT_OUT));
    restored.keys = state.master.key_count();
    damage.unproven_keys = before_keys.saturating_sub(restored.keys);
    restored.recovery = Recovery::Damaged(damage);
    Ok(Loaded::Partial(Box::new((durable, state, restored))))
}

/// Every client counts as silent until it has mounted its memory again.
pub(super) fn silence_clients(state: &State, now_ms: u64) {
    let mut heard = HeardClients(BTreeSet::new());
    state.master.snapshot(SnapshotCursor::default(), 1, &mut heard);
    for client in heard.0 {
        state.master.client_lost(now_ms, client, &mut ());
    }
}

impl Durable {
    /// Preserves damaged files, and writes a new snapshot, so that the next start finds the state complete. Until then, the files are
    /// unchanged.
    pub(super) fn renew(
        mut self,
        state: &State,
        options: Options,
        damage: &mut StateDamage,
    ) -> Result<Self, Error> {
        damage.kept = Some(self.folder.preserve()?);
        let newest = snapshot::list(&self.folder)?.first().map_or(0, |(number, _)| *number);
        if self.log.next() <= newest {
            // Its numbers have been given out.
            snapshot::remove_all(&self.folder)?;
            self.log = Log::begin_at(self.folder.clone(), options, newest.saturating_add(1))?;
        }
        let number = self.log.next() - 1;
        let beside: &Beside = &state.beside;
        Keeper::new(&self, &state.master, beside, Pace::default()).snapshot()?;
        snapshot::remove_others(&self.folder, Some(number))?;
        self.log.prune(number.saturating_add(1))?;
        Ok(self)
    }
}
