//! Maintains the object catalogs of this node's segments by polling the master for object changes.
//!
//! A report is valid for the bytes that were present when it was requested: later writes may belong to another object. So an object
//! is recorded only after the master has reported everything up to the request, and only if the ledger's entries of its range are
//! older than the request. Clients before 0.3.13 report an object as complete while its last bytes are in flight, so recording is
//! delayed by one second.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mooncake_wire::ErrorCode;
use mooncake_wire::inventory::{
    HARD_PIN, HAS_CHECKSUM, ObjectChangesArguments, ObjectChangesReply, ReportedObjectChange, change,
};
use mooncake_wire::types::Uuid;
use moongate_master_client::rpc::RpcError;
use moongate_memory::ledger::RecordOutcome;
use moongate_memory::{Ledger, ObjectRecord, ObjectVersion};
use moongate_runtime::Supervisor;

use crate::membership::NodeMembership;
use crate::segment_pool::MountedSegment;

/// Time between two polls of a segment that has no more changes.
const PERIOD: Duration = Duration::from_millis(500);
/// Delay between the report of an object and its record.
const RECORD_DELAY: Duration = Duration::from_secs(1);
/// How long to wait for the bytes of a reported object.
const UNPROVEN_LIMIT: Duration = Duration::from_mins(1);
/// Pause after a failed poll.
const FAILURE_PAUSE: Duration = Duration::from_secs(5);
/// Maximum number of objects that wait to be recorded. Excess reports are dropped and requested again later.
const MAX_PENDING: usize = 1 << 18;

/// Counters of the master's object reports.
#[derive(Debug, Default)]
pub(crate) struct CatalogSyncCounts {
    pub(crate) recorded: AtomicU64,
    /// Objects whose bytes did not arrive completely within the limit.
    pub(crate) unproven: AtomicU64,
    /// Records that were dropped because the master does not have the object.
    pub(crate) unconfirmed: AtomicU64,
}

/// Maintains the catalogs until the supervisor shuts down.
pub(crate) fn start(membership: NodeMembership, counts: Arc<CatalogSyncCounts>, supervisor: &Supervisor) {
    let stop = supervisor.token();
    supervisor.spawn("store-catalog", async move {
        stop.run_until_cancelled(run(&membership, &counts)).await;
    });
}

async fn run(membership: &NodeMembership, counts: &CatalogSyncCounts) {
    let mut syncs: HashMap<Uuid, SegmentSync> = HashMap::new();
    loop {
        let registered = membership.pool.segments();
        syncs.retain(|id, _| registered.iter().any(|segment| segment.id == *id));
        let mut pause = PERIOD;
        for segment in registered.iter().filter(|segment| segment.ledger().catalog_counts().is_some()) {
            let sync = syncs.entry(segment.id).or_default();
            match sync.poll_changes(membership, segment.id, segment.ledger(), counts).await {
                Ok(()) => {}
                // The master lost the end of its log, and has this segment from the part that is left.
                Err(RpcError::Refused(ErrorCode::INVALID_PARAMS)) => {
                    announce_and_offer(membership, segment).await;
                }
                // Mooncake's masters lack this call; the next master at this address may have it.
                Err(error) => {
                    tracing::debug!(%error, "the master does not report object changes");
                    pause = if matches!(error, RpcError::Fault(_)) { FAILURE_PAUSE } else { PERIOD };
                }
            }
        }
        tokio::time::sleep(pause).await;
    }
}

async fn announce_and_offer(membership: &NodeMembership, segment: &MountedSegment) {
    let offered = async {
        let inventory = membership.inventory(segment);
        match inventory.announce().await? {
            true => inventory.offer().await,
            false => Ok(()),
        }
    };
    if let Err(error) = offered.await {
        tracing::warn!(%error, "cannot offer this segment's objects to the master; retrying");
    }
}

#[derive(Debug)]
struct PendingObject {
    record: ObjectRecord,
    since: Instant,
}

/// Progress of the catalog of one segment.
#[derive(Debug, Default)]
struct SegmentSync {
    token: u64,
    pending: BTreeMap<u64, PendingObject>,
    /// Sequence numbers by offset of all objects reported since the master started a full report.
    confirmed: Option<HashMap<u64, u64>>,
    /// Whether reports were dropped because the queue was full.
    is_incomplete: bool,
}

impl SegmentSync {
    /// Polls until the master has no more changes.
    async fn poll_changes(
        &mut self,
        membership: &NodeMembership,
        segment_id: Uuid,
        ledger: &Ledger,
        counts: &CatalogSyncCounts,
    ) -> Result<(), RpcError> {
        loop {
            let as_of = ledger.version();
            let arguments = ObjectChangesArguments {
                client_id: membership.client_id,
                segment_id,
                token: self.token,
                epoch: ledger.newest_epoch(),
            };
            let reply = membership.master.object_changes(&arguments).await.inspect_err(|error| {
                if matches!(error, RpcError::Protocol { .. }) {
                    self.token = 0;
                }
            })?;
            let (now, caught_up) = (Instant::now(), reply.caught_up);
            self.apply(reply, ledger, now);
            if caught_up {
                self.record(ledger, as_of, now, counts);
                return Ok(());
            }
        }
    }

