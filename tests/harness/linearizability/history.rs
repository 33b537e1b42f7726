//! What clients have seen, as it is recorded.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use parking_lot::Mutex;

use super::checker::{KeyOperation, RecordedCall, check};

/// A clock that all clients share, and their calls by key.
#[derive(Default)]
pub(crate) struct CallHistory {
    /// Its keys are no other history's.
    pub(super) number: u64,
    clock: AtomicU64,
    next_value: AtomicU64,
    calls: Mutex<BTreeMap<String, Vec<RecordedCall>>>,
}

impl CallHistory {
    pub(crate) fn new(number: u64) -> Self {
        Self { number, ..Self::default() }
    }

    pub(super) fn now(&self) -> u64 {
        self.clock.fetch_add(1, SeqCst)
    }

    /// A value that was not written yet.
    pub(super) fn new_value(&self) -> u64 {
        self.next_value.fetch_add(1, SeqCst)
    }

    /// Records a call that has been answered now.
    pub(super) fn record_response(&self, key: &str, operation: KeyOperation, called: u64) {
        let answered = Some(self.now());
        self.record(key, RecordedCall { operation, call_time: called, response_time: answered });
    }

    /// Records a call that may have taken effect, or may still.
    pub(super) fn record_no_response(&self, key: &str, operation: KeyOperation, called: u64) {
        self.record(key, RecordedCall { operation, call_time: called, response_time: None });
    }

    fn record(&self, key: &str, call: RecordedCall) {
        self.calls.lock().entry(key.to_owned()).or_default().push(call);
    }

    /// Whether one register per key explains all that was read.
    pub(crate) fn check(&self) -> CheckedCalls {
        let mut seen = CheckedCalls::default();
        for (key, calls) in self.calls.lock().iter() {
            let explained = check(calls);
            assert!(explained.is_ok(), "{key}: {explained:?}");
            for call in calls {
                match (call.operation, call.response_time) {
                    (_, None) => seen.unanswered += 1,
                    (KeyOperation::Read(_), _) => seen.reads += 1,
                    _ => seen.writes += 1,
                }
            }
        }
        seen
    }
}

/// How many calls were checked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CheckedCalls {
    pub(crate) reads: usize,
    pub(crate) writes: usize,
    pub(crate) unanswered: usize,
}

impl std::ops::AddAssign for CheckedCalls {
    fn add_assign(&mut self, more: Self) {
        self.reads += more.reads;
        self.writes += more.writes;
        self.unanswered += more.unanswered;
    }
}
