//! Reads all keys of the store, now and then.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::key::ObjectKey;
use moongate_master_client::admin::AdminError;
use moongate_master_client::snapshot::{self, StoreSnapshotOptions, StoreSnapshotSummary};
use moongate_scheduler::index::ReconcileSource;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::StoreView;
use crate::fleet::FleetReader;
use crate::predict::store_keys::StoreKeyNaming;

/// Pause between two readings of all keys. What requests use is asked for anyway; this finds what others stored.
const SCAN_INTERVAL: Duration = Duration::from_secs(10);
/// The same while events tell what others store. They leave out what people remove by hand, and what goes with a node, which is
/// noticed otherwise; so a reading corrects little, and it costs the master some microseconds for every key.
const SCAN_INTERVAL_WITH_EVENTS: Duration = Duration::from_secs(600);
/// Pause after a reading that failed; doubles up to the longest. A reading begins with a list of all keys, which is dear.
const SCAN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_SCAN_RETRY_DELAY: Duration = Duration::from_secs(60);
/// How long the first reading waits for the first events, because what is stored after the reading and before them is not heard of.
const EVENT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

impl StoreView {
    /// Reads all keys again and again until `stop`. `events`: they are going to be followed.
    pub(crate) async fn run_scanner(
        self: Arc<Self>,
        fleet: FleetReader,
        events: bool,
        stop: CancellationToken,
    ) {
        let reading = async {
            if events {
                let _none_yet = timeout(EVENT_CONNECT_TIMEOUT, self.event_sync.connected.notified()).await;
            } else {
                self.recommend_events().await;
            }
            let mut failed = SCAN_RETRY_DELAY;
            loop {
                let layouts = fleet.current().store_namings();
                if layouts.is_empty() {
                    sleep(SCAN_RETRY_DELAY).await;
                    continue;
                }
                match self.scan(&layouts).await {
                    Ok(summary) => {
                        failed = SCAN_RETRY_DELAY;
                        // Whatever happens, the master gets its rest.
                        sleep(summary.list_pause(&StoreSnapshotOptions::default())).await;
                    }
                    Err(error) => {
                        tracing::debug!(%error, "the store's keys cannot be read");
                        sleep(failed).await;
                        failed = MAX_SCAN_RETRY_DELAY.min(failed * 2);
                        continue;
                    }
                }
                self.wait_for_next_scan(&layouts, &fleet).await;
            }
        };
        stop.run_until_cancelled(reading).await;
    }

    /// Waits until enough has happened, or may have, since keys of these layouts were read.
    async fn wait_for_next_scan(&self, layouts: &[StoreKeyNaming], fleet: &FleetReader) {
        let read = Instant::now();
        loop {
            let woken = timeout(SCAN_INTERVAL, self.scan_requested.notified()).await.is_ok();
            let nothing_new = self.event_sync.is_in_sync() && fleet.current().store_namings() == layouts;
            if woken || !nothing_new || read.elapsed() >= SCAN_INTERVAL_WITH_EVENTS {
                return;
            }
        }
    }

    async fn scan(&self, layouts: &[StoreKeyNaming]) -> Result<StoreSnapshotSummary, AdminError> {
        // What has happened until now is read now.
        let _asked_for = self.scan_requested.notified().now_or_never();
        let begun = self.event_sync.scan_started();
        self.index.update(|pages| pages.begin_reconcile(ReconcileSource::Store));
        let of_layout = |key: &ObjectKey<'_>| layouts.iter().find_map(|layout| layout.parse_key(key));
        // A full index is left to pages that somebody has asked for.
        let wanted = |key: &ObjectKey<'_>| {
            of_layout(key).is_some_and(|stored| self.index.has_capacity_for(stored.page))
        };
        let found = |key: &ObjectKey<'_>, replicas: &KeyReplicas<'_>| {
            if let Some(stored) = of_layout(key) {
                self.insert(stored, replicas);
            }
        };
        let summary =
            snapshot::read(&self.admin, &StoreSnapshotOptions::default(), &self.update_lock, wanted, found)
                .await?;
        self.index.update(|pages| pages.end_reconcile(ReconcileSource::Store));
        self.event_sync.scan_completed(begun);
        self.metrics.scans.inc();
        self.metrics.objects.set(i64::try_from(summary.located).unwrap_or(i64::MAX));
        tracing::debug!(?summary, "the store's keys were read");
        Ok(summary)
    }
}
