//! Which objects were written so recently that others have to go before them.
//!
//! What was written is not leased, so when all else is, it would be all that can be evicted: a put would be answered and the object
//! gone with the next one. So the youngest part of the pool is protected for as long as a lease takes, and writers get
//! `NO_AVAILABLE_HANDLE` when nothing else can go.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

/// The most of the pool that is protected, as a share.
const MAX_SHARE: f64 = 0.25;
/// Steps into which the protected part is divided: the resolution of its beginning.
const RESOLUTION: u64 = 32;
/// Steps that are remembered: those of the protected part, and some for steps that are larger than they should be.
const MAX_MARKS: usize = 64;

/// How many bytes had been written at a time.
#[derive(Clone, Copy, Debug)]
struct WriteMark {
    at_ms: u64,
    written: u64,
}

/// The last writes.
#[derive(Debug, Default)]
pub(crate) struct RecentWrites {
    /// Bytes that are protected at most.
    window: AtomicU64,
    written: AtomicU64,
    /// The sum from which on the next mark is made.
    next_mark: AtomicU64,
    marks: Mutex<VecDeque<WriteMark>>,
}

/// Times of writes that are protected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteProtection {
    after_ms: u64,
}

impl WriteProtection {
    /// Whether an object is protected that was written then and has not been read.
    pub(crate) fn contains(self, written_at_ms: u64) -> bool {
        written_at_ms > self.after_ms
    }
}

impl RecentWrites {
    /// The pool has another size. `share` of it may be free or is freed at a time.
    pub(crate) fn resize(&self, capacity: u64, share: f64) {
        self.window.store((capacity as f64 * share.clamp(0.0, MAX_SHARE)) as u64, Relaxed);
    }

    /// So many bytes have been written.
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

    /// What is protected now, for at most `time_ms` each.
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
    fn the_youngest_part_is_protected_for_a_while() {
        let writes = RecentWrites::default();
        writes.resize(1000, 0.1);
        assert!(!writes.protected(0, 50).contains(0));
        for now_ms in 100..200 {
            writes.add(now_ms, 10);
        }
        let protected = writes.protected(200, 50);
        assert!(!protected.contains(189) && protected.contains(190) && protected.contains(199));
        assert!(!writes.protected(245, 50).contains(195) && writes.protected(245, 50).contains(196));
        // At least what was written last.
        writes.add(300, 500);
        let protected = writes.protected(300, 50);
        assert!(!protected.contains(199) && protected.contains(300));
    }
}
