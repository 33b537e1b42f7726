//! Counts the calls, outcomes and latency of each RPC.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{DescribedObjects, ReturnHint};
use mooncake_wire::rpc::RpcMethod;

/// Number of latency buckets. Bucket `n` counts calls shorter than `2^n` times [`MIN_LATENCY_BOUND`]; the last one counts the rest.
pub const LATENCY_BUCKETS: usize = 24;
/// Upper bound of the first latency bucket.
pub const MIN_LATENCY_BOUND: Duration = Duration::from_nanos(256);

/// The upper bound of a latency bucket; `None` for the last.
pub fn latency_bound(bucket: usize) -> Option<Duration> {
    (bucket + 1 < LATENCY_BUCKETS).then(|| MIN_LATENCY_BOUND.saturating_mul(1 << bucket))
}

/// Outcome of one call, for the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallOutcome {
    /// Number of objects in a batch; 0 for other calls.
    pub items: u64,
    /// Number of objects in the batch that failed.
    pub failed_items: u64,
    /// Whether the call failed as a whole.
    pub failed: bool,
    /// Number of objects that failed because they existed already.
    pub already_exists: u64,
}

/// A reply from which the outcome of its call is derived.
pub(crate) trait ReplyOutcome {
    fn outcome(&self) -> CallOutcome;
}

impl<T> ReplyOutcome for Result<T, ErrorCode> {
    fn outcome(&self) -> CallOutcome {
        let already_exists = u64::from(exists_already(self));
        CallOutcome { failed: self.is_err(), already_exists, ..CallOutcome::default() }
    }
}

/// A batch has failed if all of its objects failed.
impl<T> ReplyOutcome for Vec<Result<T, ErrorCode>> {
    fn outcome(&self) -> CallOutcome {
        let failed_items = self.iter().filter(|result| result.is_err()).count() as u64;
        let items = self.len() as u64;
        let already_exists = self.iter().filter(|result| exists_already(result)).count() as u64;
        CallOutcome { items, failed_items, failed: items > 0 && failed_items == items, already_exists }
    }
}

fn exists_already<T>(result: &Result<T, ErrorCode>) -> bool {
    matches!(result, Err(code) if *code == ErrorCode::OBJECT_ALREADY_EXISTS)
}

impl ReplyOutcome for i64 {
    fn outcome(&self) -> CallOutcome {
        CallOutcome { failed: *self < 0, ..CallOutcome::default() }
    }
}

#[derive(Debug, Default)]
struct AtomicCallCounts {
    requests: AtomicU64,
    failures: AtomicU64,
    items: AtomicU64,
    failed_items: AtomicU64,
    partial_successes: AtomicU64,
    already_exists: AtomicU64,
    nanoseconds: AtomicU64,
    latency: [AtomicU64; LATENCY_BUCKETS],
}

/// Counters of one RPC since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    pub requests: u64,
    /// Calls that failed as a whole.
    pub failures: u64,
    pub items: u64,
    /// Objects in batches that failed.
    pub failed_items: u64,
    /// Batches in which some objects failed, but not all.
    pub partial_successes: u64,
    /// Objects that failed because they existed already.
    pub already_exists: u64,
    /// Total duration of the calls in nanoseconds, without the network.
    pub nanoseconds: u64,
    /// Calls by duration; see [`latency_bound`].
    pub latency: [u64; LATENCY_BUCKETS],
}

/// Counts calls. Every serving thread has its own lane, to avoid contention.
#[derive(Debug)]
pub struct RpcCounters {
    lanes: Box<[Box<[AtomicCallCounts]>]>,
    /// Requests with an unknown function id.
    unknown_functions: AtomicU64,
    unknown_arguments: AtomicU64,
    /// Changes of objects that were rejected because they could not be persisted.
    refused_writes: AtomicU64,
    /// Prompts that gateways described, by [`ReturnHint`].
    described_prompts: [AtomicU64; 3],
    /// Objects of these prompts: those that existed, and those that did not.
    described_objects: [AtomicU64; 2],
}

impl RpcCounters {
    /// All counters at zero, for this number of threads.
    pub fn new(lanes: usize) -> Self {
        let lane = || RpcMethod::ALL.iter().map(|_| AtomicCallCounts::default()).collect();
        Self {
            lanes: (0..lanes.max(1)).map(|_| lane()).collect(),
            unknown_functions: AtomicU64::new(0),
            unknown_arguments: AtomicU64::new(0),
            refused_writes: AtomicU64::new(0),
            described_prompts: Default::default(),
            described_objects: Default::default(),
        }
    }

