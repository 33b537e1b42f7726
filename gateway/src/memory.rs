//! Budgets of the memory that all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use moongate_runtime::LogRateLimiter;

/// Reservations up to this size may use the whole budget. Larger ones may use three quarters, so that a few large requests cannot
/// block all others.
const SMALL_BYTES: u64 = 1 << 20;

/// An amount of memory that many requests share.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    /// The flag that sets the limit.
    flag: &'static str,
    limit: u64,
    used: AtomicU64,
    rejected: AtomicU64,
    warnings: LogRateLimiter,
}

/// A [`MemoryBudget`] has not enough memory left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryExhausted;

/// A part of a [`MemoryBudget`], released on drop.
#[derive(Debug)]
pub(crate) struct MemoryReservation {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

/// Bytes whose memory is reserved until the last reference is dropped.
struct ReservedBytes {
    bytes: Bytes,
    _reservation: MemoryReservation,
}

impl MemoryBudget {
    /// `flag` is the setting of the limit, for logs.
    pub(crate) fn new(flag: &'static str, limit: u64) -> Arc<Self> {
        let warnings = LogRateLimiter::new();
        Arc::new(Self { flag, limit, used: AtomicU64::new(0), rejected: AtomicU64::new(0), warnings })
    }

    /// Number of failed reservations since the last call.
    pub(crate) fn take_rejected(&self) -> u64 {
        self.rejected.swap(0, Ordering::Relaxed)
    }

    /// Bytes that are reserved now.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// The largest reservation that can succeed.
    pub(crate) fn max_request(&self) -> u64 {
        let without_share = self.limit - self.limit / 4;
        without_share.max(self.limit.min(SMALL_BYTES))
    }

    pub(crate) fn reserve(self: &Arc<Self>, bytes: usize) -> Result<MemoryReservation, MemoryExhausted> {
        let mut reservation = MemoryReservation { budget: self.clone(), bytes: 0 };
        reservation.grow(bytes)?;
        Ok(reservation)
    }
}

impl MemoryReservation {
    /// Reserves more. On failure, the reservation is unchanged.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), MemoryExhausted> {
        let more = bytes as u64;
        let budget = &*self.budget;
        let limit = if self.bytes + more > SMALL_BYTES { budget.max_request() } else { budget.limit };
        let before = budget.used.fetch_add(more, Ordering::Relaxed);
        if before + more > limit {
            budget.used.fetch_sub(more, Ordering::Relaxed);
            budget.rejected.fetch_add(1, Ordering::Relaxed);
            if budget.warnings.is_due() {
                tracing::warn!(
                    used = before,
                    limit = budget.limit,
                    "no memory left for a request; see {}",
                    budget.flag
                );
            }
            return Err(MemoryExhausted);
        }
        self.bytes += more;
        Ok(())
    }

    /// Keeps the reservation for as long as any part of `bytes` is referenced.
    pub(crate) fn attach(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(ReservedBytes { bytes, _reservation: self })
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl AsRef<[u8]> for ReservedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn a_reservation_lives_as_long_as_its_bytes() {
        let budget = MemoryBudget::new("--body-memory", 8 << 20);
        let bytes = budget.reserve(100).unwrap().attach(Bytes::from(vec![7; 100]));
        let part = bytes.slice(90..);
        drop(bytes);
        assert_eq!((budget.used(), &part[..]), (100, &[7; 10][..]));
        drop(part);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn large_reservations_leave_a_quarter_for_small_ones() {
        let budget = MemoryBudget::new("--body-memory", 8 << 20);
        let mut large = budget.reserve(5 * MIB).unwrap();
        assert_eq!(large.grow(2 * MIB), Err(MemoryExhausted));
        assert_eq!(
            (budget.used(), budget.take_rejected()),
            (5 << 20, 1),
            "a failure changes nothing but its count"
        );
        large.grow(MIB).unwrap();
        assert!(budget.reserve(MIB + 1).is_err());
        let _small = [budget.reserve(MIB).unwrap(), budget.reserve(MIB).unwrap()];
        assert!(budget.reserve(1).is_err());
        drop(large);
        assert!(budget.reserve(MIB).is_ok());
    }
}
