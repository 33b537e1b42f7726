//! Learns from reads and writes which objects will be read again, and values them for eviction.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwap;
use moongate_retention::{
    BlockClass, LearnedCountsError, PromptDescription, PromptLength, RetentionValues, ReturnTimeLearner,
    TrialHits,
};
use parking_lot::Mutex;

use crate::change::{StateChange, StateChangeSink};
use crate::object_table::KeyLocation;

/// Maximum number of keys whose uses are learned from.
const MAX_SAMPLED: usize = 16_384;
/// Time between two computations of the values, in milliseconds.
const REFRESH_MS: u64 = 20_000;

/// Time between two records of what was learned, in milliseconds. A record has up to 35 KB.
const EMIT_MS: u64 = 300_000;

/// Maximum difference between the write times of a call's keys, in milliseconds: too little to change a value noticeably.
const MAX_STAGGER_MS: usize = 999;
/// Keys whose leases end in the same millisecond: few enough for the order, and clients do not notice the longer leases.
const KEYS_PER_LEASE_MS: usize = 16;
const MAX_LEASE_EXTENSION_MS: usize = 63;

/// A call's read or write of one of its keys. The keys of a prompt come in its order, and a prefix is worth more than
/// what follows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyUse {
    pub(crate) now_ms: u64,
    /// Number of keys before it in the call.
    position: usize,
    /// Number of keys of the call.
    keys: usize,
    /// What is known about the prompt; calls of engines show only its length.
    pub(crate) description: PromptDescription,
}

impl KeyUse {
    /// The use by a call with a single key.
    pub(crate) fn single(now_ms: u64) -> Self {
        Self::of_batch(now_ms, 0, 1)
    }

    /// The use of the key at this position of a call with this many keys.
    pub(crate) fn of_batch(now_ms: u64, position: usize, keys: usize) -> Self {
        let description =
            PromptDescription { length: PromptLength::of_keys(keys), ..PromptDescription::default() };
        Self { now_ms, position, keys, description }
    }

    /// The same use, when more is known about the prompt.
    pub(crate) fn described(self, description: PromptDescription) -> Self {
        Self { description, ..self }
    }

    /// By how much its lease ends later than that of the call's last key.
    pub(crate) fn lease_extension_ms(self) -> u64 {
        (self.keys.saturating_sub(self.position + 1) / KEYS_PER_LEASE_MS).min(MAX_LEASE_EXTENSION_MS) as u64
    }

    /// By how much it counts as written earlier than the call's first key.
    pub(crate) fn write_stagger_ms(self) -> u64 {
        self.position.min(MAX_STAGGER_MS) as u64
    }
}

/// Learner of return times, and the values by its last computation.
#[derive(Debug)]
pub(crate) struct ObjectRetention {
    learner: Mutex<ReturnTimeLearner>,
    /// The learner's largest sampled hash, readable without its lock; 0 if nothing is learned.
    max_hash: AtomicU64,
    values: ArcSwap<RetentionValues>,
    refresh_at_ms: AtomicU64,
    /// When the next record of what was learned is due; 0 before the first tick.
    emit_at_ms: AtomicU64,
}

impl ObjectRetention {
    pub(crate) fn new(enabled: bool) -> Self {
        Self {
            max_hash: AtomicU64::new(if enabled { u64::MAX } else { 0 }),
            learner: Mutex::new(ReturnTimeLearner::new(MAX_SAMPLED)),
            values: ArcSwap::default(),
            refresh_at_ms: AtomicU64::new(0),
            emit_at_ms: AtomicU64::new(0),
        }
    }

    /// The values of keeping objects. Without learning, or before anything was learned, all are zero.
    pub(crate) fn values(&self) -> Arc<RetentionValues> {
        self.values.load_full()
    }

    pub(crate) fn trial_hits(&self) -> TrialHits {
        self.learner.lock().trial_hits()
    }

    /// Observes that a key was used, and is of this class from now on.
    pub(crate) fn record_use(&self, now_ms: u64, location: KeyLocation, class: BlockClass) {
        self.with_sampled(location, |learner, hash| learner.record_use(now_ms, hash, class));
    }

    /// Observes what is known about the last use of a key: it is of this class from now on.
    pub(crate) fn record_description(&self, now_ms: u64, location: KeyLocation, class: BlockClass) {
        self.with_sampled(location, |learner, hash| learner.record_description(now_ms, hash, class));
    }

    /// Observes that an absent key was read.
    pub(crate) fn record_miss(&self, now_ms: u64, location: KeyLocation) {
        self.with_sampled(location, |learner, hash| learner.record_miss(now_ms, hash));
    }

    fn with_sampled(&self, location: KeyLocation, record: impl FnOnce(&mut ReturnTimeLearner, u64)) {
        let hash = location.hash();
        if hash > self.max_hash.load(Relaxed) {
            return;
        }
        let mut learner = self.learner.lock();
        record(&mut learner, hash);
        self.max_hash.store(learner.max_hash(), Relaxed);
    }

    /// Emits what was learned, if anything was.
    pub(crate) fn emit_state(&self, fx: &mut dyn StateChangeSink) {
        let learner = self.learner.lock();
        if learner.has_counts() {
            fx.record(StateChange::ReturnTimes { counts: learner.counts().into() });
        }
    }

    /// [`Self::emit_state`], every few minutes.
    pub(crate) fn emit_when_due(&self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        if self.max_hash.load(Relaxed) == 0 || now_ms < self.emit_at_ms.load(Relaxed) {
            return;
        }
        // The first call only starts the interval.
        if self.emit_at_ms.swap(now_ms.saturating_add(EMIT_MS), Relaxed) != 0 {
            self.emit_state(fx);
        }
    }

    /// Continues with what an earlier master has learned.
    pub(crate) fn restore(&self, counts: &[u8]) -> Result<(), LearnedCountsError> {
        self.learner.lock().restore(counts)
    }

    /// Recomputes the values if they are older than the refresh interval. `stored` returns the number of objects.
    pub(crate) fn refresh(&self, now_ms: u64, stored: impl FnOnce() -> u64) {
        if self.max_hash.load(Relaxed) == 0 || now_ms < self.refresh_at_ms.load(Relaxed) {
            return;
        }
        self.refresh_at_ms.store(now_ms.saturating_add(REFRESH_MS), Relaxed);
        let stored = stored();
        let values = self.learner.lock().values(now_ms, stored);
        self.values.store(Arc::new(values));
    }
}