    pub(crate) fn add(&self, lane: usize, method: RpcMethod, outcome: CallOutcome, elapsed: Duration) {
        let Some(cell) = self.lanes.get(lane).and_then(|cells| cells.get(method as usize)) else { return };
        let nanoseconds = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        cell.requests.fetch_add(1, Relaxed);
        cell.nanoseconds.fetch_add(nanoseconds, Relaxed);
        let units = nanoseconds / MIN_LATENCY_BOUND.as_nanos() as u64;
        let bucket = (u64::BITS - units.leading_zeros()) as usize;
        if let Some(bucket) = cell.latency.get(bucket.min(LATENCY_BUCKETS - 1)) {
            bucket.fetch_add(1, Relaxed);
        }
        if outcome.failed {
            cell.failures.fetch_add(1, Relaxed);
        }
        if outcome.already_exists > 0 {
            cell.already_exists.fetch_add(outcome.already_exists, Relaxed);
        }
        if outcome.items > 0 {
            cell.items.fetch_add(outcome.items, Relaxed);
            cell.failed_items.fetch_add(outcome.failed_items, Relaxed);
            let partial = outcome.failed_items > 0 && !outcome.failed;
            cell.partial_successes.fetch_add(u64::from(partial), Relaxed);
        }
    }

    pub(crate) fn add_unknown_function(&self) {
        self.unknown_functions.fetch_add(1, Relaxed);
    }

    pub(crate) fn add_unknown_arguments(&self) {
        self.unknown_arguments.fetch_add(1, Relaxed);
    }

    pub(crate) fn add_refused_writes(&self, objects: usize) {
        self.refused_writes.fetch_add(objects as u64, Relaxed);
    }

    /// Changes that were rejected because they could not be persisted; every object of a batch counts.
    pub fn refused_writes(&self) -> u64 {
        self.refused_writes.load(Relaxed)
    }

    pub(crate) fn add_described_prompt(&self, returns: ReturnHint, objects: DescribedObjects) {
        self.described_prompts[returns as usize].fetch_add(1, Relaxed);
        let [existing, announced] = &self.described_objects;
        existing.fetch_add(objects.existing, Relaxed);
        announced.fetch_add(objects.announced, Relaxed);
    }

    /// Objects of described prompts.
    pub fn described_objects(&self) -> DescribedObjects {
        let [existing, announced] = &self.described_objects;
        DescribedObjects { existing: existing.load(Relaxed), announced: announced.load(Relaxed) }
    }

    /// Prompts that gateways described with this hint.
    pub fn described_prompts(&self, returns: ReturnHint) -> u64 {
        self.described_prompts[returns as usize].load(Relaxed)
    }

    /// Requests that were rejected because of an unknown function id.
    pub fn unknown_functions(&self) -> u64 {
        self.unknown_functions.load(Relaxed)
    }

    /// Requests that were rejected because no known release has their argument layout.
    pub fn unknown_arguments(&self) -> u64 {
        self.unknown_arguments.load(Relaxed)
    }

    /// Sums of one RPC over all lanes.
    pub fn call_counts(&self, method: RpcMethod) -> CallCounts {
        let mut sum = CallCounts::default();
        for cell in self.lanes.iter().filter_map(|cells| cells.get(method as usize)) {
            sum.requests += cell.requests.load(Relaxed);
            sum.failures += cell.failures.load(Relaxed);
            sum.items += cell.items.load(Relaxed);
            sum.failed_items += cell.failed_items.load(Relaxed);
            sum.partial_successes += cell.partial_successes.load(Relaxed);
            sum.already_exists += cell.already_exists.load(Relaxed);
            sum.nanoseconds += cell.nanoseconds.load(Relaxed);
            for (sum, bucket) in sum.latency.iter_mut().zip(&cell.latency) {
                *sum += bucket.load(Relaxed);
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_sum_over_lanes() {
        let counters = RpcCounters::new(2);
        let batch: Vec<Result<(), _>> = vec![Ok(()), Err(ErrorCode::OBJECT_NOT_FOUND), Ok(())];
        counters.add(0, RpcMethod::BatchPutEnd, batch.outcome(), Duration::from_nanos(100));
        let none: Vec<Result<(), _>> =
            vec![Err(ErrorCode::OBJECT_NOT_FOUND), Err(ErrorCode::OBJECT_ALREADY_EXISTS)];
        counters.add(1, RpcMethod::BatchPutEnd, none.outcome(), Duration::from_micros(1));
        let counts = counters.call_counts(RpcMethod::BatchPutEnd);
        assert_eq!((counts.requests, counts.failures, counts.partial_successes), (2, 1, 1));
        assert_eq!((counts.items, counts.failed_items, counts.nanoseconds), (5, 3, 1100));
        assert_eq!(counts.already_exists, 1);
        assert_eq!((counts.latency[0], counts.latency[2]), (1, 1));
        assert_eq!(counters.call_counts(RpcMethod::PutEnd), CallCounts::default());
    }

    #[test]
    fn a_duration_is_below_the_bound_of_its_bucket() {
        for (nanoseconds, expected) in
            [(0, 0), (255, 0), (256, 1), (511, 1), (512, 2), (u64::MAX, LATENCY_BUCKETS - 1)]
        {
            let counters = RpcCounters::new(1);
            counters.add(0, RpcMethod::Ping, CallOutcome::default(), Duration::from_nanos(nanoseconds));
            let bucket =
                counters.call_counts(RpcMethod::Ping).latency.iter().position(|count| *count > 0).unwrap();
            assert_eq!(bucket, expected, "{nanoseconds}");
            assert!(latency_bound(bucket).is_none_or(|bound| Duration::from_nanos(nanoseconds) < bound));
        }
    }
}
