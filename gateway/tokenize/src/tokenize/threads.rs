//! Keeps the tokenizer on the thread that calls it.
//!
//! The library spreads long texts over a pool of its own. For prompts that costs more than it saves (measured: 4 to 10 times slower
//! with two threads), and a pool that spins would take cores from the streams. Its number of threads can be set by an environment
//! variable only, which is not ours to set in a running process. But it is also at most the number of processors that the thread may
//! use which asks for the pool first, so the first to ask is a thread bound to one processor.

use std::sync::Once;

/// Makes sure that no pool is started. Without effect on systems where a thread cannot be bound; there only the speed suffers.
pub(super) fn disable_thread_pool() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let bound = std::thread::Builder::new().name("tokenizer-setup".to_owned()).spawn(|| {
            bind_to_one_processor();
            fastokens::fanout::threads()
        });
        let threads = bound.ok().and_then(|thread| thread.join().ok());
        if threads != Some(1) {
            tracing::warn!(?threads, "long prompts are tokenised on several threads, which is slower");
        }
    });
}

#[cfg(target_os = "linux")]
fn bind_to_one_processor() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    let Ok(allowed) = sched_getaffinity(None) else { return };
    let Some(first) = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)) else { return };
    let mut one = CpuSet::new();
    one.set(first);
    if let Err(error) = sched_setaffinity(None, &one) {
        tracing::debug!(%error, "a thread cannot be bound to a processor");
    }
}

#[cfg(not(target_os = "linux"))]
fn bind_to_one_processor() {}
