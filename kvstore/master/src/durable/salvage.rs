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
use moongate_master_core::{MasterCoreOptions, SnapshotCursor, StateChange, StateChangeSink};
use moongate_oplog::{LogRecoveryReport, OperationLog, OplogError, OplogOptions, snapshot};

use super::recovery::{RecoveryOutcome, StateDamage};
use super::restore::{LoadedState, ReplayBase, RestoreReport};
use super::{AuxState, DurableJournal, PersistenceSchedule, StatePersister};
use crate::state::MasterState;

/// Numbers of KV events that are left out after a loss: those that lost changes may have reserved.
const EVENT_NUMBER_GAP: u64 = 1 << 32;

/// Facts about nodes and tenants, made true in another master.
struct RegistryReplayer<'a> {
    state: &'a MasterState,
    skipped_facts: u64,
}

impl StateChangeSink for RegistryReplayer<'_> {
    fn record(&mut self, fact: StateChange<'_>) {
        let is_wanted = matches!(
            fact,
            StateChange::SegmentMounted { .. }
                | StateChange::SegmentStatus { .. }
                | StateChange::ClientSilent { .. }
                | StateChange::ClientRecovered { .. }
                | StateChange::DiskMounted { .. }
                | StateChange::TenantQuota { .. }
        );
        if is_wanted {
            self.skipped_facts += u64::from(self.state.master.apply(&fact).is_err());
        }
    }
}

/// Clients that are not silent.
struct LiveClients(BTreeSet<Uuid>);

impl StateChangeSink for LiveClients {
    fn record(&mut self, fact: StateChange<'_>) {
        if let StateChange::ClientRecovered { client, .. } = fact {
            self.0.insert(client);
        }
    }
}

/// Builds a state of what is proven. `base` is a state before the damage; `goes_on`: whether the log's end is the end of what was
/// written.
pub(super) fn salvage(
    durable: DurableJournal,
    base: Option<ReplayBase>,
    opened: &LogRecoveryReport,
    goes_on: bool,
    mut damage: StateDamage,
    settings: &MasterCoreOptions,
) -> Result<LoadedState, OplogError> {
    let mut before = match base {
        Some(base) => base.state,
        None => MasterState::empty(settings),
    };
    let readable_to = opened.damage.as_ref().map_or(0, |it| it.readable_to);
    if readable_to > before.last_record && opened.first <= before.last_record.saturating_add(1) {
        durable.replay(&mut before, &mut RestoreReport::default(), readable_to)?;
    }
    let before_keys = before.master.key_count();
    let mut state = MasterState::empty(settings);
    before.aux.for_each_record(|record| _ = state.apply(record));
    let mut registry = RegistryReplayer { state: &state, skipped_facts: 0 };
    before.master.snapshot(SnapshotCursor::default(), 1, &mut registry);
    let mut restored = RestoreReport { skipped_facts: registry.skipped_facts, ..RestoreReport::default() };
    drop(before);
    // Without damage to the log itself, a snapshot shows that its end is missing.
    let is_proven = goes_on && (opened.damage.is_some() || opened.first > 1);
    state.last_record =
        if is_proven { opened.contiguous_from.max(opened.first) - 1 } else { opened.next - 1 };
    durable.replay(&mut state, &mut restored, u64::MAX)?;
    state.aux.reserve_events(state.aux.events().saturating_add(EVENT_NUMBER_GAP));
    restored.keys = state.master.key_count();
    damage.unproven_keys = before_keys.saturating_sub(restored.keys);
    restored.recovery = RecoveryOutcome::Damaged(damage);
    Ok(LoadedState::Partial(Box::new((durable, state, restored))))
}

/// Every client counts as silent until it has mounted its memory again.
pub(super) fn silence_clients(state: &MasterState, now_ms: u64) {
    let mut heard = LiveClients(BTreeSet::new());
    state.master.snapshot(SnapshotCursor::default(), 1, &mut heard);
    for client in heard.0 {
        state.master.client_disconnected(now_ms, client, &mut ());
    }
}

impl DurableJournal {
    /// Preserves damaged files, and writes a new snapshot, so that the next start finds the state complete. Until then, the files are
    /// unchanged.
    pub(super) fn rewrite_snapshot(
        mut self,
        state: &MasterState,
        options: OplogOptions,
        damage: &mut StateDamage,
    ) -> Result<Self, OplogError> {
        damage.preserved_at = Some(self.folder.preserve()?);
        let newest = snapshot::list(&self.folder)?.first().map_or(0, |(number, _)| *number);
        if self.log.next() <= newest {
            // Its numbers have been given out.
            snapshot::remove_all(&self.folder)?;
            self.log = OperationLog::begin_at(self.folder.clone(), options, newest.saturating_add(1))?;
        }
        let number = self.log.next() - 1;
        let beside: &AuxState = &state.aux;
        StatePersister::new(&self, &state.master, beside, PersistenceSchedule::default()).snapshot()?;
        snapshot::remove_others(&self.folder, Some(number))?;
        self.log.prune(number.saturating_add(1))?;
        Ok(self)
    }
}
