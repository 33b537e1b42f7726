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

use crate::admin::{Admin, AdminError, Keys, Query};

/// How often a look-up that was not answered is tried again: the list that it belongs to is dear.
const RETRIES: u32 = 5;
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after a request. A machine that is busy with other work makes requests look dear; this keeps a snapshot of millions
/// of keys from taking hours, and leaves the master idle for 98 % of the time all the same.
const LONGEST_REST: Duration = Duration::from_millis(100);

/// How a snapshot is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// The share of time in which the master may be busy with our look-ups, more than 0 and up to 1. How long a
    /// request takes, seen from here, counts as the time for which the master was busy, up to some milliseconds.
    pub busy_share: f64,
    /// The same for the list of keys, between snapshots. While the master puts it together it answers nobody, and each gateway has
    /// it do so.
    pub list_share: f64,
    /// How many keys are looked up by one request, unless [`crate::admin::Options::max_url`] allows fewer. It
    /// bounds for how long the master is busy without a pause.
    pub chunk: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { busy_share: 0.05, list_share: 0.01, chunk: 512 }
    }
}

/// What a snapshot has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Keys that the master listed.
    pub listed: u64,
    /// Keys that are no page's, or not wanted.
    pub passed_over: u64,
    /// Keys that were located.
    pub located: u64,
    /// Keys whose objects were gone, or not readable, when they were looked up.
    pub gone: u64,
    /// Keys that cannot be asked for; see [`Admin::locate`].
    pub left_out: u64,
    /// For how long the master put the list of keys together.
    pub listing: Duration,
    /// For how long requests that locate objects were under way.
    pub busy: Duration,
    /// How long it took.
    pub took: Duration,
}

impl Summary {
    /// How long to wait before the next snapshot, so that the list of keys takes no more than its share of the master's time.
    /// Look-ups are spread while the snapshot is taken.
    #[must_use]
    pub fn rest(&self, options: &Options) -> Duration {
        let before_next = self.listing + rest_after(self.listing, options.list_share);
        before_next.saturating_sub(self.took)
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
    admin: &Admin,
    options: &Options,
    turn: &Mutex<()>,
    wanted: impl Fn(&ObjectKey<'_>) -> bool,
    mut found: impl FnMut(&ObjectKey<'_>, &KeyReplicas<'_>),
) -> Result<Summary, AdminError> {
    let begun = Instant::now();
    let mut summary = Summary::default();
    let mut keys = admin.keys().await?;
    summary.listing = begun.elapsed();
    let mut chunk = Vec::new();
    while fill(&mut chunk, &mut keys, options, &wanted, &mut summary).await? {
        look_up(admin, options, turn, &mut chunk, &mut found, &mut summary).await?;
    }
    summary.left_out += keys.dropped();
    summary.listed += keys.dropped();
    summary.took = begun.elapsed();
    Ok(summary)
}

/// Lists keys until there is a chunk of them. False if there are none left.
async fn fill(
    chunk: &mut Vec<String>,
    keys: &mut Keys,
    options: &Options,
    wanted: &impl Fn(&ObjectKey<'_>) -> bool,
    summary: &mut Summary,
) -> Result<bool, AdminError> {
    while chunk.len() < options.chunk.max(1) {
        let Some(page) = keys.next().await? else { break };
        for key in page.iter() {
            summary.listed += 1;
            match ObjectKey::parse(key) {
                Some(page) if wanted(&page) => chunk.push(key.to_owned()),
                _ => summary.passed_over += 1,
            }
        }
    }
    Ok(!chunk.is_empty())
}

/// Locates whole chunks, and rests after each. What does not make a chunk stays, unless there is nothing else.
async fn look_up(
    admin: &Admin,
    options: &Options,
    turn: &Mutex<()>,
    keys: &mut Vec<String>,
    found: &mut impl FnMut(&ObjectKey<'_>, &KeyReplicas<'_>),
    summary: &mut Summary,
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
        summary.gone += (query.asked as u64).saturating_sub(located);
        summary.left_out += query.left_out as u64;
        summary.busy += busy;
        from += query.taken;
        tokio::time::sleep(rest_after(busy, options.busy_share).min(LONGEST_REST)).await;
    }
    keys.drain(..from);
    Ok(())
}

/// Sends one request, if need be several times. Returns for how long the master was at it.
async fn locate(
    admin: &Admin,
    query: &Query,
    turn: &Mutex<()>,
    told: &mut impl FnMut(&str, &KeyReplicas<'_>),
) -> Result<Duration, AdminError> {
    let mut retries = RETRIES;
    loop {
        let answer = {
            let _turn = turn.lock().await;
            admin.locate_part(query, told).await
        };
        match answer {
            Err(error) if error.may_pass() && retries > 0 => {
                retries -= 1;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// The pause by which `busy` becomes no more than its share of the time.
fn rest_after(busy: Duration, share: f64) -> Duration {
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
        assert_eq!(rest_after(busy, 0.05), Duration::from_millis(190));
        assert_eq!(rest_after(busy, 1.0), Duration::ZERO);
        assert_eq!(rest_after(busy, 7.0), Duration::ZERO);
        assert_eq!(rest_after(busy, 0.0), Duration::from_millis(9990));
        assert_eq!(rest_after(busy, f64::NAN), Duration::from_millis(9990));
    }

    #[test]
    fn the_list_is_paid_for_after_the_snapshot() {
        let seconds = Duration::from_secs;
        let options = Options { list_share: 0.02, ..Options::default() };
        let summary = Summary { listing: seconds(10), took: seconds(30), ..Summary::default() };
        assert_eq!(summary.rest(&options), seconds(470));
        assert_eq!(Summary { took: seconds(501), ..summary }.rest(&options), Duration::ZERO);
    }
}
