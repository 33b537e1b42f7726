//! Clock shared by mock engines and load generator.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`, which is the same for all processes of one machine.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Prevents the runtime's thread from sleeping; it yields the core to other runnable processes.
pub(crate) async fn busy_poll() {
    loop {
        std::thread::yield_now();
        tokio::task::yield_now().await;
    }
}
