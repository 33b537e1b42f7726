//! Keeps the catalogs of this node's segments: polls the master for which objects lie in them.
//!
//! A report counts for bytes that were there when it was requested: what has been written since may be another object's. So an object
//! is recorded when the master has reported everything up to a moment, and only if the ledger's entries of its range are older than
//! the request. Clients before 0.3.13 report an object as complete while its last bytes are on their way, so it waits a second first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mooncake_wire::ErrorCode;
use mooncake_wire::inventory::{HARD_PIN, HAS_CHECKSUM, ObjectChangesArguments, ObjectChangesReply, change};
use mooncake_wire::types::Uuid;
use moongate_master_client::rpc::RpcError;
use moongate_memory::ledger::RecordOutcome;
use moongate_memory::{Ledger, ObjectRecord, ObjectVersion};
use moongate_runtime::Supervisor;

use crate::membership::NodeMembership;
use crate::segment_pool::MountedSegment;

/// Time between two polls of a segment that has no more changes.
const PERIOD: Duration = Duration::from_millis(500);
/// How long a reported object waits until it is recorded.
const RECORD_DELAY: Duration = Duration::from_secs(1);
/// How long the bytes of a reported object are waited for.
const UNPROVEN_LIMIT: Duration = Duration::from_mins(1);
/// Pause after a poll that failed.
const FAILURE_PAUSE: Duration = Duration::from_secs(5);
/// Objects that wait to be recorded. When there are more, the node starts over with what is left.
const MAX_PENDING: usize = 1 << 18;

/// What has become of the master's reports.
#[derive(Debug, Default)]
pub(crate) struct CatalogSyncCounts {
    pub(crate) recorded: AtomicU64,
    /// Objects whose bytes were never all there.
    pub(crate) unproven: AtomicU64,
    /// Records of objects that the master does not have.
    pub(crate) unconfirmed: AtomicU64,
}

/// Keeps catalogs until the supervisor shuts down.
pub(crate) fn start(membership: NodeMembership, counts: Arc<CatalogSyncCounts>, supervisor: &Supervisor) {
    let stop = supervisor.token();
    supervisor.spawn("store-catalog", async move {
        stop.run_until_cancelled(run(&membership, &counts)).await;
    });
}

async fn run(membership: &NodeMembership, counts: &CatalogSyncCounts) {
    let mut followed: HashMap<Uuid, SegmentSync> = HashMap::new();
    loop {
        let registered = membership.pool.segments();
        followed.retain(|id, _| registered.iter().any(|lent| lent.id == *id));
        let mut pause = PERIOD;
        for lent in registered.iter().filter(|lent| lent.ledger().catalog_counts().is_some()) {
            let sync = followed.entry(lent.id).or_default();
            match sync.poll_changes(membership, lent.id, lent.ledger(), counts).await {
                Ok(()) => {}
                // The master lacks a part of its log, and has this segment from the rest.
                Err(RpcError::Refused(ErrorCode::INVALID_PARAMS)) => {
                    announce_and_offer(membership, lent).await;
                }
                // Mooncake's masters do not have this, and a master that is restarted may.
                Err(error) => {
                    tracing::debug!(%error, "the master does not report what lies in this node's segments");
                    pause = if matches!(error, RpcError::Fault(_)) { FAILURE_PAUSE } else { PERIOD };
                }
            }
        }
        tokio::time::sleep(pause).await;
    }
}

async fn announce_and_offer(membership: &NodeMembership, lent: &MountedSegment) {
    let offered = async {
        match membership.announce_inventory(lent).await? {
            true => membership.offer_inventory(lent).await,
            false => Ok(()),
        }
    };
    if let Err(error) = offered.await {
        tracing::warn!(%error, "this segment's objects cannot be offered to the master; trying again");
    }
}

#[derive(Debug)]
struct PendingObject {
    record: ObjectRecord,
    since: Instant,
}

/// How far the catalog of one segment is.
#[derive(Debug, Default)]
struct SegmentSync {
    token: u64,
    pending: BTreeMap<u64, PendingObject>,
    /// Numbers of all objects that were reported since the master began with all of them, by offset.
    confirmed: Option<HashMap<u64, u64>>,
    /// Reports were dropped, because the queue was full.
    is_incomplete: bool,
}

impl SegmentSync {
    /// Polls until there are no more changes.
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
            let reply = membership.master.object_changes(&arguments).await?;
            if !reply.is_well_formed() {
                self.token = 0;
                return Ok(());
            }
            let now = Instant::now();
            self.apply(&reply, ledger, now);
            if reply.caught_up > 0 {
                self.record(ledger, as_of, now, counts);
                return Ok(());
            }
        }
    }

    fn apply(&mut self, reply: &ObjectChangesReply<String>, ledger: &Ledger, now: Instant) {
        self.token = reply.token;
        if reply.is_full > 0 {
            self.pending.clear();
            self.confirmed = Some(HashMap::new());
            self.is_incomplete = false;
        }
        for at in 0..reply.keys.len() {
            let Some((is_stored, record)) = change_at(reply, at) else { continue };
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

    /// The master has reported all up to a moment after the ledger's version was `as_of`.
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
                    "objects in this node's catalog that the master does not have"
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

    /// Whether the object that waits to be recorded at an offset is a later report of the one that is recorded there.
    fn has_same_key(&self, ledger: &Ledger, offset: u64) -> bool {
        let Some(pending) = self.pending.get(&offset) else { return false };
        let recorded = ledger.objects(offset, 1).pop().filter(|it| it.offset == offset);
        recorded.is_some_and(|it| {
            (&it.tenant, &it.key, it.size)
                == (&pending.record.tenant, &pending.record.key, pending.record.size)
        })
    }
}

/// A change: whether an object is there, and which.
fn change_at(reply: &ObjectChangesReply<String>, at: usize) -> Option<(bool, ObjectRecord)> {
    let flags = *reply.flags.get(at)?;
    let record = ObjectRecord {
        tenant: reply.tenants.get(at)?.clone(),
        key: reply.keys.get(at)?.clone(),
        group: reply.groups.get(at)?.clone(),
        offset: *reply.offsets.get(at)?,
        size: *reply.sizes.get(at)?,
        version: ObjectVersion { epoch: reply.epoch, sequence: *reply.sequences.get(at)? },
        checksum: reply.checksums.get(at).copied().filter(|_| flags & HAS_CHECKSUM != 0),
        hard_pin: flags & HARD_PIN != 0,
        crc: 0,
    };
    Some((*reply.kinds.get(at)? == change::STORED, record))
}
