//! The clock that engine and load generator share.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`, which all processes of one machine read alike.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Keeps the runtime's thread from sleeping; the core goes to other processes that have something to do.
pub(crate) async fn busy_poll() {
    loop {
        std::thread::yield_now();
        tokio::task::yield_now().await;
    }
}
