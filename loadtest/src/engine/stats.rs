//! Counters of an engine.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// Maximum number of recorded aborts.
const MAX_RECORDED_ABORTS: usize = 1_024;
/// Maximum number of requests recorded for inspection.
pub(crate) const MAX_RECORDED_REQUESTS: usize = 64;
/// Maximum bytes of recorded request bodies.
const MAX_RECORDED_BODY_BYTES: usize = 16 * 1024 * 1024;

/// Why a request was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AbortKind {
    /// The client closed the connection.
    Disconnect,
    /// An `/abort_request` call matched its id.
    Rid,
}

/// An aborted request with its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortEvent {
    pub kind: AbortKind,
    pub rid: String,
    /// Time in milliseconds since 1970.
    pub at_unix_ms: u64,
}

/// A snapshot of an engine's counters. Request counters count HTTP requests, not the choices of `n`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SimStats {
    /// Generation requests whose body was read.
    pub started: u64,
    /// … that were answered completely.
    pub finished: u64,
    /// … that ended in an engine error, injected faults included.
    pub failed: u64,
    /// … whose client disconnected.
    pub aborted_by_disconnect: u64,
    /// … that were aborted by `/abort_request`.
    pub aborted_by_rid: u64,
    /// … that are open now.
    pub active: u64,
    /// Choices whose prefill has not started, or that wait for a slot in the batch.
    pub waiting: u64,
    /// Prompt tokens of waiting choices that are in no cache.
    pub waiting_uncached_tokens: u64,
    /// Choices whose prompt is being computed or that generate now.
    pub running: u64,
    /// Tokens of running choices: their prompts and the maximum of their output.
    pub used_tokens: u64,
    /// Prefill choices that wait for their decode engine.
    pub bootstrapping: u64,
    /// Choices whose KV cache is being transferred.
    pub transferring: u64,
    /// Requests to load a LoRA adapter, whatever the result.
    pub adapter_load_requests: u64,
    /// LoRA adapters loaded.
    pub adapter_loads: u64,
    /// Tokenization requests (`/tokenize`, `…/render`), whatever the result.
    pub tokenize_requests: u64,
    pub open_connections: u64,
    /// Requests decoded with another prompt's KV cache, hence with wrong tokens.
    pub prompt_mismatches: u64,
    /// KV caches sent to a decode engine.
    pub kv_sent: u64,
    /// KV caches received from a prefill engine.
    pub kv_received: u64,
    /// Decode requests without usable transfer parameters, computed from scratch (vLLM).
    pub recomputed: u64,
    /// Prompt tokens of prefilled choices.
    pub prompt_tokens: u64,
    /// … of them found in the device cache.
    pub cached_device_tokens: u64,
    /// … in the host cache.
    pub cached_host_tokens: u64,
    /// … in the shared store.
    pub cached_storage_tokens: u64,
    /// Objects that a real store returned intact.
    pub store_hits: u64,
    /// … that it did not have.
    pub store_misses: u64,
    /// … that it returned with other bytes than were put.
    pub store_corrupt: u64,
    /// … whose lookup or read failed. Except for hits, pages are computed.
    pub store_failures: u64,
    /// Objects put into a real store.
    pub store_puts: u64,
    /// … whose put failed.
    pub store_put_failures: u64,
    /// Prompt tokens received from a prefill engine.
    pub transferred_tokens: u64,
    pub completion_tokens: u64,
    /// Microseconds of prefill work done, in the time of the imitated engine.
    pub prefill_busy_us: u64,
    pub by_dp_rank: Vec<u64>,
    /// The latest aborts, oldest first.
    pub aborts: VecDeque<AbortEvent>,
}

#[derive(Debug, Clone)]
pub struct RecordedRequest {
    pub method: String,
    pub target: String,
    /// Headers in order of arrival.
    pub headers: Vec<(String, String)>,
    pub body: Bytes,
}

/// The engine's counters. Every change wakes waiting tasks.
#[derive(Debug)]
pub(crate) struct SimStatsRecorder {
    current: watch::Sender<SimStats>,
    recent_requests: Mutex<VecDeque<RecordedRequest>>,
}

impl SimStatsRecorder {
    pub(crate) fn new(dp_size: u32) -> Self {
        let first = SimStats { by_dp_rank: vec![0; dp_size as usize], ..SimStats::default() };
        Self { current: watch::Sender::new(first), recent_requests: Mutex::new(VecDeque::new()) }
    }

    pub(crate) fn snapshot(&self) -> SimStats {
        self.current.borrow().clone()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut SimStats)) {
        self.current.send_modify(change);
    }

    pub(crate) fn read<T>(&self, read: impl FnOnce(&SimStats) -> T) -> T {
        read(&self.current.borrow())
    }

    pub(crate) async fn wait_for(
        &self,
        timeout: Duration,
        mut condition: impl FnMut(&SimStats) -> bool,
    ) -> bool {
        let mut receiver = self.current.subscribe();
        tokio::time::timeout(timeout, receiver.wait_for(|stats| condition(stats)))
            .await
            .is_ok_and(|result| result.is_ok())
    }

    pub(crate) fn abort(&self, kind: AbortKind, rid: &str) {
        let event = AbortEvent { kind, rid: rid.to_owned(), at_unix_ms: unix_ms() };
        self.update(|stats| {
            match kind {
                AbortKind::Disconnect => stats.aborted_by_disconnect += 1,
                AbortKind::Rid => stats.aborted_by_rid += 1,
            }
            if stats.aborts.len() == MAX_RECORDED_ABORTS {
                stats.aborts.pop_front();
            }
            stats.aborts.push_back(event);
        });
    }

    pub(crate) fn record(&self, request: RecordedRequest) {
        let mut last = self.recent_requests.lock();
        last.push_back(request);
        let mut bytes: usize = last.iter().map(|request| request.body.len()).sum();
        while last.len() > MAX_RECORDED_REQUESTS || (bytes > MAX_RECORDED_BODY_BYTES && last.len() > 1) {
            bytes -= last.pop_front().map_or(0, |dropped| dropped.body.len());
        }
    }

    /// The latest requests, oldest first.
    pub(crate) fn recent_requests(&self, count: usize) -> Vec<RecordedRequest> {
        let last = self.recent_requests.lock();
        last.iter().skip(last.len().saturating_sub(count)).cloned().collect()
    }
}

type GaugeUpdate = fn(&mut SimStats, i64);

/// Adds to a gauge, and subtracts the same amount on drop.
pub(crate) struct SimGaugeGuard {
    stats: Arc<SimStatsRecorder>,
    add: GaugeUpdate,
    amount: i64,
}

impl SimGaugeGuard {
    pub(crate) fn new(stats: &Arc<SimStatsRecorder>, amount: usize, add: GaugeUpdate) -> Self {
        let amount = i64::try_from(amount).unwrap_or(i64::MAX);
        stats.update(|stats| add(stats, amount));
        Self { stats: Arc::clone(stats), add, amount }
    }
}

impl Drop for SimGaugeGuard {
    fn drop(&mut self) {
        let (add, amount) = (self.add, self.amount);
        self.stats.update(|stats| add(stats, -amount));
    }
}

pub(crate) fn unix_ms() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// Seconds since 1970, with the fraction.
pub(crate) fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
