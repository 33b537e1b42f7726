//! Which beginnings of prompts have been sent before.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of beginnings that are kept: 256 MiB of text in segments of 4 KiB. A power of two.
const SLOTS: usize = 1 << 16;

/// Beginnings of prompts' texts, by their keys. Each is kept until another one takes its place.
#[derive(Debug)]
pub(crate) struct SeenTexts {
    slots: Box<[AtomicU64]>,
}

impl SeenTexts {
    pub(crate) fn new() -> Self {
        Self { slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Adds the beginnings of a prompt.
    pub(super) fn add(&self, keys: &[u64]) {
        for &key in keys {
            let slot = self.slot(key);
            // A store of an equal value would take the cache line from other processors.
            if slot.load(Ordering::Relaxed) != key {
                slot.store(key, Ordering::Relaxed);
            }
        }
    }

    /// How many of a prompt's beginnings, from the shortest on, have been sent before: all up to the longest that is known, since others may
    /// have taken the places of shorter ones.
    pub(super) fn count(&self, keys: &[u64]) -> usize {
        let is_seen = |key: &u64| self.slot(*key).load(Ordering::Relaxed) == *key;
        keys.iter().rposition(is_seen).map_or(0, |longest| longest + 1)
    }

    fn slot(&self, key: u64) -> &AtomicU64 {
        &self.slots[key as usize % SLOTS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_are_kept_until_others_take_their_place() {
        let seen = SeenTexts::new();
        seen.add(&[1, 2, 3]);
        assert_eq!(seen.count(&[1, 2, 4, 5]), 2);
        assert_eq!(seen.count(&[4, 5]), 0);
        seen.add(&[2 + SLOTS as u64]);
        assert_eq!(seen.count(&[1, 2]), 1);
        assert_eq!(seen.count(&[1, 2, 3]), 3);
    }
}