    fn apply(&mut self, reply: ObjectChangesReply<String>, ledger: &Ledger, now: Instant) {
        self.token = reply.token;
        if reply.is_full {
            self.pending.clear();
            self.confirmed = Some(HashMap::new());
            self.is_incomplete = false;
        }
        for change in reply.changes {
            let is_stored = change.kind == change::STORED;
            let record = object_record(change, reply.epoch);
            let (offset, version) = (record.offset, record.version);
            if is_stored {
                if let Some(confirmed) = &mut self.confirmed {
                    confirmed.insert(offset, version.sequence);
                }
                self.enqueue(record, ledger, now);
                continue;
            }
            if self.pending.get(&offset).is_some_and(|it| it.record.version <= version) {
                self.pending.remove(&offset);
            }
            if let Some(confirmed) = &mut self.confirmed {
                confirmed.remove(&offset);
            }
            ledger.drop_object(offset, version);
        }
    }

    fn enqueue(&mut self, record: ObjectRecord, ledger: &Ledger, now: Instant) {
        let is_recorded = ledger.object_at(record.offset).is_some_and(|(version, size)| {
            (version.sequence, size) == (record.version.sequence, record.size)
        });
        if is_recorded {
            self.pending.remove(&record.offset);
        } else if self.pending.len() >= MAX_PENDING {
            self.is_incomplete = true;
        } else {
            self.pending.insert(record.offset, PendingObject { record, since: now });
        }
    }

    /// Records pending objects. The master has reported every change up to a time when the ledger's version was at least `as_of`.
    fn record(&mut self, ledger: &Ledger, as_of: u64, now: Instant, counts: &CatalogSyncCounts) {
        if let Some(confirmed) = self.confirmed.take() {
            let is_same = |offset: u64, version: ObjectVersion| {
                confirmed.get(&offset) == Some(&version.sequence) || self.has_same_key(ledger, offset)
            };
            let mut unconfirmed = Vec::new();
            let mut from = 0;
            while let Some(last) = {
                let records = ledger.objects(from, 1024);
                unconfirmed.extend(
                    records
                        .iter()
                        .filter(|it| !is_same(it.offset, it.version))
                        .map(|it| (it.offset, it.version)),
                );
                records.last().map(|it| it.offset)
            } {
                from = last + 1;
            }
            let dropped = unconfirmed
                .into_iter()
                .filter(|(offset, version)| ledger.drop_object(*offset, *version))
                .count();
            if dropped > 0 {
                counts.unconfirmed.fetch_add(dropped as u64, Relaxed);
                tracing::info!(
                    records = dropped,
                    "dropped catalog records of objects that the master does not have"
                );
            }
        }
        let is_due = |it: &PendingObject| now.saturating_duration_since(it.since) >= RECORD_DELAY;
        let due: Vec<u64> =
            self.pending.iter().filter(|(_, it)| is_due(it)).map(|(offset, _)| *offset).collect();
        for offset in due {
            let Some(pending) = self.pending.remove(&offset) else { continue };
            match ledger.record_object(pending.record.clone(), as_of) {
                RecordOutcome::Recorded => _ = counts.recorded.fetch_add(1, Relaxed),
                RecordOutcome::Unrecorded => {}
                RecordOutcome::Unproven if now.saturating_duration_since(pending.since) < UNPROVEN_LIMIT => {
                    self.pending.insert(offset, pending);
                }
                RecordOutcome::Unproven => _ = counts.unproven.fetch_add(1, Relaxed),
            }
        }
        if self.is_incomplete && self.pending.is_empty() {
            self.token = 0;
        }
    }

    /// Whether the pending object at an offset is a later report of the object recorded there.
    fn has_same_key(&self, ledger: &Ledger, offset: u64) -> bool {
        let Some(pending) = self.pending.get(&offset) else { return false };
        let recorded = ledger.objects(offset, 1).pop().filter(|it| it.offset == offset);
        recorded.is_some_and(|it| {
            (&it.tenant, &it.key, it.size)
                == (&pending.record.tenant, &pending.record.key, pending.record.size)
        })
    }
}

fn object_record(change: ReportedObjectChange<String>, epoch: u64) -> ObjectRecord {
    let ReportedObjectChange { tenant, key, group, offset, size, sequence, checksum, flags, .. } = change;
    ObjectRecord {
        tenant,
        key,
        group,
        offset,
        size,
        version: ObjectVersion { epoch, sequence },
        checksum: Some(checksum).filter(|_| flags & HAS_CHECKSUM != 0),
        hard_pin: flags & HARD_PIN != 0,
        crc: 0,
    }
}
