//! The allocator of all commands, and the return of freed memory to the system.

use std::hint::black_box;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

/// mimalloc returns the freed memory of large bodies to the system sooner, and forwarding them takes less time than with the
/// system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A second longer than mimalloc's delay, after which the freed memory may be returned.
const PERIOD: Duration = Duration::from_secs(2);
/// An allocation of this size has a page of its own.
const OWN_PAGE: usize = 1 << 20;

/// Returns freed memory to the system every two seconds.
///
/// mimalloc returns memory only when a thread frees one of its pages more than a second later. An idle process frees none, so what
/// loading a tokenizer or a burst of large bodies took would stay allocated.
pub(crate) async fn return_freed_memory() {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        drop(black_box(Vec::<u8>::with_capacity(OWN_PAGE)));
    }
}
