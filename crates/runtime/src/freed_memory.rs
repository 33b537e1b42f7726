//! Returns freed memory to the system while a process is idle.

use std::hint::black_box;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

/// A second longer than the delay after which mimalloc may return freed memory.
const PERIOD: Duration = Duration::from_secs(2);
/// mimalloc gives an allocation of this size a page of its own.
const OWN_PAGE: usize = 1 << 20;

/// Returns memory that mimalloc has freed to the system every two seconds. Does not end.
///
/// mimalloc does that only when a thread frees one of its pages more than a second later. An idle process frees none, so it would retain
/// what the load of a tokenizer, large bodies or removed objects took.
pub async fn return_freed_memory() {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        drop(black_box(Vec::<u8>::with_capacity(OWN_PAGE)));
    }
}
