//! A lock for work of a few microseconds.
//!
//! Who sleeps while waiting is woken some ten microseconds later, and a writer that sleeps keeps readers out meanwhile. So
//! everybody tries again and again at first, and sleeps only where the lock's owner was probably interrupted.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// How often somebody tries before going to sleep: for some ten microseconds.
const SPIN_TRIES: u32 = 1000;

/// One writer or many readers. Hold it for some microseconds at most.
#[derive(Debug, Default)]
pub(crate) struct SpinRwLock<T> {
    value: RwLock<T>,
    /// Writers that wait. Readers let them pass, or those that read in many steps would keep them out.
    waiting_writers: AtomicUsize,
}

impl<T> SpinRwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: RwLock::new(value), waiting_writers: AtomicUsize::new(0) }
    }

    /// The value, to read.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        // Only a hint: the lock itself orders memory.
        let free = || self.waiting_writers.load(Ordering::Relaxed) == 0;
        spin(|| if free() { self.value.try_read() } else { None }).unwrap_or_else(|| self.value.read())
    }

    /// The value, to change.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
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
        let got = get();
        if got.is_none() {
            spin_loop();
        }
        got
    })
}
