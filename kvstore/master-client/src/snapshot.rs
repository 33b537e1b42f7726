//! All pages that a store has, and where they are.
//!
//! The master tells what changes, if at all (its build for PyPI publishes no events), but not what is there. So an
//! index of its content begins with a snapshot: list all keys, keep those of pages, ask where they are. Listing a key
//! costs the master about a microsecond and looking it up two to three, a million of them seconds in which it does
//! little else; so the requests are spread.

use std::time::{Duration, Instant};

use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::key::ObjectKey;
use tokio::sync::Mutex;

use crate::admin::{AdminClient, AdminError, BatchKeyQuery, KeyStream};

/// How often a look-up that was not answered is tried again: the list that it belongs to is dear.
const MAX_RETRIES: u32 = 5;
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after a request. A machine that is busy with other work makes requests look dear; this keeps a snapshot of millions
/// of keys from taking hours, and leaves the master idle for 98 % of the time all the same.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// How a snapshot is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreSnapshotOptions {
    /// The share of time in which the master may be busy with our look-ups, more than 0 and up to 1. How long a
    /// request takes, seen from here, counts as the time for which the master was busy, up to some milliseconds.
    pub busy_share: f64,
    /// The same for the list of keys, between snapshots. While the master puts it together it answers nobody, and each gateway has
    /// it do so.
    pub list_share: f64,
    /// How many keys are looked up by one request, unless [`crate::admin::StoreSnapshotOptions::max_url`] allows fewer. It
    /// bounds for how long the master is busy without a pause.
    pub chunk: usize,
}

impl Default for StoreSnapshotOptions {
    fn default() -> Self {
        Self { busy_share: 0.05, list_share: 0.01, chunk: 512 }
    }
}

/// What a snapshot has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreSnapshotSummary {
    /// Keys that the master listed.
    pub listed: u64,
    /// Keys that are no page's, or not wanted.
    pub skipped: u64,
    /// Keys that were located.
    pub located: u64,
    /// Keys whose objects were gone, or not readable, when they were looked up.
    pub missing: u64,
    /// Keys that cannot be asked for; see [`AdminClient::locate`].
    pub unqueryable: u64,
    /// For how long the master put the list of keys together.
    pub list_time: Duration,
    /// For how long requests that locate objects were under way.
    pub lookup_time: Duration,
    /// How long it took.
    pub elapsed: Duration,
}

impl StoreSnapshotSummary {
    /// How long to wait before the next snapshot, so that the list of keys takes no more than its share of the master's time.
    /// Look-ups are spread while the snapshot is taken.
    #[must_use]
    pub fn list_pause(&self, options: &StoreSnapshotOptions) -> Duration {
        let before_next = self.list_time + pause_after(self.list_time, options.list_share);
        before_next.saturating_sub(self.elapsed)
    }
}

/// Reads what the store has. `wanted` chooses among the keys of pages: a caller that knows that some parts of a
/// page stand for all of them saves the look-ups of the others. `found` is told where the object of each of these
/// keys is. `turn` is held from each question until its answer was told: who asks the master for single objects at
/// the same time, and takes turns, applies answers in the order in which the master gave them. What changes meanwhile
/// may be seen or not. To give up, drop the future.
///
/// # Errors
/// When the master does not answer. Then `found` has been told a part.
pub async fn read(
    admin: &AdminClient,
    options: &StoreSnapshotOptions,
    turn: &Mutex<()>,
    wanted: impl Fn(&ObjectKey<'_>) -> bool,
    mut found: impl FnMut(&ObjectKey<'_>, &KeyReplicas<'_>),
) -> Result<StoreSnapshotSummary, AdminError> {
    let begun = Instant::now();
    let mut summary = StoreSnapshotSummary::default();
    let mut keys = admin.keys().await?;
    summary.list_time = begun.elapsed();
    let mut chunk = Vec::new();
    while fill(&mut chunk, &mut keys, options, &wanted, &mut summary).await? {
        locate_chunks(admin, options, turn, &mut chunk, &mut found, &mut summary).await?;
    }
    summary.unqueryable += keys.dropped();
    summary.listed += keys.dropped();
    summary.elapsed = begun.elapsed();
    Ok(summary)
}

/// Lists keys until there is a chunk of them. False if there are none left.
async fn fill(
    chunk: &mut Vec<String>,
    keys: &mut KeyStream,
    options: &StoreSnapshotOptions,
    wanted: &impl Fn(&ObjectKey<'_>) -> bool,
    summary: &mut StoreSnapshotSummary,
) -> Result<bool, AdminError> {
    while chunk.len() < options.chunk.max(1) {
        let Some(page) = keys.next().await? else { break };
        for key in page.iter() {
            summary.listed += 1;
            match ObjectKey::parse(key) {
                Some(page) if wanted(&page) => chunk.push(key.to_owned()),
                _ => summary.skipped += 1,
            }
        }
    }
    Ok(!chunk.is_empty())
}

/// Locates whole chunks, and rests after each. What does not make a chunk stays, unless there is nothing else.
async fn locate_chunks(
    admin: &AdminClient,
    options: &StoreSnapshotOptions,
    turn: &Mutex<()>,
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
        let mut told = |key: &str, replicas: &KeyReplicas<'_>| {
            if replicas.ok
                && let Some(page) = ObjectKey::parse(key)
            {
                located += 1;
                found(&page, replicas);
            }
        };
        let busy = locate(admin, &query, turn, &mut told).await?;
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

/// Sends one request, if need be several times. Returns for how long the master was at it.
async fn locate(
    admin: &AdminClient,
    query: &BatchKeyQuery,
    turn: &Mutex<()>,
    told: &mut impl FnMut(&str, &KeyReplicas<'_>),
) -> Result<Duration, AdminError> {
    let mut retries = MAX_RETRIES;
    loop {
        let answer = {
            let _turn = turn.lock().await;
            admin.locate_part(query, told).await
        };
        match answer {
            Err(error) if error.is_transient() && retries > 0 => {
                retries -= 1;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// The pause by which `busy` becomes no more than its share of the time.
fn pause_after(busy: Duration, share: f64) -> Duration {
    // A share that is none must not stop the snapshot for good.
    let share = if share >= 0.001 { share.min(1.0) } else { 0.001 };
    busy.mul_f64(1.0 / share - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_leave_the_master_its_time() {
        let busy = Duration::from_millis(10);
        assert_eq!(pause_after(busy, 0.05), Duration::from_millis(190));
        assert_eq!(pause_after(busy, 1.0), Duration::ZERO);
        assert_eq!(pause_after(busy, 7.0), Duration::ZERO);
        assert_eq!(pause_after(busy, 0.0), Duration::from_millis(9990));
        assert_eq!(pause_after(busy, f64::NAN), Duration::from_millis(9990));
    }

    #[test]
    fn the_list_is_paid_for_after_the_snapshot() {
        let seconds = Duration::from_secs;
        let options = StoreSnapshotOptions { list_share: 0.02, ..StoreSnapshotOptions::default() };
        let summary = StoreSnapshotSummary {
            list_time: seconds(10),
            elapsed: seconds(30),
            ..StoreSnapshotSummary::default()
        };
        assert_eq!(summary.list_pause(&options), seconds(470));
        assert_eq!(
            StoreSnapshotSummary { elapsed: seconds(501), ..summary }.list_pause(&options),
            Duration::ZERO
        );
    }
}
