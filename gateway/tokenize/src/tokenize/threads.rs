//! Disables the tokenizer library's thread pool, so that tokenization runs on the calling thread.
//!
//! The library distributes long texts over its own thread pool. For prompts this is slower (measured: 4 to 10 times with two threads), and
//! the pool's busy-waiting threads would take CPU time from the response streams. The library has no API for the size of the pool, only an
//! environment variable, which a process cannot set safely while other threads run. But the pool has at most as many threads as the thread
//! that first uses it may use processors. So the first use is on a thread bound to one processor.

use std::sync::Once;

/// Prevents the library from starting its pool. On systems other than Linux this has no effect, and long prompts are tokenized more slowly.
pub(super) fn disable_thread_pool() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let setup = std::thread::Builder::new().name("tokenizer-setup".to_owned()).spawn(|| {
            bind_to_one_processor();
            fastokens::fanout::threads()
        });
        let threads = setup.ok().and_then(|thread| thread.join().ok());
        if threads != Some(1) {
            tracing::warn!(
                ?threads,
                "could not disable the tokenizer's thread pool; long prompts are tokenized more slowly"
            );
        }
    });
}

#[cfg(target_os = "linux")]
fn bind_to_one_processor() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    let Ok(allowed) = sched_getaffinity(None) else { return };
    let Some(first) = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)) else { return };
    let mut cpus = CpuSet::new();
    cpus.set(first);
    if let Err(error) = sched_setaffinity(None, &cpus) {
        tracing::debug!(%error, "could not bind the tokenizer setup thread to one processor");
    }
}

#[cfg(not(target_os = "linux"))]
fn bind_to_one_processor() {}
