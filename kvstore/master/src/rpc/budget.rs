//! Memory limit for all connections together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes per connection that do not count.
pub(super) const ALLOWANCE: usize = 64 * 1024;

/// Bytes that all connections use beyond their allowances.
#[derive(Debug)]
pub(super) struct BufferBudget {
    used: AtomicUsize,
    limit: usize,
}

impl BufferBudget {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), limit })
    }
}

/// The share of one connection, released on drop.
#[derive(Debug)]
pub(super) struct BufferReservation {
    budget: Arc<BufferBudget>,
    bytes: usize,
}

impl BufferReservation {
    pub(super) fn new(budget: &Arc<BufferBudget>) -> Self {
        Self { budget: Arc::clone(budget), bytes: 0 }
    }

    /// Sets the total capacity of the connection's buffers. Returns whether the budget allows it.
    pub(super) fn set(&mut self, capacity: usize) -> bool {
        let bytes = capacity.saturating_sub(ALLOWANCE);
        if bytes == self.bytes {
            return true;
        }
        let total = if bytes > self.bytes {
            self.budget.used.fetch_add(bytes - self.bytes, Relaxed) + (bytes - self.bytes)
        } else {
            self.budget.used.fetch_sub(self.bytes - bytes, Relaxed);
            0
        };
        self.bytes = bytes;
        total <= self.budget.limit
    }
}

impl Drop for BufferReservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_share_the_budget_beyond_their_allowances() {
        let budget = BufferBudget::new(1000);
        let (mut one, mut other) = (BufferReservation::new(&budget), BufferReservation::new(&budget));
        assert!(one.set(ALLOWANCE) && one.set(ALLOWANCE + 600));
        assert!(other.set(ALLOWANCE + 400));
        assert!(!other.set(ALLOWANCE + 401));
        drop(one);
        assert!(other.set(ALLOWANCE + 1000));
        assert!(other.set(10));
        assert_eq!(budget.used.load(Relaxed), 0);
    }
}
