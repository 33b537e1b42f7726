//! Scans all keys of the store periodically.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::key::ObjectKey;
use moongate_master_client::admin::{AdminClient, AdminError};
use moongate_master_client::object_list;
use moongate_master_client::snapshot::{self, StoreSnapshotOptions, StoreSnapshotSummary};
use moongate_runtime::{Backoff, BackoffPolicy};
use moongate_scheduler::index::ReconcileSource;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::StoreView;
use super::object_list::ListedObjectReceiver;
use crate::fleet::FleetReader;
use crate::kv_index::StoreKeyNaming;

/// Pause between two scans of all keys. Blocks that requests use are queried anyway; a scan finds what others stored.
const SCAN_INTERVAL: Duration = Duration::from_secs(10);
/// The same while events are in sync. Events omit manual removals and objects lost with a node, which are detected otherwise; so a
/// scan corrects little, and it costs the master some microseconds per key.
const SCAN_INTERVAL_WITH_EVENTS: Duration = Duration::from_secs(600);
/// Pauses after failed scans. A scan starts with a list of all keys, which is expensive.
const SCAN_BACKOFF: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_secs(1), max: Duration::from_secs(60) };
/// Pause while no engine's keys are known, which is the case until the first engines have been probed.
const NAMING_POLL: Duration = Duration::from_millis(100);
/// How long the first scan waits for the event connection, because changes between the scan and the first event are missed.
const EVENT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

impl StoreView {
    /// Scans all keys in a loop until `stop`. `events`: whether the event stream is going to be followed.
    pub(crate) async fn run_scanner(
        self: Arc<Self>,
        fleet: FleetReader,
        events: bool,
        stop: CancellationToken,
    ) {
        let scanning = async {
            self.admins.check_order().await;
            if events {
                let _none_yet = timeout(EVENT_CONNECT_TIMEOUT, self.event_sync.all_connected()).await;
            } else {
                self.recommend_events().await;
            }
            let mut backoff = Backoff::new(SCAN_BACKOFF);
            loop {
                let namings = fleet.current().store_namings();
                if namings.is_empty() {
                    sleep(NAMING_POLL).await;
                    continue;
                }
                match self.scan(&namings).await {
                    Ok(summary) => {
                        backoff.reset();
                        // A pause that limits the load on the master, whatever happens.
                        sleep(summary.pause_before_next(&StoreSnapshotOptions::default())).await;
                    }
                    Err(error) => {
                        if error.is_transient() {
                            tracing::debug!(%error, "cannot scan the store's keys");
                        } else {
                            tracing::warn!(%error, "cannot scan the store's keys; known ones are kept, and the scan is repeated");
                        }
                        backoff.record_failure();
                        sleep(backoff.pause()).await;
                        continue;
                    }
                }
                self.wait_for_next_scan(&namings, &fleet).await;
            }
        };
        stop.run_until_cancelled(scanning).await;
    }

    /// Waits until a new scan is due, after one with these key namings.
    async fn wait_for_next_scan(&self, namings: &[StoreKeyNaming], fleet: &FleetReader) {
        let scanned_at = Instant::now();
        loop {
            let requested = timeout(SCAN_INTERVAL, self.scan_requested.notified()).await.is_ok();
            let nothing_new = self.event_sync.is_in_sync() && fleet.current().store_namings() == namings;
            if requested || !nothing_new || scanned_at.elapsed() >= SCAN_INTERVAL_WITH_EVENTS {
                return;
            }
        }
    }

    pub(super) async fn scan(&self, namings: &[StoreKeyNaming]) -> Result<StoreSnapshotSummary, AdminError> {
        // Earlier requests for a scan are covered by this one.
        let _requested = self.scan_requested.notified().now_or_never();
        let gaps = self.event_sync.scan_started();
        self.index.update(|blocks| blocks.begin_reconcile(ReconcileSource::Store));
        let (mut summary, mut failure) = (StoreSnapshotSummary::default(), None);
        // All masters in one reconciliation, because each has a part of the blocks. A failed one does not keep the others' blocks out.
        for admin in self.admins.iter() {
            match self.scan_master(admin, namings).await {
                Ok(scanned) => summary += scanned,
                Err(error) => failure = Some(error),
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        self.index.update(|blocks| blocks.end_reconcile(ReconcileSource::Store));
        self.event_sync.scan_completed(gaps);
        self.metrics.scans.inc();
        self.metrics.objects.set(i64::try_from(summary.located).unwrap_or(i64::MAX));
        tracing::debug!(?summary, "scanned the store's keys");
        Ok(summary)
    }

    async fn scan_master(
        &self,
        admin: &AdminClient,
        namings: &[StoreKeyNaming],
    ) -> Result<StoreSnapshotSummary, AdminError> {
        let mut receiver = ListedObjectReceiver::new(self, namings);
        match object_list::read(admin, &self.update_lock, &mut receiver).await {
            // A Mooncake master, or an older one of Moongate.
            Err(AdminError::NotFound { .. }) => {
                self.key_lookup_logged.call_once(|| {
                    tracing::info!(
                        "the store's master does not list locations: its keys are listed and looked up, which takes minutes per million"
                    );
                });
                self.scan_mooncake(admin, namings).await
            }
            result => result,
        }
    }

    /// Lists keys and then queries their locations.
    async fn scan_mooncake(
        &self,
        admin: &AdminClient,
        namings: &[StoreKeyNaming],
    ) -> Result<StoreSnapshotSummary, AdminError> {
        let parse_key = |key: &ObjectKey<'_>| namings.iter().find_map(|naming| naming.parse_key(key));
        // A full index is reserved for blocks of requests.
        let wanted = |key: &ObjectKey<'_>| {
            parse_key(key).is_some_and(|stored| self.index.has_capacity_for(stored.block))
        };
        let found = |key: &ObjectKey<'_>, replicas: &KeyReplicas<'_>| {
            if let Some(stored) = parse_key(key) {
                self.insert(stored, replicas);
            }
        };
        snapshot::read(admin, &StoreSnapshotOptions::default(), &self.update_lock, wanted, found).await
    }
}
