//! Snapshots of all blocks in a store and their locations.
//!
//! The master publishes at most changes (its PyPI build publishes no events), not its content. So an index of the content
//! starts with a snapshot: list all keys, keep those of blocks, and locate them. Listing a key costs the master about a
//! microsecond and locating it two to three, so a million keys take seconds in which it does little else. The requests are
//! therefore spread over time.

use std::time::{Duration, Instant};

use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::key::ObjectKey;
use tokio::sync::Mutex;

use crate::admin::{AdminClient, AdminError, BatchKeyQuery, KeyStream};

/// Maximum number of retries of a failed lookup. It is worth retrying because a new snapshot needs a new key list.
pub(crate) const MAX_RETRIES: u32 = 5;
pub(crate) const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Maximum pause after a request. On a busy machine, requests take long without loading the master. The limit keeps a snapshot of
/// millions of keys from taking hours, and still leaves the master idle for 98 % of the time.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// Load limits of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreSnapshotOptions {
    /// Share of the master's time for this client's lookups, above 0 and up to 1. The response time of a request counts as the
    /// master's busy time, up to some milliseconds.
    pub busy_share: f64,
    /// Share of the master's time for key lists, averaged between snapshots. The master responds to no other request while it
    /// builds a list, and each gateway requests its own.
    pub list_share: f64,
    /// Maximum number of keys per lookup request, unless [`crate::admin::AdminClientOptions::max_url`] allows fewer. It limits
    /// how long the master is busy without a pause.
    pub chunk: usize,
}

impl Default for StoreSnapshotOptions {
    fn default() -> Self {
        Self { busy_share: 0.05, list_share: 0.01, chunk: 512 }
    }
}

/// Counts and durations of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreSnapshotSummary {
    /// Keys that the master listed.
    pub listed: u64,
    /// Keys that are not a block's, or that the caller's filter excluded.
    pub skipped: u64,
    /// Keys with a readable object.
    pub located: u64,
    /// Keys whose objects were removed or unreadable at the lookup.
    pub missing: u64,
    /// Keys that cannot be requested; see [`AdminClient::locate`].
    pub unqueryable: u64,
    /// Time for which the master built the key list.
    pub list_time: Duration,
    /// Sum of the response times of lookups, or of batches of a list with locations.
    pub lookup_time: Duration,
    /// Failed requests that were repeated.
    pub retries: u32,
    /// Duration of the whole snapshot.
    pub elapsed: Duration,
}

/// Adds the snapshot of another shard of the store, which was taken afterwards.
impl std::ops::AddAssign for StoreSnapshotSummary {
    fn add_assign(&mut self, other: Self) {
        self.listed += other.listed;
        self.skipped += other.skipped;
        self.located += other.located;
        self.missing += other.missing;
        self.unqueryable += other.unqueryable;
        self.list_time += other.list_time;
        self.lookup_time += other.lookup_time;
        self.retries += other.retries;
        self.elapsed += other.elapsed;
    }
}

impl StoreSnapshotSummary {
    /// The pause before the next snapshot that keeps key lists and lookups within their shares of the master's time. Lookups of a
    /// snapshot are mostly spread over it; those of [`crate::object_list`] are not.
    #[must_use]
    pub fn pause_before_next(&self, options: &StoreSnapshotOptions) -> Duration {
        let lists = self.list_time + pause_after(self.list_time, options.list_share);
        let lookups = if self.list_time.is_zero() { self.lookup_time } else { Duration::ZERO };
        let lookups = lookups + pause_after(lookups, options.busy_share);
        lists.max(lookups).saturating_sub(self.elapsed)
    }
}

