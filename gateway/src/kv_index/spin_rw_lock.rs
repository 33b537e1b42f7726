//! A lock for critical sections of a few microseconds.
//!
//! A thread that sleeps while waiting is woken some ten microseconds later, and a writer that sleeps blocks readers in the
//! meantime. So threads spin at first, and sleep only when the lock's owner was probably preempted.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Attempts before a thread sleeps: about ten microseconds.
const SPIN_TRIES: u32 = 1000;

/// One writer or many readers. Hold it for a few microseconds at most.
#[derive(Debug, Default)]
pub struct SpinRwLock<T> {
    value: RwLock<T>,
    /// Number of waiting writers. Readers let them go first; otherwise readers with many steps would starve them.
    waiting_writers: AtomicUsize,
}

impl<T> SpinRwLock<T> {
    pub fn new(value: T) -> Self {
        Self { value: RwLock::new(value), waiting_writers: AtomicUsize::new(0) }
    }

    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        // Only a hint: the lock itself orders memory.
        let no_writer_waits = || self.waiting_writers.load(Ordering::Relaxed) == 0;
        spin(|| if no_writer_waits() { self.value.try_read() } else { None })
            .unwrap_or_else(|| self.value.read())
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        if let Some(guard) = self.value.try_write() {
            return guard;
        }
        self.waiting_writers.fetch_add(1, Ordering::Relaxed);
        let guard = spin(|| self.value.try_write()).unwrap_or_else(|| self.value.write());
        self.waiting_writers.fetch_sub(1, Ordering::Relaxed);
        guard
    }
}

fn spin<G>(mut get: impl FnMut() -> Option<G>) -> Option<G> {
    (0..SPIN_TRIES).find_map(|_| {
        let guard = get();
        if guard.is_none() {
            spin_loop();
        }
        guard
    })
}
