//! All pages that a store has, and where they are.
//!
//! The master has no change feed, and its build for PyPI publishes no events. So an index of its content begins
//! with a snapshot: list all keys, keep those of pages, ask where they are. Looking up a key costs the master two
//! to three microseconds, a million of them seconds in which it does little else; so the requests are spread.

use std::time::{Duration, Instant};

use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::key::ObjectKey;

use crate::admin::{Admin, AdminError, Keys};

/// How a snapshot is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// The share of time in which the master may be busy with our look-ups, more than 0 and up to 1. How long a
    /// request takes, seen from here, counts as the time for which the master was busy.
    pub busy_share: f64,
    /// How many keys are looked up by one request, unless [`crate::admin::Options::max_url`] allows fewer. It
    /// bounds for how long the master is busy without a pause.
    pub chunk: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { busy_share: 0.05, chunk: 512 }
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
    /// For how long requests were under way.
    pub busy: Duration,
    /// How long it took.
    pub took: Duration,
}

/// Reads what the store has. `wanted` chooses among the keys of pages: a caller that knows that some parts of a
/// page stand for all of them saves the look-ups of the others. `found` is told where the object of each of these
/// keys is. What changes meanwhile may be seen or not. To give up, drop the future.
///
/// # Errors
/// When the master does not answer. Then `found` has been told a part.
pub async fn read(
    admin: &Admin,
    options: &Options,
    wanted: impl Fn(&ObjectKey<'_>) -> bool,
    mut found: impl FnMut(&ObjectKey<'_>, &KeyReplicas<'_>),
) -> Result<Summary, AdminError> {
    let begun = Instant::now();
    let mut summary = Summary::default();
    let mut keys = admin.keys().await?;
    let mut chunk = Vec::new();
    while fill(&mut chunk, &mut keys, options, &wanted, &mut summary).await? {
        look_up(admin, options, &mut chunk, &mut found, &mut summary).await?;
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
        let busy = admin.locate_part(&query, &mut told).await?;
        summary.located += located;
        summary.gone += (query.asked as u64).saturating_sub(located);
        summary.left_out += query.left_out as u64;
        summary.busy += busy;
        from += query.taken;
        tokio::time::sleep(rest_after(busy, options.busy_share)).await;
    }
    keys.drain(..from);
    Ok(())
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
}