/// Takes a snapshot of the store. `is_wanted` filters the keys of blocks: a caller for which some parts of a block represent all
/// of them saves the lookups of the others. `found` is called with the replicas of each located key. `order` is locked from each
/// request until its results were passed to `found`: callers that look up single objects concurrently lock it too, so that
/// results are applied in the master's order. Concurrent changes may be included or not. Dropping the future cancels the
/// snapshot.
///
/// # Errors
/// When the master does not respond. `found` may have been called for some keys before.
pub async fn read(
    admin: &AdminClient,
    options: &StoreSnapshotOptions,
    order: &Mutex<()>,
    is_wanted: impl Fn(&ObjectKey<'_>) -> bool,
    mut found: impl FnMut(&ObjectKey<'_>, &KeyReplicas<'_>),
) -> Result<StoreSnapshotSummary, AdminError> {
    let started_at = Instant::now();
    let mut summary = StoreSnapshotSummary::default();
    let mut keys = admin.keys().await?;
    summary.list_time = started_at.elapsed();
    let mut chunk = Vec::new();
    while fill(&mut chunk, &mut keys, options, &is_wanted, &mut summary).await? {
        locate_chunks(admin, options, order, &mut chunk, &mut found, &mut summary).await?;
    }
    summary.unqueryable += keys.dropped();
    summary.listed += keys.dropped();
    summary.elapsed = started_at.elapsed();
    Ok(summary)
}

/// Reads keys until the chunk is full. False if there are none left.
async fn fill(
    chunk: &mut Vec<String>,
    keys: &mut KeyStream,
    options: &StoreSnapshotOptions,
    is_wanted: &impl Fn(&ObjectKey<'_>) -> bool,
    summary: &mut StoreSnapshotSummary,
) -> Result<bool, AdminError> {
    while chunk.len() < options.chunk.max(1) {
        let Some(page) = keys.next().await? else { break };
        for key in page.iter() {
            summary.listed += 1;
            match ObjectKey::parse(key) {
                Some(object) if is_wanted(&object) => chunk.push(key.to_owned()),
                _ => summary.skipped += 1,
            }
        }
    }
    Ok(!chunk.is_empty())
}

/// Locates whole chunks, with a pause after each. A rest smaller than a chunk stays in `keys` for the next call.
async fn locate_chunks(
    admin: &AdminClient,
    options: &StoreSnapshotOptions,
    order: &Mutex<()>,
    keys: &mut Vec<String>,
    found: &mut impl FnMut(&ObjectKey<'_>, &KeyReplicas<'_>),
    summary: &mut StoreSnapshotSummary,
) -> Result<(), AdminError> {
    let size = options.chunk.max(1);
    let mut from = 0;
    while let Some(rest) = keys.get(from..).filter(|rest| !rest.is_empty()) {
        if from > 0 && rest.len() < size {
            break;
        }
        let query = admin.next_query(rest.get(..size).unwrap_or(rest));
        let mut located = 0;
        let mut count_located = |key: &str, replicas: &KeyReplicas<'_>| {
            if replicas.ok
                && let Some(object) = ObjectKey::parse(key)
            {
                located += 1;
                found(&object, replicas);
            }
        };
        let busy = locate(admin, &query, order, &mut count_located).await?;
        summary.located += located;
        summary.missing += (query.requested as u64).saturating_sub(located);
        summary.unqueryable += query.skipped as u64;
        summary.lookup_time += busy;
        from += query.consumed;
        tokio::time::sleep(pause_after(busy, options.busy_share).min(MAX_PAUSE)).await;
    }
    keys.drain(..from);
    Ok(())
}

/// Sends one lookup request, with retries. Returns the response time.
async fn locate(
    admin: &AdminClient,
    query: &BatchKeyQuery,
    order: &Mutex<()>,
    found: &mut impl FnMut(&str, &KeyReplicas<'_>),
) -> Result<Duration, AdminError> {
    let mut retries = MAX_RETRIES;
    loop {
        let result = {
            let _guard = order.lock().await;
            admin.locate_part(query, found).await
        };
        match result {
            Err(error) if error.is_transient() && retries > 0 => {
                retries -= 1;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            result => return result,
        }
    }
}

/// The pause after which `busy` is at most its share of the time.
fn pause_after(busy: Duration, share: f64) -> Duration {
    // A share of 0 or NaN must not stop the snapshot forever.
    let share = if share >= 0.001 { share.min(1.0) } else { 0.001 };
    busy.mul_f64(1.0 / share - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_keep_lookups_within_their_share() {
        let busy = Duration::from_millis(10);
        assert_eq!(pause_after(busy, 0.05), Duration::from_millis(190));
        assert_eq!(pause_after(busy, 1.0), Duration::ZERO);
        assert_eq!(pause_after(busy, 7.0), Duration::ZERO);
        assert_eq!(pause_after(busy, 0.0), Duration::from_millis(9990));
        assert_eq!(pause_after(busy, f64::NAN), Duration::from_millis(9990));
    }

    #[test]
    fn pauses_between_snapshots_limit_the_share_of_lists() {
        let seconds = Duration::from_secs;
        let options = StoreSnapshotOptions { list_share: 0.02, ..StoreSnapshotOptions::default() };
        let summary = StoreSnapshotSummary {
            list_time: seconds(10),
            elapsed: seconds(30),
            ..StoreSnapshotSummary::default()
        };
        assert_eq!(summary.pause_before_next(&options), seconds(470));
        assert_eq!(
            StoreSnapshotSummary { elapsed: seconds(501), ..summary }.pause_before_next(&options),
            Duration::ZERO
        );
        let with_locations = StoreSnapshotSummary {
            lookup_time: seconds(4),
            elapsed: seconds(9),
            ..StoreSnapshotSummary::default()
        };
        assert_eq!(with_locations.pause_before_next(&options), seconds(71));
    }
}
