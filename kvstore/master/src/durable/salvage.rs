//! Restores what can be verified when changes are lost.
//!
//! An unreadable change may have removed an object and given its memory to another one. So no object from before the damage is verified,
//! whatever a snapshot or earlier records contain: it is dropped. Everything after the last damage is verified if the log is unbroken up
//! to its end: the record that makes an object readable lists all of its locations, it owned them at that time, and every later change of
//! the object is in the log. If records are missing at the end, nothing is verified.
//!
//! Segments, quotas and transfer metadata from before the damage are kept. They verify nothing by themselves: every client counts as
//! silent until it has mounted its memory again, and a client with other memory loses its objects, as after any restart. Tasks, copies
//! and drain jobs are dropped.

use std::collections::BTreeSet;

use mooncake_wire::types::Uuid;
use moongate_master_core::{MasterCoreOptions, SnapshotCursor, StateChange, StateChangeSink};
use moongate_oplog::{LogRecoveryReport, OperationLog, OplogError, OplogOptions, snapshot};

use super::parallel_replay::ReplayThreads;
use super::restore::{LoadedState, ReplayBase, RestoreReport, RestoredJournal};
use super::{DurableJournal, PersistenceSchedule, StatePersister};
use crate::recovery::{RecoveryOutcome, StateDamage};
use crate::state::{AuxState, MasterState};

/// KV event numbers to skip after a loss: the lost changes may have reserved more numbers than the state has.
const EVENT_NUMBER_GAP: u64 = 1 << 32;

/// Applies records of nodes and tenants to another master.
struct RegistryReplayer<'a> {
    state: &'a MasterState,
    skipped_facts: u64,
}

impl StateChangeSink for RegistryReplayer<'_> {
    fn record(&mut self, fact: StateChange<'_>) {
        let is_registry_record = matches!(
            fact,
            StateChange::SegmentMounted { .. }
                | StateChange::SegmentStatus { .. }
                | StateChange::ClientSilent { .. }
                | StateChange::ClientRecovered { .. }
                | StateChange::DiskMounted { .. }
                | StateChange::TenantQuota { .. }
                | StateChange::ReturnTimes { .. }
        );
        if is_registry_record {
            self.skipped_facts += u64::from(self.state.master.apply(&fact).is_err());
        }
    }
}

/// Collects the clients that are not silent.
struct LiveClients(BTreeSet<Uuid>);

impl StateChangeSink for LiveClients {
    fn record(&mut self, fact: StateChange<'_>) {
        if let StateChange::ClientRecovered { client, .. } = fact {
            self.0.insert(client);
        }
    }
}

/// A damaged folder.
pub(super) struct DamagedFolder<'a> {
    /// A state from before the damage.
    pub(super) base: Option<ReplayBase>,
    pub(super) opened: &'a LogRecoveryReport,
    /// Whether the log contains everything that was written last.
    pub(super) is_log_end_present: bool,
    pub(super) damage: StateDamage,
}

/// Builds a state of what can be verified.
pub(super) fn salvage(
    durable: DurableJournal,
    damaged: DamagedFolder<'_>,
    settings: &MasterCoreOptions,
) -> Result<LoadedState, OplogError> {
    let DamagedFolder { base, opened, is_log_end_present, mut damage } = damaged;
    let mut earlier = base.unwrap_or_else(|| ReplayBase::empty(settings)).state;
    let readable_to = opened.damage.as_ref().map_or(0, |damage| damage.readable_to);
    if readable_to > earlier.last_record && opened.first <= earlier.last_record.saturating_add(1) {
        durable.replay(&mut earlier, &mut RestoreReport::default(), readable_to)?;
    }
    let earlier_keys = earlier.master.key_count();
    let ReplayBase { mut state, .. } = ReplayBase::empty(settings);
    earlier.aux.for_each_record(|record| _ = state.apply(record));
    let mut registry = RegistryReplayer { state: &state, skipped_facts: 0 };
    earlier.master.snapshot(SnapshotCursor::default(), 1, &mut registry);
    let mut restored = RestoreReport { skipped_facts: registry.skipped_facts, ..RestoreReport::default() };
    drop(earlier);
    // If the log itself is undamaged, a snapshot has shown that its end is missing.
    let is_verified = is_log_end_present && (opened.damage.is_some() || opened.first > 1);
    state.last_record =
        if is_verified { opened.contiguous_from.max(opened.first) - 1 } else { opened.next - 1 };
    durable.replay(&mut state, &mut restored, u64::MAX)?;
    restored.skipped_facts += state.master.end_bulk_replay(&ReplayThreads::default());
    state.aux.reserve_events(state.aux.events().saturating_add(EVENT_NUMBER_GAP));
    restored.keys = state.master.key_count();
    damage.unverified_objects = earlier_keys.saturating_sub(restored.keys);
    restored.recovery = RecoveryOutcome::Damaged(damage);
    Ok(LoadedState::Partial(Box::new(RestoredJournal { journal: durable, state, report: restored })))
}

/// Marks every client as silent until it has mounted its memory again.
pub(super) fn silence_clients(state: &MasterState, now_ms: u64) {
    let mut live_clients = LiveClients(BTreeSet::new());
    state.master.snapshot(SnapshotCursor::default(), 1, &mut live_clients);
    for client in live_clients.0 {
        state.master.client_disconnected(now_ms, client, &mut ());
    }
}

impl DurableJournal {
    /// Moves the damaged files away and writes a new snapshot, so that the next start finds a complete state. The files stay unchanged
    /// until this is called.
    pub(super) fn rewrite_snapshot(
        mut self,
        state: &MasterState,
        options: OplogOptions,
        damage: &mut StateDamage,
    ) -> Result<Self, OplogError> {
        damage.preserved_at = Some(self.folder.preserve()?);
        let newest = snapshot::list(&self.folder)?.first().map_or(0, |(number, _)| *number);
        if self.log.next() <= newest {
            // Record numbers up to `newest` are used.
            snapshot::remove_all(&self.folder)?;
            self.log = OperationLog::begin_at(self.folder.clone(), options, newest.saturating_add(1))?;
        }
        let number = self.log.next() - 1;
        let aux: &AuxState = &state.aux;
        StatePersister::new(&self, &state.master, aux, PersistenceSchedule::default()).snapshot()?;
        snapshot::remove_others(&self.folder, Some(number))?;
        self.log.prune(number.saturating_add(1))?;
        Ok(self)
    }
}
