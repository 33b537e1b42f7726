//! Protection of recently written objects from eviction.
//!
//! New objects have no lease. If all others are leased, the next put would evict an object whose put has just ended. So the most
//! recently written part of the pool is protected for the duration of a lease, and writers get `NO_AVAILABLE_HANDLE` when nothing
//! else can be evicted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

/// Maximum share of the pool that is protected.
const MAX_SHARE: f64 = 0.25;
/// Number of marks per protected window: the resolution of its start.
const RESOLUTION: u64 = 32;
/// Maximum number of marks: those of the window, and a reserve for marks further apart than intended.
const MAX_MARKS: usize = 64;

/// Total bytes written up to a time.
#[derive(Clone, Copy, Debug)]
struct WriteMark {
    at_ms: u64,
    written: u64,
}

/// Running total of written bytes, with marks of the most recent ones.
#[derive(Debug, Default)]
pub(crate) struct RecentWrites {
    /// Maximum number of protected bytes.
    window: AtomicU64,
    written: AtomicU64,
    /// Total at which the next mark is added.
    next_mark: AtomicU64,
    marks: Mutex<VecDeque<WriteMark>>,
}

/// The protected range of write times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteProtection {
    after_ms: u64,
}

impl WriteProtection {
    /// Whether an unread object written at this time is protected.
    pub(crate) fn contains(self, written_at_ms: u64) -> bool {
        written_at_ms > self.after_ms
    }
}

impl RecentWrites {
    /// Sets the size of the pool. `share` is the share above the high watermark plus the share that one round of eviction frees.
    pub(crate) fn resize(&self, capacity: u64, share: f64) {
        self.window.store((capacity as f64 * share.clamp(0.0, MAX_SHARE)) as u64, Relaxed);
    }

    /// Adds bytes written at `now_ms`.
    pub(crate) fn add(&self, now_ms: u64, bytes: u64) {
        let before = self.written.fetch_add(bytes, Relaxed);
        let written = before.saturating_add(bytes);
        if written < self.next_mark.load(Relaxed) {
            return;
        }
        let mut marks = self.marks.lock();
        self.next_mark.store(written.saturating_add(self.window.load(Relaxed) / RESOLUTION).max(1), Relaxed);
        if marks.is_empty() {
            marks.push_back(WriteMark { at_ms: now_ms.saturating_sub(1), written: before });
        }
        if marks.back().is_some_and(|last| last.at_ms >= now_ms) {
            return;
        }
        marks.push_back(WriteMark { at_ms: now_ms, written });
        if marks.len() > MAX_MARKS {
            marks.pop_front();
        }
    }

    /// The range protected now: the last window of bytes, for at most `time_ms` after each write.
    pub(crate) fn protected(&self, now_ms: u64, time_ms: u64) -> WriteProtection {
        let window = self.window.load(Relaxed);
        let begin = self.written.load(Relaxed).checked_sub(window);
        let marks = self.marks.lock();
        let before = |mark: &&WriteMark| begin.is_some_and(|begin| mark.written <= begin);
        let mark = marks.iter().rev().find(before).or(marks.front());
        let after_ms = match mark {
            Some(mark) if window > 0 => mark.at_ms.max(now_ms.saturating_sub(time_ms)),
            _ => u64::MAX,
        };
        WriteProtection { after_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_writes_are_protected_for_a_limited_time() {
        let writes = RecentWrites::default();
        writes.resize(1000, 0.1);
        assert!(!writes.protected(0, 50).contains(0));
        for now_ms in 100..200 {
            writes.add(now_ms, 10);
        }
        let protected = writes.protected(200, 50);
        assert!(!protected.contains(189) && protected.contains(190) && protected.contains(199));
        assert!(!writes.protected(245, 50).contains(195) && writes.protected(245, 50).contains(196));
        // The last write is always protected.
        writes.add(300, 500);
        let protected = writes.protected(300, 50);
        assert!(!protected.contains(199) && protected.contains(300));
    }
}
