//! Reads all keys of the store, now and then.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::key::ObjectKey;
use moongate_kvstore::admin::AdminError;
use moongate_kvstore::snapshot::{self, Options, Summary};
use moongate_scheduler::index::Source;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::StoreView;
use crate::fleet::FleetReader;
use crate::predict::stored::StoredAs;

/// Pause between two readings of all keys. What requests use is asked for anyway; this finds what others stored.
const READ_EVERY: Duration = Duration::from_secs(10);
/// The same while events tell what others store. They leave out what people remove by hand, and what goes with a node, which is
/// noticed otherwise; so a reading corrects little, and it costs the master some microseconds for every key.
const READ_SELDOM: Duration = Duration::from_secs(600);
/// Pause after a reading that failed; doubles up to the longest. A reading begins with a list of all keys, which is dear.
const READ_AGAIN: Duration = Duration::from_secs(1);
const READ_AGAIN_LONGEST: Duration = Duration::from_secs(60);
/// How long the first reading waits for the first events, because what is stored after the reading and before them is not heard of.
const EVENTS_FIRST: Duration = Duration::from_secs(2);

impl StoreView {
    /// Reads all keys again and again until `stop`. `events`: they are going to be followed.
    pub(crate) async fn keep_read(
        self: Arc<Self>,
        fleet: FleetReader,
        events: bool,
        stop: CancellationToken,
    ) {
        let reading = async {
            if events {
                let _none_yet = timeout(EVENTS_FIRST, self.following.begun.notified()).await;
            } else {
                self.recommend_events().await;
            }
            let mut failed = READ_AGAIN;
            loop {
                let layouts = fleet.current().stored_as();
                if layouts.is_empty() {
                    sleep(READ_AGAIN).await;
                    continue;
                }
                match self.read(&layouts).await {
                    Ok(summary) => {
                        failed = READ_AGAIN;
                        // Whatever happens, the master gets its rest.
                        sleep(summary.rest(&Options::default())).await;
                    }
                    Err(error) => {
                        tracing::debug!(%error, "the store's keys cannot be read");
                        sleep(failed).await;
                        failed = READ_AGAIN_LONGEST.min(failed * 2);
                        continue;
                    }
                }
                self.until_worth_reading(&layouts, &fleet).await;
            }
        };
        stop.run_until_cancelled(reading).await;
    }

    /// Waits until enough has happened, or may have, since keys of these layouts were read.
    async fn until_worth_reading(&self, layouts: &[StoredAs], fleet: &FleetReader) {
        let read = Instant::now();
        loop {
            let woken = timeout(READ_EVERY, self.read_now.notified()).await.is_ok();
            let nothing_new = self.following.is_current() && fleet.current().stored_as() == layouts;
            if woken || !nothing_new || read.elapsed() >= READ_SELDOM {
                return;
            }
        }
    }

    async fn read(&self, layouts: &[StoredAs]) -> Result<Summary, AdminError> {
        // What has happened until now is read now.
        let _asked_for = self.read_now.notified().now_or_never();
        let begun = self.following.reading_begins();
        self.index.change(|pages| pages.begin_epoch(Source::Store));
        let of_layout = |key: &ObjectKey<'_>| layouts.iter().find_map(|layout| layout.read(key));
        // A full index is left to pages that somebody has asked for.
        let wanted =
            |key: &ObjectKey<'_>| of_layout(key).is_some_and(|stored| self.index.has_room_for(stored.page));
        let found = |key: &ObjectKey<'_>, replicas: &KeyReplicas<'_>| {
            if let Some(stored) = of_layout(key) {
                self.put(stored, replicas);
            }
        };
        let summary = snapshot::read(&self.admin, &Options::default(), &self.turn, wanted, found).await?;
        self.index.change(|pages| pages.end_epoch(Source::Store));
        self.following.reading_ended(begun);
        self.metrics.readings.inc();
        self.metrics.objects.set(i64::try_from(summary.located).unwrap_or(i64::MAX));
        tracing::debug!(?summary, "the store's keys were read");
        Ok(summary)
    }
}
